//! `merge_attention`: partial attention results merged by their
//! log-sum-exp in one memory-bound launch.

use std::mem::size_of;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{self, MergeAttentionPointers, MergeAttentionShape, dtype_code};
use qgemm_hal::{
    CheckedMergeAttention, Device, DeviceInfo, Families, Family, Geometry, HalError, KernelId, LaunchSequence,
    MergeAttentionConfig, MergeAttentionOperand, MergeAttentionPlan, MergeAttentionSpec, Operand, Operands, Operation,
    Spec, Unsupported, Variant,
};

use super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use super::launch_params::LaunchParams;
use super::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

/// Families of `merge_attention`.
pub(super) const FAMILIES: Families<CheckedMergeAttention> = &[&MergeAttention];

/// Family name.
const NAME: &str = "merge_attention";
const ENTRY: &str = "entry/merge_attention.cu";
/// Threads of a CTA.
const THREADS: u32 = 128;
/// Columns of a vector access.
const GROUP: usize = 8;
/// Threads of a row: shared memory has the weights of the others'
/// rows, and shuffles stay within a warp.
const ROW_THREADS: [usize; 2] = [4, 32];
/// Maximum rows: kernels count them in 32 bits.
const MOST_ROWS: usize = i32::MAX as usize;
/// Expected share of the bandwidth, per mille.
const EFFICIENCY: u32 = 700;

/// The kernel family.
#[derive(Debug)]
struct MergeAttention;

fn id(from: DType, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::MergeAttention(MergeAttentionSpec { from }))
}

fn source(from: DType, variant: Variant) -> KernelSpec {
    let prelude = Prelude { x_dtype: Some(dtype_code(from)), threads: Some(THREADS), ..Prelude::of(variant) };
    KernelSpec {
        name: id(from, variant).to_string(),
        entry: ENTRY,
        text: source::entry(ENTRY),
        symbol: "qg_merge_attention",
        prelude: prelude.text(),
        arch_specific: false,
    }
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    DType::ALL.into_iter().map(move |from| source(from, variant))
}

/// `MergeAttentionParams` in `entry/merge_attention.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct MergeAttentionParams {
    shape: MergeAttentionShape,
    at: MergeAttentionPointers,
}

const _: () = assert!(size_of::<MergeAttentionShape>().is_multiple_of(8), "pointers follow without a gap");

impl Params for MergeAttentionParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        use MergeAttentionOperand as O;
        let mut params = *self;
        let pointers = [
            (&mut params.at.partial, O::Partial),
            (&mut params.at.partial_lse, O::PartialLse),
            (&mut params.at.d, O::D),
            (&mut params.at.lse, O::Lse),
        ];
        at.fill(operands, pointers)?;
        Ok(LaunchParams::of(&params))
    }
}

/// Threads of a row of `dim` columns.
fn row_threads(dim: usize) -> u32 {
    let [least, most] = ROW_THREADS;
    dim.div_ceil(GROUP).next_power_of_two().clamp(least, most) as u32
}

fn params(op: &CheckedMergeAttention) -> MergeAttentionParams {
    let flags =
        [(abi::FLAG_LSE, op.lse), (abi::FLAG_X_ALIGNED16, op.partial.aligned), (abi::FLAG_D_ALIGNED16, op.d.aligned)];
    let shape = MergeAttentionShape {
        parts: op.parts as u32,
        rows: op.rows() as u32,
        heads: op.heads as u32,
        dim: op.dim as u32,
        row_threads: row_threads(op.dim),
        flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
        dtype: dtype_code(op.dtype),
        d_dtype: dtype_code(op.d_dtype),
    };
    let at = MergeAttentionPointers {
        part_stride: op.part_stride,
        token_stride: op.partial.token_stride,
        head_stride: op.partial.head_stride,
        d_token: op.d.token_stride,
        d_head: op.d.head_stride,
        ..MergeAttentionPointers::default()
    };
    MergeAttentionParams { shape, at }
}

/// Launch sequence of a plan. `make` prepares its kernel.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel
/// variant, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedMergeAttention,
    _: &MergeAttentionPlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let cta_rows = THREADS / row_threads(op.dim);
    let launch = KernelLaunch {
        id: id(op.dtype, variant),
        spec: source(op.dtype, variant),
        geometry: Geometry {
            grid: [(op.rows() as u32).div_ceil(cta_rows), 1, 1],
            threads: THREADS,
            // A weight for each part of each row.
            shared_bytes: cta_rows * op.parts as u32 * size_of::<f32>() as u32,
        },
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: MergeAttentionOperand::ALL,
        updated: None,
        params: Arc::new(params(op)),
    };
    let step = launch.step::<MergeAttentionOperand>(make)?;
    let step = step.bind_all(op.operands());
    Ok(LaunchSequence::new::<MergeAttentionOperand>(op.kernel_name(), vec![step]))
}

impl Family<CheckedMergeAttention> for MergeAttention {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedMergeAttention, info: &DeviceInfo) -> Result<Vec<MergeAttentionConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        if op.rows() > MOST_ROWS {
            return Err(Unsupported::new(format!("merges at most {MOST_ROWS} heads of tokens at once")));
        }
        Ok(vec![MergeAttentionConfig { kernel: id(op.dtype, variant), efficiency: EFFICIENCY }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedMergeAttention,
        plan: &MergeAttentionPlan,
    ) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedMergeAttention, config: &MergeAttentionConfig) -> u64 {
        config.kernel.variant.map_or(0, |variant| source(op.dtype, variant).source_hash().short())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_threads_for_their_columns_and_weights_fit() {
        assert_eq!([8, 64, 96, 128, 256, 576].map(row_threads), [4, 8, 16, 16, 32, 32]);
        let most = THREADS as usize / ROW_THREADS[0] * qgemm_hal::op::merge_attention::MOST_PARTS * size_of::<f32>();
        // Kernels have this much without opting in.
        assert!(most <= 48 << 10);
    }
}
