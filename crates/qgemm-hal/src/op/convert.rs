//! `convert`: type and layout conversion, as a separate operation
//! and as X prologue of products.

use qgemm_formats::DType;

use super::dense::Dense;
use super::{Operation, memory_bound, operands};
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Spec, spec};

/// Type and layout conversion: `D[r, c] = X[r, order[c]] · 2^e(r)`,
/// rounded to nearest even; validated by the API.
///
/// Without an order, columns of D beyond X are 0, and
/// columns of X beyond D are dropped. An order entry outside
/// X, such as [`NO_COLUMN`](qgemm_formats::NO_COLUMN), yields a zero
/// column. `e` is 0 unless [`CheckedConvert::row_factors`] is set.
///
/// Values beyond the f16 range become infinite. Finite values beyond the
/// bf16 range become the largest finite bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckedConvert {
    /// Rows of X and D; at least 1.
    pub rows: usize,
    /// Columns of X; at least 1.
    pub columns: usize,
    /// Columns of D; at least 1. Equal to the length
    /// of the order, if given.
    pub d_columns: usize,
    /// X, with any strides.
    pub x: Dense,
    /// D, row-major.
    pub d: Dense,
    /// Whether an order maps columns of D to columns of X.
    pub gathers: bool,
    /// Whether each row is scaled by a power of
    /// two, so that its largest finite value is in
    /// [2¹⁴, 2¹⁵) and fits f16.
    ///
    /// The inverse factor is written to
    /// [`ConvertOperand::RowFactors`]. Rows below 2⁻¹¹² are multiplied
    /// by 2¹²⁶. Columns of X that D drops count as well.
    pub row_factors: bool,
}

operands! {
    /// Operands of `convert`.
    pub enum ConvertOperand {
        /// The matrix.
        X: "x" Read,
        /// Column of D → column of X, u32.
        Order: "the column order" Constant,
        /// The result.
        D: "d" Write,
        /// Inverse row factors, f32: multiply each
        /// row of D by its factor.
        RowFactors: "the row factors" Write,
    }
}

spec! {
    /// Kernel identity keys of `convert`.
    pub struct ConvertSpec {
        /// Element type of X.
        x: DType,
        /// Element type of D.
        d: DType,
        /// Whether X is column-major and the kernel transposes it to rows.
        transposed: bool,
        /// Whether the kernel scales rows by powers of two; `false` when
        /// that is a run-time parameter.
        row_factors: bool,
        /// Whether the kernel only writes aligned groups of eight
        /// columns; `false` for any columns.
        whole_groups: bool,
    }
}

impl ConvertSpec {
    /// Keys of the kernel specialized for `op`.
    pub fn of(op: &CheckedConvert) -> Self {
        Self {
            x: op.x.dtype,
            d: op.d.dtype,
            transposed: op.x.col_stride != 1,
            row_factors: op.row_factors,
            whole_groups: op.d.aligned16 && op.d_columns.is_multiple_of(8),
        }
    }
}

/// A candidate kernel of a family, with what the
/// scheduler ranks it by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConvertConfig {
    /// The kernel.
    pub kernel: KernelId,
    /// Reached share of the device's bandwidth, per mille.
    pub efficiency: u32,
}

/// A config with its estimated time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConvertPlan {
    /// The config.
    pub config: ConvertConfig,
    /// Estimated seconds.
    pub estimate: f64,
}

impl CheckedConvert {
    /// Bytes of X that are read.
    fn x_bytes(&self) -> f64 {
        self.rows as f64 * self.columns.min(self.d_columns) as f64 * self.x.dtype.bytes() as f64
    }
}

impl Operation for CheckedConvert {
    type Operand = ConvertOperand;
    type Config = ConvertConfig;
    type Plan = ConvertPlan;

    fn operands(&self) -> Vec<ConvertOperand> {
        let optional = [(self.gathers, ConvertOperand::Order), (self.row_factors, ConvertOperand::RowFactors)];
        let given = optional.into_iter().filter(|(is_given, _)| *is_given).map(|(_, operand)| operand);
        [ConvertOperand::X, ConvertOperand::D].into_iter().chain(given).collect()
    }

    fn traffic(&self) -> f64 {
        let d = self.rows as f64 * self.d_columns as f64 * self.d.dtype.bytes() as f64;
        let order = if self.gathers { self.d_columns as f64 * 4.0 } else { 0.0 };
        let factors = if self.row_factors { self.rows as f64 * 4.0 } else { 0.0 };
        self.x_bytes() + d + order + factors
    }

    fn macs(&self) -> f64 {
        0.0
    }

    fn describe(&self) -> String {
        let Self { rows, columns, x, d, .. } = self;
        let layout = if x.col_stride == 1 { "" } else { ", transposed" };
        let gathers = if self.gathers { ", gathered" } else { "" };
        format!("{rows} x {columns} from {} to {}{layout}{gathers}", x.dtype, d.dtype)
    }

    fn is_nothing(&self) -> bool {
        // Factors of rows without columns are not written, either.
        self.rows == 0 || self.d_columns == 0
    }

    fn config(plan: &ConvertPlan) -> &ConvertConfig {
        &plan.config
    }

    fn estimate(plan: &ConvertPlan) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &ConvertPlan) -> KernelId {
        plan.config.kernel
    }

    fn noop_config(&self) -> Result<ConvertConfig, Unsupported> {
        let kernel = KernelId::new("noop", None, Spec::Convert(ConvertSpec::of(self)));
        Ok(ConvertConfig { kernel, efficiency: 1000 })
    }
}

memory_bound!(CheckedConvert, ConvertConfig, ConvertPlan, |_| 1);
