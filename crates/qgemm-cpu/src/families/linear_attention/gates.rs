//! Decays of linear attention.

use qgemm_formats::DType;
use qgemm_hal::op::linear_attention::DecayPer;
use qgemm_hal::{CheckedLinearAttention, HalError, LinearAttentionOperand, Operand, Operands};

use crate::operand::{absent, host_bytes, read};
use crate::simd::Simd;

/// Operands of the decay.
pub(super) struct Decays<'a> {
    dtype: DType,
    bytes: &'a [u8],
    token_stride: usize,
    /// Decays of a head.
    columns: usize,
    /// A_log and dt_bias, if the log-decay is made of them.
    made: Option<[&'a [f32]; 2]>,
}

impl<'a> Decays<'a> {
    /// `None` without decay.
    pub(super) fn new(op: &CheckedLinearAttention, operands: &mut Operands<'a>) -> Result<Option<Self>, HalError> {
        use LinearAttentionOperand as O;
        let Some(decay) = op.decay else { return Ok(None) };
        let (dtype, token_stride, columns) = (decay.dtype(), decay.token_stride as usize, op.head_decays());
        let what = O::Decay.name();
        let bytes = host_bytes(operands.take(O::Decay).ok_or(absent(what, 1))?, what)?;
        let end = ((op.tokens - 1) * token_stride + op.token_decays()) * dtype.bytes();
        if end > bytes.len() {
            return Err(HalError::OutOfBounds { what, start: 0, end, len: bytes.len() });
        }
        let made = match decay.is_made() {
            true => {
                let biases = if decay.per == DecayPer::Feature { op.token_decays() } else { op.heads };
                Some([read(operands, O::ALog, op.heads)?, read(operands, O::DtBias, biases)?])
            }
            false => None,
        };
        Ok(Some(Self { dtype, bytes, token_stride, columns, made }))
    }

    /// Decays of a head of a token; as many as a head has.
    pub(super) fn of(&self, simd: &Simd, token: usize, head: usize, out: &mut [f32]) {
        let first = token * self.token_stride + head * self.columns;
        simd.to_f32(self.dtype, &self.bytes[first * self.dtype.bytes()..], out);
        if let Some([a_log, dt_bias]) = self.made {
            let rate = a_log[head].exp();
            for (a, bias) in out.iter_mut().zip(&dt_bias[head * self.columns..]) {
                *a = -rate * softplus(*a + bias);
            }
        }
        out.iter_mut().for_each(|g| *g = factor(*g));
    }

    /// Time step of a head: `softplus(a + dt_bias)`. 1 if the log-decay
    /// is given.
    pub(super) fn time_step(&self, simd: &Simd, token: usize, head: usize) -> f32 {
        let Some([_, dt_bias]) = self.made else { return 1.0 };
        let first = (token * self.token_stride + head) * self.dtype.bytes();
        let mut a = [0.0];
        simd.to_f32(self.dtype, &self.bytes[first..], &mut a);
        softplus(a[0] + dt_bias[head])
    }
}

/// Logistic function.
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// exp(min(g, 0)); NaN stays NaN.
fn factor(g: f32) -> f32 {
    if g > 0.0 { 1.0 } else { g.exp() }
}

/// ln(1 + exp(x)).
fn softplus(x: f32) -> f32 {
    // `max` would drop NaN.
    let positive = if x < 0.0 { 0.0 } else { x };
    positive + (-x.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates_keep_extremes() {
        assert_eq!([0.0, -0.0, 3.0, f32::NEG_INFINITY, -1e-42].map(factor), [1.0, 1.0, 1.0, 0.0, 1.0]);
        assert!(factor(f32::NAN).is_nan() && softplus(f32::NAN).is_nan());
        for x in [-80.0f32, -20.0, -3.0, -1e-3, 0.0, 0.5, 4.0, 40.0] {
            let exact = f64::from(x).exp().ln_1p();
            assert!((f64::from(softplus(x)) - exact).abs() <= 2e-7 * exact, "{x}");
        }
        assert_eq!([softplus(f32::NEG_INFINITY), softplus(f32::INFINITY)], [0.0, f32::INFINITY]);
    }
}
