//! `quantize`: quantization of activations (INT8, FP8, FP4).

use qgemm_formats::{DType, XFactor, XFormat, XParts};

use super::dense::Dense;
use super::{Operation, memory_bound, operands};
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Spec, spec};

/// Quantization of X; validated by the API.
///
/// The result is, to the bit, [`XParts::quantize_row`] of every row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckedQuantize {
    /// Tokens; at least 1.
    pub rows: usize,
    /// Columns of X; at least 1.
    pub columns: usize,
    /// X, with any strides.
    pub x: Dense,
    /// The format; must be quantized.
    pub format: XFormat,
    /// Contents of its planes.
    pub parts: XParts,
    /// Row stride of the codes in bytes. It and the
    /// address are multiples of 16.
    pub codes_row: u64,
    /// Row stride of the scales in bytes. It and the
    /// address are multiples of 4.
    pub scales_row: u64,
    /// Row stride of the sums in bytes. It and the
    /// address are multiples of 4.
    pub sums_row: u64,
}

operands! {
    /// Operands of `quantize`.
    pub enum QuantizeOperand {
        /// The matrix.
        X: "x" Read,
        /// The given factor for all of X, f32.
        Factor: "the factor" Read,
        /// The codes.
        Codes: "the codes" Write,
        /// The scales.
        Scales: "the scales" Write,
        /// Factor of each token, f32.
        TokenFactors: "the token factors" Write,
        /// X block sums.
        Sums: "the sums" Write,
    }
}

spec! {
    /// Kernel identity keys of `quantize`.
    pub struct QuantizeSpec {
        /// Element type of X.
        x: DType,
        /// The format of the result.
        to: XFormat,
        /// Whether a factor is given.
        given_factor: bool,
        /// Columns that a block sum covers; 0 without sums.
        sum_span: u32,
    }
}

impl QuantizeSpec {
    /// Keys of the kernel specialized for `op`.
    pub fn of(op: &CheckedQuantize) -> Self {
        Self {
            x: op.x.dtype,
            to: op.format,
            given_factor: op.parts.factor == XFactor::Given,
            sum_span: op.parts.sum_span.unwrap_or(0) as u32,
        }
    }

    /// Planes that the kernel writes; `None` for an unquantized format.
    pub fn parts(&self) -> Option<XParts> {
        self.to.parts(self.given_factor, Some(self.sum_span as usize).filter(|&span| span > 0))
    }
}

/// A candidate kernel of a family, with what the
/// scheduler ranks it by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantizeConfig {
    /// The kernel.
    pub kernel: KernelId,
    /// Reached share of the device's bandwidth, per mille.
    pub efficiency: u32,
}

/// A config with its estimated time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantizePlan {
    /// The config.
    pub config: QuantizeConfig,
    /// Estimated seconds.
    pub estimate: f64,
}

impl Operation for CheckedQuantize {
    type Operand = QuantizeOperand;
    type Config = QuantizeConfig;
    type Plan = QuantizePlan;

    fn operands(&self) -> Vec<QuantizeOperand> {
        use QuantizeOperand as O;
        let optional = [
            (true, O::X),
            (self.parts.factor == XFactor::Given, O::Factor),
            (true, O::Codes),
            (self.parts.scale.is_some(), O::Scales),
            (self.parts.factor == XFactor::PerToken, O::TokenFactors),
            (self.parts.sum_span.is_some(), O::Sums),
        ];
        optional.into_iter().filter(|(is_there, _)| *is_there).map(|(_, operand)| operand).collect()
    }

    fn traffic(&self) -> f64 {
        let (parts, k) = (&self.parts, self.columns);
        let read = k * self.x.dtype.bytes();
        let factor = if parts.factor == XFactor::PerToken { 4 } else { 0 };
        let written = parts.code_bytes(k) + parts.scale_bytes(k) + parts.sums(k) * 4 + factor;
        self.rows as f64 * (read + written) as f64
    }

    fn macs(&self) -> f64 {
        0.0
    }

    fn describe(&self) -> String {
        let Self { rows, columns, x, format, .. } = self;
        format!("{rows} x {columns} from {} to {format}", x.dtype)
    }

    fn is_nothing(&self) -> bool {
        self.rows == 0 || self.columns == 0
    }

    fn config(plan: &QuantizePlan) -> &QuantizeConfig {
        &plan.config
    }

    fn estimate(plan: &QuantizePlan) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &QuantizePlan) -> KernelId {
        plan.config.kernel
    }

    fn noop_config(&self) -> Result<QuantizeConfig, Unsupported> {
        let kernel = KernelId::new("noop", None, Spec::Quantize(QuantizeSpec::of(self)));
        Ok(QuantizeConfig { kernel, efficiency: 1000 })
    }
}

memory_bound!(CheckedQuantize, QuantizeConfig, QuantizePlan, |_| 1);
