//! RMS norm of a head.

use qgemm_hal::{HalError, HeadNorm, KvAppendOperand, Operand, Operands};

use crate::operand::{absent, host_bytes};
use crate::simd::Simd;

/// Gamma of query or key heads, in f32.
pub(super) fn gamma_of(
    norm: &HeadNorm,
    simd: &Simd,
    operands: &mut Operands<'_>,
    operand: KvAppendOperand,
    columns: usize,
) -> Result<Vec<f32>, HalError> {
    let (what, end) = (operand.name(), columns * norm.gamma.bytes());
    let stored = host_bytes(operands.take(operand).ok_or(absent(what, end))?, what)?;
    let mut gamma = vec![0.0; columns];
    simd.to_f32(norm.gamma, stored.get(..end).ok_or(absent(what, end))?, &mut gamma);
    Ok(gamma)
}

/// RMS norm of a head, in place. Squares are added in f64, so the
/// order of the sum does not matter.
pub(super) fn normalize(values: &mut [f32], gamma: &[f32], eps: f32) {
    let squares: f64 = values.iter().map(|value| f64::from(*value).powi(2)).sum();
    let factor = (1.0 / (squares / values.len() as f64 + f64::from(eps)).sqrt()) as f32;
    values.iter_mut().zip(gamma).for_each(|(value, gamma)| *value *= factor * gamma);
}
