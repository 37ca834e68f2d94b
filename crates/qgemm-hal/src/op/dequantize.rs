//! `dequantize`: a quantized X as plain numbers: what precedes products whose kernels do not multiply its codes.

use qgemm_formats::{XFactor, XFormat};

use super::gemm::XPlanes;
use super::{Operation, operands};
use crate::kernel_id::{KernelId, spec};

/// `D[r, c] = (code · scale) · factor` in f32, of every stored column; validated by the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckedDequantize {
    /// Tokens; at least 1.
    pub rows: usize,
    /// Columns of X; at least 1.
    pub columns: usize,
    /// The format of X.
    pub format: XFormat,
    /// Its planes.
    pub planes: XPlanes,
}

operands! {
    /// What `dequantize` reads and writes.
    pub enum DequantizeOperand {
        /// The codes.
        Codes: "the codes" Read,
        /// The scales.
        Scales: "the scales" Read,
        /// The factors of tokens, or the one that is given for all of X, in f32.
        Factors: "the factors" Read,
        /// The numbers.
        D: "d" Write,
    }
}

spec! {
    /// What tells the kernels of `dequantize` apart.
    pub struct DequantizeSpec {
        /// The format of X.
        from: XFormat,
        /// Whether one factor is given for all of X.
        given_factor: bool,
    }
}

impl DequantizeSpec {
    /// The keys of the kernel that is made for what `op` asks.
    pub fn of(op: &CheckedDequantize) -> Self {
        Self { from: op.format, given_factor: op.planes.parts.factor == XFactor::Given }
    }
}

/// A kernel of a family, as the scheduler sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DequantizeConfig {
    /// The kernel.
    pub kernel: KernelId,
    /// Share of the device's bandwidth that it reaches, per mille.
    pub efficiency: u32,
}

/// A configuration with what the scheduler expects of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DequantizePlan {
    /// The configuration.
    pub config: DequantizeConfig,
    /// Seconds that it is expected to take.
    pub estimate: f64,
}

impl Operation for CheckedDequantize {
    const NAME: &'static str = "dequantize";
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
}
