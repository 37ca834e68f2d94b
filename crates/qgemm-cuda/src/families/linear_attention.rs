//! `linear_attention`: the recurrence of all sequences and heads in one
//! launch, with states in registers.

use std::mem::size_of;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{self, LinearAttentionPointers, LinearAttentionShape, dtype_code};
use qgemm_hal::op::linear_attention::{DecayPer, LinearAttentionStep};
use qgemm_hal::{
    CheckedLinearAttention, Device, DeviceInfo, Families, Family, Geometry, HalError, KernelId, LaunchSequence,
    LinearAttentionConfig, LinearAttentionOperand, LinearAttentionPlan, LinearAttentionSpec, Operand, Operands,
    Operation, Spec, Unsupported, Variant,
};

use super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use super::launch_params::LaunchParams;
use super::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

/// Families of `linear_attention`.
pub(super) const FAMILIES: Families<CheckedLinearAttention> = &[&LinearAttention];

/// Family name.
const NAME: &str = "linear_attention";
const ENTRY: &str = "entry/linear_attention.cu";
/// Threads of a CTA.
const THREADS: u32 = 128;
/// Columns of a thread: `COLUMNS` of the kernel.
const COLUMNS: usize = 16;
/// Rows of a thread: `ROWS` of the kernel.
const ROWS: u32 = 2;
/// Most floats of keys in shared memory.
const CHUNK_FLOATS: u32 = 16 * 128;
/// Tokens in shared memory at a time.
const MOST_CHUNK: u32 = 16;
/// Maximum CTAs of a launch.
const MOST_CTAS: usize = i32::MAX as usize;
/// Expected share of the bandwidth, per mille.
const EFFICIENCY: u32 = 700;

/// The kernel family.
#[derive(Debug)]
struct LinearAttention;

fn id(dtype: DType, variant: Variant) -> KernelId {
    let spec = LinearAttentionSpec { step: LinearAttentionStep::Recur, x: dtype };
    KernelId::new(NAME, Some(variant), Spec::LinearAttention(spec))
}

fn source(dtype: DType, variant: Variant) -> KernelSpec {
    let prelude = Prelude { x_dtype: Some(dtype_code(dtype)), threads: Some(THREADS), ..Prelude::of(variant) };
    KernelSpec {
        name: id(dtype, variant).to_string(),
        entry: ENTRY,
        text: source::entry(ENTRY),
        symbol: "qg_linear_attention",
        prelude: prelude.text(),
        arch_specific: false,
    }
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    DType::ALL.into_iter().map(move |dtype| source(dtype, variant))
}

/// `LinearAttentionParams` in `recurrence/problem.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct LinearAttentionParams {
    shape: LinearAttentionShape,
    at: LinearAttentionPointers,
}

const _: () = assert!(size_of::<LinearAttentionShape>().is_multiple_of(8), "pointers follow without a gap");

impl Params for LinearAttentionParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
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
        Ok(LaunchParams::of(&params))
    }
}

/// Geometry of a CTA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cta {
    /// Lanes of a row.
    row_lanes: u32,
    /// Rows.
    rows: u32,
    /// Tokens in shared memory.
    chunk: u32,
    shared_bytes: u32,
}

impl Cta {
    fn of(op: &CheckedLinearAttention) -> Self {
        let row_lanes = op.qk_dim.div_ceil(COLUMNS).next_power_of_two() as u32;
        let (rows, pitch) = (ROWS * THREADS / row_lanes, row_lanes * COLUMNS as u32);
        let chunk = (CHUNK_FLOATS / pitch).min(MOST_CHUNK);
        // Keys, queries and decays, two numbers a token, values.
        let floats = chunk * (3 * pitch + 2 + rows);
        Self { row_lanes, rows, chunk, shared_bytes: floats * size_of::<f32>() as u32 }
    }

    /// CTAs of a head.
    fn slices(self, op: &CheckedLinearAttention) -> usize {
        op.v_dim.div_ceil(self.rows as usize)
    }

    /// CTAs of all sequences and heads.
    fn count(self, op: &CheckedLinearAttention) -> Option<usize> {
        op.sequences.checked_mul(op.heads * self.slices(op)).filter(|&count| count <= MOST_CTAS)
    }
}

fn params(op: &CheckedLinearAttention) -> LinearAttentionParams {
    let cta = Cta::of(op);
    let flags = [
        (abi::FLAG_X_ALIGNED16, op.q.aligned && op.k.aligned),
        (abi::FLAG_DELTA, op.delta),
        (abi::FLAG_DECAY_FEATURES, op.decay.is_some_and(|decay| decay.per == DecayPer::Feature)),
        (abi::FLAG_L2_NORM, op.norm_epsilon.is_some()),
        (abi::FLAG_FROM_ZERO, op.from_zero),
    ];
    let shape = LinearAttentionShape {
        tokens: op.tokens as u32,
        most_tokens: op.most_tokens() as u32,
        heads: op.heads as u32,
        group: (op.heads / op.key_heads) as u32,
        qk_dim: op.qk_dim as u32,
        v_dim: op.v_dim as u32,
        slots: op.slots as u32,
        slices: cta.slices(op) as u32,
        row_lanes: cta.row_lanes,
        chunk: cta.chunk,
        flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
        a_dtype: dtype_code(op.decay.map_or(DType::F32, |decay| decay.dtype())),
        scale: op.scale,
        epsilon: op.norm_epsilon.unwrap_or(0.0),
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
        beta_token: op.beta.unwrap_or(0),
        slot_stride: op.slot_stride,
        ..LinearAttentionPointers::default()
    };
    LinearAttentionParams { shape, at }
}

/// Launch sequence of a plan. `make` prepares its kernel.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel
/// variant, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedLinearAttention,
    _: &LinearAttentionPlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let cta = Cta::of(op);
    let launch = KernelLaunch {
        id: id(op.dtype, variant),
        spec: source(op.dtype, variant),
        geometry: Geometry {
            grid: [cta.count(op).unwrap_or(MOST_CTAS) as u32, 1, 1],
            threads: THREADS,
            shared_bytes: cta.shared_bytes,
        },
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: LinearAttentionOperand::ALL,
        updated: None,
        params: Arc::new(params(op)),
    };
    let step = launch.step::<LinearAttentionOperand>(make)?;
    let step = step.bind_all(op.operands());
    Ok(LaunchSequence::new::<LinearAttentionOperand>(op.kernel_name(), vec![step]))
}

impl Family<CheckedLinearAttention> for LinearAttention {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(
        &self,
        op: &CheckedLinearAttention,
        info: &DeviceInfo,
    ) -> Result<Vec<LinearAttentionConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        if Cta::of(op).count(op).is_none() {
            return Err(Unsupported::new(format!("launches at most {MOST_CTAS} CTAs: run fewer sequences at once")));
        }
        let kernel = id(op.dtype, variant);
        Ok(vec![LinearAttentionConfig { kernel, launches: 1, workspace_bytes: 0, efficiency: EFFICIENCY }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedLinearAttention,
        plan: &LinearAttentionPlan,
    ) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedLinearAttention, config: &LinearAttentionConfig) -> u64 {
        config.kernel.variant.map_or(0, |variant| source(op.dtype, variant).source_hash().short())
    }
}

#[cfg(test)]
mod tests {
    use qgemm_hal::{HeadRows, QueryLengths};

    use super::*;

    #[test]
    fn rows_have_lanes_for_their_columns_and_chunks_fit() {
        let of = |qk_dim: usize| {
            let rows = HeadRows { token_stride: 0, head_stride: 0, aligned: true };
            Cta::of(&CheckedLinearAttention {
                sequences: 1,
                tokens: 1,
                queries: QueryLengths::Each(1),
                heads: 1,
                key_heads: 1,
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
                slots: 1,
                slot_stride: 0,
                slot_indices: false,
                from_zero: false,
                advance: false,
                pending: false,
            })
        };
        let sizes = [16, 64, 80, 128, 144, 256].map(|qk_dim| (of(qk_dim).row_lanes, of(qk_dim).rows, of(qk_dim).chunk));
        assert_eq!(sizes, [(1, 256, 16), (4, 64, 16), (8, 32, 16), (8, 32, 16), (16, 16, 8), (16, 16, 8)]);
        // Kernels have this much without opting in.
        assert!((16..=256).step_by(16).all(|qk_dim| of(qk_dim).shared_bytes <= 48 << 10));
    }
}
