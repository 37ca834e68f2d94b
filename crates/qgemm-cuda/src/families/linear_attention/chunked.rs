//! In chunks of tokens (the WY form of the delta rule), from Ampere on:
//! a launch makes the matrices of all chunks, another runs the
//! recurrence over chunks with matrix instructions. Many tokens are
//! processed in segments, so that the workspace stays small.

use std::mem::size_of;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{FLAG_X_ALIGNED16, LinearAttentionChunks, dtype_code};
use qgemm_hal::op::linear_attention::{DecayPer, LinearAttentionStep};
use qgemm_hal::{
    CheckedLinearAttention, Device, DeviceInfo, Family, Geometry, HalError, KernelId, LaunchSequence, LaunchStep,
    LinearAttentionConfig, LinearAttentionOperand, LinearAttentionPlan, LinearAttentionSpec, Operand, Operands,
    Operation, Spec, Unsupported, Variant, WorkspaceLayout,
};

use super::params::{LinearAttentionParams, MOST_CTAS, chain_seconds, too_many_ctas};
use crate::families::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use crate::families::launch_params::LaunchParams;
use crate::families::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

/// Family name.
const NAME: &str = "linear_attention_chunk";
/// Threads of a CTA.
const THREADS: u32 = 128;
/// Tokens of a chunk: `CHUNK` of the kernels.
const CHUNK: usize = 32;
/// Most features of a key.
const MOST_DIM: usize = 128;
/// Rows of a state in a CTA: `CTA_ROWS` of the kernel.
const CTA_ROWS: usize = 64;
/// Workspace bytes of a token: two rows of matrices and four factors.
const TOKEN_BYTES: usize = (2 * CHUNK + 4) * size_of::<f32>();
/// Workspace bytes of a token's decayed query and keys: three rows of two bf16 numbers a feature.
const DECAYED_BYTES: usize = 3 * 2 * MOST_DIM * size_of::<u16>();
/// Expected share of the bandwidth, per mille.
const EFFICIENCY: u32 = 500;
/// Expected seconds of a chunk (H200: 4.3 µs in bf16, 5.8 µs in f16).
const CHUNK_SECONDS: f64 = 5e-6;
/// CTAs that a unit runs at once.
const CTAS_A_UNIT: usize = 2;

/// The kernel family.
#[derive(Debug)]
pub(super) struct Chunked;

/// A kernel of the family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Instance {
    step: LinearAttentionStep,
    dtype: DType,
    variant: Variant,
}

impl Instance {
    /// `SharedStorage` of the kernel.
    fn shared_bytes(self) -> u32 {
        let (wide, narrow) = (MOST_DIM + 8, CHUNK + 8);
        // The lower matrix; five numbers a token; the head's resets.
        let tokens = (CHUNK + 5) * CHUNK * 4 + 16;
        // Keys and queries, of bf16 numbers each.
        let planes = 2 * wide * CHUNK * 2 * self.parts();
        // Two matrices in two parts, and values.
        let (matrices, values) = (2 * 2 * narrow * 2 * CHUNK, (CTA_ROWS + 4) * 4 * CHUNK);
        let bytes = match self.step {
            LinearAttentionStep::Matrices => planes + tokens,
            // Keys, queries and decays in f32.
            LinearAttentionStep::FeatureMatrices => 3 * (MOST_DIM + 4) * CHUNK * 4 + tokens,
            // And keys that decay to the end, and decays of features.
            LinearAttentionStep::FeatureChunks => planes / 2 * 3 + MOST_DIM * 4 + 2 * matrices + values,
            // And factors of tokens.
            _ => planes + 2 * (matrices + 16 * CHUNK) + values,
        };
        bytes as u32
    }

    /// `PARTS` of the kernel: bf16 numbers of an element.
    fn parts(self) -> usize {
        if self.dtype == DType::BF16 && !self.has_feature_decay() { 1 } else { 2 }
    }

    fn has_feature_decay(self) -> bool {
        matches!(self.step, LinearAttentionStep::FeatureMatrices | LinearAttentionStep::FeatureChunks)
    }

    fn id(self) -> KernelId {
        let spec = LinearAttentionSpec { step: self.step, x: self.dtype };
        KernelId::new(NAME, Some(self.variant), Spec::LinearAttention(spec))
    }

    fn source(self) -> KernelSpec {
        let (entry, symbol) = match self.step {
            LinearAttentionStep::Matrices => {
                ("entry/sm80_linear_attention_matrices.cu", "qg_sm80_linear_attention_matrices")
            }
            LinearAttentionStep::FeatureMatrices => {
                ("entry/sm80_linear_attention_feature_matrices.cu", "qg_sm80_linear_attention_feature_matrices")
            }
            _ => ("entry/sm80_linear_attention_chunks.cu", "qg_sm80_linear_attention_chunks"),
        };
        let prelude = Prelude {
            x_dtype: Some(dtype_code(self.dtype)),
            threads: Some(THREADS),
            shared_bytes: Some(self.shared_bytes()),
            decay_features: Some(self.has_feature_decay().into()),
            ..Prelude::of(self.variant)
        };
        KernelSpec {
            name: self.id().to_string(),
            entry,
            text: source::entry(entry),
            symbol,
            prelude: prelude.text(),
            arch_specific: false,
        }
    }
}

/// Steps of a segment, in order.
type Steps = [LinearAttentionStep; 2];
const STEPS: Steps = [LinearAttentionStep::Matrices, LinearAttentionStep::Chunks];
const FEATURE_STEPS: Steps = [LinearAttentionStep::FeatureMatrices, LinearAttentionStep::FeatureChunks];

fn steps(op: &CheckedLinearAttention) -> Steps {
    if has_feature_decay(op) { FEATURE_STEPS } else { STEPS }
}

fn has_feature_decay(op: &CheckedLinearAttention) -> bool {
    op.decay.is_some_and(|decay| decay.per == DecayPer::Feature)
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let steps = STEPS.into_iter().chain(FEATURE_STEPS).filter(move |_| variant >= Variant::Sm80);
    steps.flat_map(move |step| DType::ALL.into_iter().map(move |dtype| Instance { step, dtype, variant }.source()))
}

/// `ChunkedParams` in `recurrence/chunked.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct ChunkedParams {
    attention: LinearAttentionParams,
    chunks: LinearAttentionChunks,
}

impl Params for ChunkedParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        let workspace = at.of(operands, LinearAttentionOperand::Workspace)?;
        let mut params = Self { attention: self.attention.with_operands(operands, at)?, ..*self };
        let chunks = &mut params.chunks;
        for address in [&mut chunks.matrices, &mut chunks.factors, &mut chunks.decayed, &mut chunks.states] {
            *address += workspace;
        }
        Ok(LaunchParams::of(&params))
    }
}

/// How tokens are cut into segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segments {
    /// Tokens of a segment, a multiple of the chunk.
    tokens: usize,
    count: usize,
    /// Offsets of the factors, of decayed rows and of the states between segments.
    factors: usize,
    decayed: usize,
    states: usize,
    /// Bytes of the workspace.
    bytes: usize,
}

impl Segments {
    /// Cuts all tokens; the reason if a chunk does not fit in the workspace.
    fn of(op: &CheckedLinearAttention) -> Result<Self, Unsupported> {
        let too_many = || Unsupported::new("the workspace exceeds the address space: run fewer sequences at once");
        let heads = op.sequences.checked_mul(op.heads).ok_or_else(too_many)?;
        let decayed = if has_feature_decay(op) { DECAYED_BYTES } else { 0 };
        let of_chunk = heads.checked_mul(CHUNK * (TOKEN_BYTES + decayed)).ok_or_else(too_many)?;
        let chunks = op.most_tokens().div_ceil(CHUNK);
        let room = op.max_workspace.saturating_sub(WorkspaceLayout::RESERVED);
        if room / of_chunk >= chunks {
            return Self::with(chunks, 1, heads, decayed, 0).ok_or_else(too_many);
        }
        let states = heads.checked_mul(op.state_len() * size_of::<f32>()).ok_or_else(too_many)?;
        let fitting = room.saturating_sub(states) / of_chunk;
        if fitting == 0 {
            let least = of_chunk.saturating_add(states).saturating_add(WorkspaceLayout::RESERVED);
            return Err(Unsupported::new(format!(
                "needs a workspace of {least} bytes, and {} are allowed",
                op.max_workspace
            )));
        }
        Self::with(fitting, chunks.div_ceil(fitting), heads, decayed, states).ok_or_else(too_many)
    }

    fn with(chunks: usize, count: usize, heads: usize, decayed: usize, states: usize) -> Option<Self> {
        let tokens = chunks.checked_mul(CHUNK)?;
        let rows = heads.checked_mul(tokens)?;
        let factors = rows.checked_mul(2 * CHUNK * size_of::<f32>())?.checked_add(WorkspaceLayout::RESERVED)?;
        let decayed_at = rows.checked_mul(4 * size_of::<f32>())?.checked_add(factors)?;
        let states_at = rows.checked_mul(decayed)?.checked_add(decayed_at)?;
        let bytes = states_at.checked_add(states)?;
        Some(Self { tokens, count, factors, decayed: decayed_at, states: states_at, bytes })
    }
}

/// CTAs of a launch of `step`; `None` if there are too many.
fn ctas(op: &CheckedLinearAttention, step: LinearAttentionStep, segments: &Segments) -> Option<usize> {
    let of_head = match step {
        LinearAttentionStep::Matrices | LinearAttentionStep::FeatureMatrices => segments.tokens / CHUNK,
        _ => op.v_dim.div_ceil(CTA_ROWS),
    };
    op.sequences.checked_mul(op.heads)?.checked_mul(of_head).filter(|&count| count <= MOST_CTAS)
}

/// Launch sequence of a plan. `make` prepares each kernel.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel
/// variant, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedLinearAttention,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let segments = Segments::of(op).map_err(|refused| HalError::KernelUnavailable {
        kernel: op.kernel_name(),
        target: variant.to_string(),
        why: refused.why,
    })?;
    let mut launches = Vec::with_capacity(2 * segments.count);
    for segment in 0..segments.count {
        for step in steps(op) {
            launches.push(launch(op, Instance { step, dtype: op.dtype, variant }, &segments, segment, make)?);
        }
    }
    Ok(LaunchSequence::new::<LinearAttentionOperand>(op.kernel_name(), launches))
}

fn launch(
    op: &CheckedLinearAttention,
    instance: Instance,
    segments: &Segments,
    segment: usize,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchStep, HalError> {
    let mut attention = LinearAttentionParams::of(op);
    attention.shape.slices = op.v_dim.div_ceil(CTA_ROWS) as u32;
    attention.shape.chunk = CHUNK as u32;
    if !op.v.aligned || !op.d.aligned {
        attention.shape.flags &= !FLAG_X_ALIGNED16;
    }
    let chunks = LinearAttentionChunks {
        first: (segment * segments.tokens) as u32,
        tokens: segments.tokens as u32,
        matrices: WorkspaceLayout::RESERVED as u64,
        factors: segments.factors as u64,
        decayed: segments.decayed as u64,
        states: segments.states as u64,
    };
    let ctas = ctas(op, instance.step, segments).unwrap_or(MOST_CTAS);
    let launch = KernelLaunch {
        id: instance.id(),
        spec: instance.source(),
        geometry: Geometry { grid: [ctas as u32, 1, 1], threads: THREADS, shared_bytes: instance.shared_bytes() },
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: instance.variant >= Variant::Sm90,
        operands: LinearAttentionOperand::ALL,
        updated: None,
        params: Arc::new(ChunkedParams { attention, chunks }),
    };
    let operands = op.operands().into_iter().chain([LinearAttentionOperand::Workspace]);
    Ok(launch.step::<LinearAttentionOperand>(make)?.bind_all(operands))
}

impl Family<CheckedLinearAttention> for Chunked {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(
        &self,
        op: &CheckedLinearAttention,
        info: &DeviceInfo,
    ) -> Result<Vec<LinearAttentionConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        let reasons = [
            (variant < Variant::Sm80, "needs bf16 matrix instructions"),
            (op.batch_invariant, "bits of a token depend on its chunk"),
            (op.qk_dim > MOST_DIM, "keys have at most 128 features"),
            (op.advance || op.pending, "stores the state after the last token alone, and all outputs"),
        ];
        if let Some((_, why)) = reasons.into_iter().find(|(is_so, _)| *is_so) {
            return Err(Unsupported::new(why));
        }
        let segments = Segments::of(op)?;
        let [matrices, chunks] = steps(op);
        let (Some(_), Some(chains)) = (ctas(op, matrices, &segments), ctas(op, chunks, &segments)) else {
            return Err(too_many_ctas());
        };
        let config = LinearAttentionConfig::of_tokens(Instance { step: chunks, dtype: op.dtype, variant }.id());
        Ok(vec![LinearAttentionConfig {
            launches: 2 * segments.count as u32,
            workspace_bytes: segments.bytes,
            efficiency: EFFICIENCY,
            step_tokens: CHUNK as u32,
            // The matrices of a chunk take a step more.
            chain_seconds: chain_seconds(
                op.most_tokens().div_ceil(CHUNK) + 1,
                CHUNK_SECONDS,
                chains,
                CTAS_A_UNIT,
                info.units,
            ),
            ..config
        }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedLinearAttention,
        _: &LinearAttentionPlan,
    ) -> Result<LaunchSequence, HalError> {
        sequence(op, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedLinearAttention, config: &LinearAttentionConfig) -> u64 {
        let of = |variant| {
            let hash = |step| Instance { step, dtype: op.dtype, variant }.source().source_hash().short();
            steps(op).map(hash).into_iter().fold(0, |all: u64, hash| all.rotate_left(1) ^ hash)
        };
        config.kernel.variant.map_or(0, of)
    }
}

#[cfg(test)]
mod tests {
    use qgemm_hal::QueryLengths;

    use super::super::params::tests::op;
    use super::*;

    #[test]
    fn many_tokens_are_cut_into_segments_of_whole_chunks() {
        let op = CheckedLinearAttention { heads: 2, tokens: 1000, queries: QueryLengths::Each(1000), ..op(64) };
        let whole = Segments::of(&op).expect("a large workspace");
        assert_eq!((whole.tokens, whole.count), (1024, 1));
        assert_eq!(whole.bytes, WorkspaceLayout::RESERVED + 2 * 1024 * TOKEN_BYTES);
        let states = 2 * 64 * 128 * 4;
        let most = |chunks: usize| WorkspaceLayout::RESERVED + states + chunks * 2 * CHUNK * TOKEN_BYTES;
        let with = |max_workspace| Segments::of(&CheckedLinearAttention { max_workspace, ..op });
        let cut = with(most(1)).expect("a chunk fits");
        assert_eq!((cut.tokens, cut.count, cut.bytes), (32, 32, most(1)));
        assert_eq!(with(most(2) + 5).expect("two chunks fit").tokens, 64);
        let refused = with(most(1) - 1).expect_err("no chunk fits").why;
        assert!(refused.contains(&format!("needs a workspace of {} bytes", most(1))), "{refused}");
    }
}
