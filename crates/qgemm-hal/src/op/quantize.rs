//! `quantize`: activations in a format of codes and scales.

use qgemm_formats::{DType, XFactor, XFormat, XParts};

use super::dense::Dense;
use super::{Operation, operands};
use crate::kernel_id::{KernelId, spec};

/// X in codes and scales; validated by the API.
///
/// What is computed, to the bit, is [`XParts::quantize_row`] of every row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CheckedQuantize {
    /// Tokens; at least 1.
    pub rows: usize,
    /// Columns of X; at least 1.
    pub columns: usize,
    /// X, with any strides.
    pub x: Dense,
    /// The format; not plain.
    pub format: XFormat,
    /// Its planes.
    pub parts: XParts,
    /// Bytes from one row of codes to the next; a multiple of 16, as is the address.
    pub codes_row: u64,
    /// Bytes from one row of scales to the next; a multiple of 4, as is the address.
    pub scales_row: u64,
    /// Bytes from one row of sums to the next; a multiple of 4, as is the address.
    pub sums_row: u64,
}

operands! {
    /// What `quantize` reads and writes.
    pub enum QuantizeOperand {
        /// The matrix.
        X: "x" Read,
        /// The factor that is given for all of X, in f32.
        Factor: "the factor" Read,
        /// The codes.
        Codes: "the codes" Write,
        /// The scales.
        Scales: "the scales" Write,
        /// A factor for each token, in f32.
        TokenFactors: "the token factors" Write,
        /// The sums.
        Sums: "the sums" Write,
    }
}

spec! {
    /// What tells the kernels of `quantize` apart.
    pub struct QuantizeSpec {
        /// Element type of X.
        x: DType,
        /// The format of the result.
        to: XFormat,
        /// Whether a factor is given.
        given_factor: bool,
        /// Columns that a sum covers; 0 where there are none.
        sum_span: u32,
    }
}

impl QuantizeSpec {
    /// The keys of the kernel that is made for what `op` asks.
    pub fn of(op: &CheckedQuantize) -> Self {
        Self {
            x: op.x.dtype,
            to: op.format,
            given_factor: op.parts.factor == XFactor::Given,
            sum_span: op.parts.sum_span.unwrap_or(0) as u32,
        }
    }

    /// The planes of what such a kernel writes; `None` of what is no format of codes.
    pub fn parts(&self) -> Option<XParts> {
        self.to.parts(self.given_factor, Some(self.sum_span as usize).filter(|&span| span > 0))
    }
}

/// A kernel of a family, as the scheduler sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantizeConfig {
    /// The kernel.
    pub kernel: KernelId,
    /// Share of the device's bandwidth that it reaches, per mille.
    pub efficiency: u32,
}

/// A configuration with what the scheduler expects of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantizePlan {
    /// The configuration.
    pub config: QuantizeConfig,
    /// Seconds that it is expected to take.
    pub estimate: f64,
}

impl Operation for CheckedQuantize {
    const NAME: &'static str = "quantize";
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
}
