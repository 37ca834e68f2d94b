//! `dequantize`: dequantization of X, for products whose
//! kernels do not support its format.

use qgemm_formats::{XFactor, XFormat};

use super::gemm::XPlanes;
use super::{Operation, memory_bound, operands};
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Spec, spec};

/// Dequantization: `D[r, c] = (code · scale) · factor` in f32
/// for every stored column; validated by the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckedDequantize {
    /// Tokens; at least 1.
    pub rows: usize,
    /// Columns of X; at least 1.
    pub columns: usize,
    /// The format of X.
    pub format: XFormat,
    /// Layout of its planes.
    pub planes: XPlanes,
}

operands! {
    /// Operands of `dequantize`.
    pub enum DequantizeOperand {
        /// The codes.
        Codes: "the codes" Read,
        /// The scales.
        Scales: "the scales" Read,
        /// Factor of each token, or one factor
        /// for all of X; f32.
        Factors: "the factors" Read,
        /// The dequantized values.
        D: "d" Write,
    }
}

spec! {
    /// Kernel identity keys of `dequantize`.
    pub struct DequantizeSpec {
        /// The format of X.
        from: XFormat,
        /// Whether one factor is given for all of X.
        given_factor: bool,
    }
}

impl DequantizeSpec {
    /// Keys of the kernel specialized for `op`.
    pub fn of(op: &CheckedDequantize) -> Self {
        Self { from: op.format, given_factor: op.planes.parts.factor == XFactor::Given }
    }
}

/// A candidate kernel of a family, with what the
/// scheduler ranks it by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DequantizeConfig {
    /// The kernel.
    pub kernel: KernelId,
    /// Reached share of the device's bandwidth, per mille.
    pub efficiency: u32,
}

/// A config with its estimated time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DequantizePlan {
    /// The config.
    pub config: DequantizeConfig,
    /// Estimated seconds.
    pub estimate: f64,
}

impl Operation for CheckedDequantize {
    type Operand = DequantizeOperand;
    type Config = DequantizeConfig;
    type Plan = DequantizePlan;

    fn operands(&self) -> Vec<DequantizeOperand> {
        use DequantizeOperand as O;
        let parts = &self.planes.parts;
        let optional = [
            (true, O::Codes),
            (parts.scale.is_some(), O::Scales),
            (parts.factor != XFactor::None, O::Factors),
            (true, O::D),
        ];
        optional.into_iter().filter(|(is_there, _)| *is_there).map(|(_, operand)| operand).collect()
    }

    fn traffic(&self) -> f64 {
        let (parts, k) = (&self.planes.parts, self.columns);
        let written = self.d_columns() * self.d().dtype.bytes();
        self.rows as f64 * (parts.code_bytes(k) + parts.scale_bytes(k) + written) as f64
    }

    fn macs(&self) -> f64 {
        0.0
    }

    fn describe(&self) -> String {
        let Self { rows, columns, format, .. } = self;
        format!("{rows} x {columns} from {format}")
    }

    fn is_nothing(&self) -> bool {
        self.rows == 0 || self.columns == 0
    }

    fn config(plan: &DequantizePlan) -> &DequantizeConfig {
        &plan.config
    }

    fn estimate(plan: &DequantizePlan) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &DequantizePlan) -> KernelId {
        plan.config.kernel
    }

    fn noop_config(&self) -> Result<DequantizeConfig, Unsupported> {
        let kernel = KernelId::new("noop", None, Spec::Dequantize(DequantizeSpec::of(self)));
        Ok(DequantizeConfig { kernel, efficiency: 1000 })
    }
}

memory_bound!(CheckedDequantize, DequantizeConfig, DequantizePlan, |_| 1);
