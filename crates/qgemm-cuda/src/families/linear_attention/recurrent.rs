//! Token by token: the recurrence of all sequences and heads in one
//! launch, with states in registers.

use std::mem::size_of;
use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::abi::dtype_code;
use qgemm_hal::op::linear_attention::LinearAttentionStep;
use qgemm_hal::{
    CheckedLinearAttention, Device, DeviceInfo, Family, Geometry, HalError, KernelId, LaunchSequence,
    LinearAttentionConfig, LinearAttentionOperand, LinearAttentionPlan, LinearAttentionSpec, Operand, Operation, Spec,
    Unsupported, Variant,
};

use super::params::{LinearAttentionParams, MOST_CTAS, chain_seconds, too_many_ctas};
use crate::families::kernel_launch::{KernelLaunch, MakeKernel, load};
use crate::families::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

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
/// Expected share of the bandwidth, per mille.
const EFFICIENCY: u32 = 700;
/// Expected seconds of a token: reductions of a row, one after
/// the other.
const TOKEN_SECONDS: f64 = 0.3e-6;
/// CTAs that a unit runs at once.
const CTAS_A_UNIT: usize = 4;

/// The kernel family.
#[derive(Debug)]
pub(super) struct Recurrent;

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

/// Launch sequence of a plan. `make` prepares its kernel.
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
    let (cta, mut params) = (Cta::of(op), LinearAttentionParams::of(op));
    params.shape.slices = cta.slices(op) as u32;
    params.shape.row_lanes = cta.row_lanes;
    params.shape.chunk = cta.chunk;
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
        params: Arc::new(params),
    };
    let step = launch.step::<LinearAttentionOperand>(make)?;
    let step = step.bind_all(op.operands());
    Ok(LaunchSequence::new::<LinearAttentionOperand>(op.kernel_name(), vec![step]))
}

impl Family<CheckedLinearAttention> for Recurrent {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(
        &self,
        op: &CheckedLinearAttention,
        info: &DeviceInfo,
    ) -> Result<Vec<LinearAttentionConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        let Some(ctas) = Cta::of(op).count(op) else {
            return Err(too_many_ctas());
        };
        let chain_seconds = chain_seconds(op.most_tokens(), TOKEN_SECONDS, ctas, CTAS_A_UNIT, info.units);
        let config = LinearAttentionConfig::of_tokens(id(op.dtype, variant));
        Ok(vec![LinearAttentionConfig { efficiency: EFFICIENCY, chain_seconds, ..config }])
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
        config.kernel.variant.map_or(0, |variant| source(op.dtype, variant).source_hash().short())
    }
}

#[cfg(test)]
mod tests {
    use super::super::params::tests::op;
    use super::*;

    #[test]
    fn rows_have_lanes_for_their_columns_and_chunks_fit() {
        let of = |qk_dim: usize| Cta::of(&op(qk_dim));
        let sizes = [16, 64, 80, 128, 144, 256].map(|qk_dim| (of(qk_dim).row_lanes, of(qk_dim).rows, of(qk_dim).chunk));
        assert_eq!(sizes, [(1, 256, 16), (4, 64, 16), (8, 32, 16), (8, 32, 16), (16, 16, 8), (16, 16, 8)]);
        // Kernels have this much without opting in.
        assert!((16..=256).step_by(16).all(|qk_dim| of(qk_dim).shared_bytes <= 48 << 10));
    }
}
