//! Kernel parameters and costs that both families share.

use std::mem::size_of;

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::{self, LinearAttentionPointers, LinearAttentionShape, dtype_code};
use qgemm_hal::op::linear_attention::{BetaSource, DecayPer, KeyHeadOrder};
use qgemm_hal::{CheckedLinearAttention, HalError, LinearAttentionOperand, Operands, Unsupported};

use crate::families::kernel_launch::{Addresses, Params};
use crate::families::launch_params::LaunchParams;

/// Maximum CTAs of a launch.
pub(super) const MOST_CTAS: usize = i32::MAX as usize;

/// Refusal of a launch of more than [`MOST_CTAS`] CTAs.
pub(super) fn too_many_ctas() -> Unsupported {
    Unsupported::new(format!("launches at most {MOST_CTAS} CTAs: run fewer sequences at once"))
}

/// `LinearAttentionParams` in `recurrence/problem.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct LinearAttentionParams {
    pub shape: LinearAttentionShape,
    pub at: LinearAttentionPointers,
}

const _: () = assert!(size_of::<LinearAttentionShape>().is_multiple_of(8), "pointers follow without a gap");

impl Params for LinearAttentionParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        Ok(LaunchParams::of(&self.with_operands(operands, at)?))
    }
}

impl LinearAttentionParams {
    /// Parameters of `op` without addresses and geometry.
    pub fn of(op: &CheckedLinearAttention) -> Self {
        let flags = [
            (abi::FLAG_X_ALIGNED16, op.q.aligned && op.k.aligned),
            (abi::FLAG_DELTA, op.delta),
            (abi::FLAG_DECAY_FEATURES, op.decay.is_some_and(|decay| decay.per == DecayPer::Feature)),
            (abi::FLAG_L2_NORM, op.norm_epsilon.is_some()),
            (abi::FLAG_FROM_ZERO, op.from_zero),
            (abi::FLAG_SIGMOID, op.beta.is_some_and(|beta| beta.source == BetaSource::Sigmoid)),
            (abi::FLAG_TIME_STEP, op.beta.is_some_and(|beta| beta.source == BetaSource::TimeStep)),
            (abi::FLAG_TILED_HEADS, op.key_head_order == KeyHeadOrder::Tiled),
        ];
        let shape = LinearAttentionShape {
            tokens: op.tokens as u32,
            most_tokens: op.most_tokens() as u32,
            heads: op.heads as u32,
            group: (op.heads / op.key_heads) as u32,
            qk_dim: op.qk_dim as u32,
            v_dim: op.v_dim as u32,
            slots: op.slots as u32,
            flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
            a_dtype: dtype_code(op.decay.map_or(qgemm_formats::DType::F32, |decay| decay.dtype())),
            scale: op.scale,
            epsilon: op.norm_epsilon.unwrap_or(0.0),
            ..LinearAttentionShape::default()
        };
        let at = LinearAttentionPointers {
            q_token: op.q.token_stride,
            q_head: op.q.head_stride,
            k_token: op.k.token_stride,
            k_head: op.k.head_stride,
            v_token: op.v.token_stride,
            v_head: op.v.head_stride,
            d_token: op.d.token_stride,
            d_head: op.d.head_stride,
            decay_token: op.decay.map_or(0, |decay| decay.token_stride),
            beta_token: op.beta.map_or(0, |beta| beta.token_stride),
            slot_stride: op.slot_stride,
            ..LinearAttentionPointers::default()
        };
        Self { shape, at }
    }

    /// With the addresses of the operands.
    pub fn with_operands(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<Self, HalError> {
        use LinearAttentionOperand as O;
        let mut params = *self;
        let to = &mut params.at;
        let pointers = [
            (&mut to.q, O::Q),
            (&mut to.k, O::K),
            (&mut to.v, O::V),
            (&mut to.decay, O::Decay),
            (&mut to.a_log, O::ALog),
            (&mut to.dt_bias, O::DtBias),
            (&mut to.beta, O::Beta),
            (&mut to.skip, O::Skip),
            (&mut to.states, O::States),
            (&mut to.q_offsets, O::QOffsets),
            (&mut to.slots, O::Slots),
            (&mut to.advance, O::Advance),
            (&mut to.pending, O::Pending),
            (&mut to.d, O::D),
        ];
        at.fill(operands, pointers)?;
        Ok(params)
    }
}

/// Seconds in which a GPU with `units` units runs `ctas` chains of
/// `steps` dependent steps, `ctas_a_unit` chains on a unit at a time.
pub(super) fn chain_seconds(steps: usize, step_seconds: f64, ctas: usize, ctas_a_unit: usize, units: u32) -> f64 {
    let waves = ctas.div_ceil(ctas_a_unit * units.max(1) as usize);
    steps as f64 * step_seconds * waves as f64
}

#[cfg(test)]
pub(super) mod tests {
    use qgemm_formats::DType;
    use qgemm_hal::{HeadRows, QueryLengths};

    use super::*;

    /// Two tokens of a head with keys of so many features.
    pub(in super::super) fn op(qk_dim: usize) -> CheckedLinearAttention {
        let rows = HeadRows { token_stride: 0, head_stride: 0, aligned: true };
        CheckedLinearAttention {
            sequences: 1,
            tokens: 2,
            queries: QueryLengths::Each(2),
            heads: 1,
            key_heads: 1,
            key_head_order: KeyHeadOrder::Grouped,
            qk_dim,
            v_dim: 128,
            dtype: DType::F16,
            q: rows,
            k: rows,
            v: rows,
            d: rows,
            decay: None,
            delta: true,
            beta: None,
            skip: false,
            norm_epsilon: None,
            scale: 1.0,
            batch_invariant: false,
            max_workspace: 1 << 28,
            slots: 1,
            slot_stride: 0,
            slot_indices: false,
            from_zero: false,
            advance: false,
            pending: false,
        }
    }

    #[test]
    fn chains_run_in_waves() {
        let seconds = |ctas| chain_seconds(10, 1e-6, ctas, 4, 2);
        assert!((seconds(8) - 1e-5).abs() < 1e-12 && (seconds(9) - 2e-5).abs() < 1e-12);
    }
}
