//! `convert`: a matrix in another element type, with its rows in order: what products ask of X that they cannot read in
//! place, and an operation of its own.

use qgemm_formats::DType;

use super::dense::Dense;
use super::{Operation, operands};
use crate::kernel_id::{KernelId, spec};

/// `D[r, c] = X[r, order[c]] · 2^e(r)`, rounded to nearest even; validated by the API.
///
/// Without an order, D's columns beyond X's are 0 and X's beyond D's are left out. An entry of the order that is no column of X,
/// such as [`NO_COLUMN`](qgemm_formats::NO_COLUMN), makes a column of zeros. `e` is 0 unless
/// [`CheckedConvert::row_factors`] asks for it.
///
/// Numbers beyond f16's range become infinite there; finite ones beyond bf16's largest become that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckedConvert {
    /// Rows of X and D; at least 1.
    pub rows: usize,
    /// Columns of X; at least 1.
    pub columns: usize,
    /// Columns of D; at least 1. As many as the order has entries.
    pub d_columns: usize,
    /// X, with any strides.
    pub x: Dense,
    /// D, row-major.
    pub d: Dense,
    /// Whether an order says which column of X each column of D is.
    pub gathers: bool,
    /// Whether each row is multiplied by a power of two so that X's largest finite value in it lies in [2¹⁴, 2¹⁵), which f16
    /// holds whatever the row's magnitude was; the inverse is written to [`ConvertOperand::RowFactors`]. Rows below 2⁻¹¹² are
    /// multiplied by 2¹²⁶. Columns of X that D leaves out count, too.
    pub row_factors: bool,
}

operands! {
    /// What `convert` reads and writes.
    pub enum ConvertOperand {
        /// The matrix.
        X: "x" Read,
        /// Column of D → column of X, a `u32` each.
        Order: "the column order" Constant,
        /// The result.
        D: "d" Write,
        /// What every row of D is to be multiplied with, in f32.
        RowFactors: "the row factors" Write,
    }
}

spec! {
    /// What tells the kernels of `convert` apart.
    pub struct ConvertSpec {
        /// Element type of X.
        x: DType,
        /// Element type of D.
        d: DType,
        /// Whether the kernel reads columns of X and writes rows.
        transposed: bool,
        /// Whether it multiplies rows by powers of two; `false` of kernels that are told at run time.
        row_factors: bool,
        /// Whether it writes whole groups of eight columns, aligned, and no others; `false` of kernels that write any.
        whole_groups: bool,
    }
}

impl ConvertSpec {
    /// The keys of the kernel that is made for what `op` asks, and no more.
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

/// A kernel of a family, as the scheduler sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConvertConfig {
    /// The kernel.
    pub kernel: KernelId,
    /// Share of the device's bandwidth that it reaches, per mille.
    pub efficiency: u32,
}

/// A configuration with what the scheduler expects of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConvertPlan {
    /// The configuration.
    pub config: ConvertConfig,
    /// Seconds that it is expected to take.
    pub estimate: f64,
}

impl CheckedConvert {
    /// Bytes of X that are read.
    fn x_bytes(&self) -> f64 {
        self.rows as f64 * self.columns.min(self.d_columns) as f64 * self.x.dtype.bytes() as f64
    }
}

impl Operation for CheckedConvert {
    const NAME: &'static str = "convert";
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
}
