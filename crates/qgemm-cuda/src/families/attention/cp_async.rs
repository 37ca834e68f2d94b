//! `attention_cp_async`: attention of many queries with `mma.sync` and
//! cp.async (Ampere and newer), 128 queries of a head per CTA.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::{
    AttentionConfig, AttentionOperand, AttentionPlan, AttentionSpec, CheckedAttention, Device, DeviceInfo, Family,
    Geometry, HalError, KernelDType, KernelId, KvFormat, KvFormats, LaunchSequence, Operand, Operands, Spec,
    Unsupported, Variant,
};

use super::super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use super::super::launch_params::LaunchParams;
use super::super::prelude::Prelude;
use super::dequantized;
use super::params::{AttentionParams, MaskedParams, is_all, kv_code};
use super::simt::ctas;
use crate::arch::check_shared;
use crate::source;
use crate::spec::KernelSpec;

/// Family name.
pub(super) const NAME: &str = "attention_cp_async";
/// Threads of a CTA: one warp for every 32 queries.
const THREADS: u32 = 128;
/// Queries of a CTA.
const ROWS: u32 = 128;
/// Supported head dimensions. Others are padded to the next one.
const DIMS: [u32; 2] = [64, 128];
/// Resident CTAs per SM.
const CTAS_A_UNIT: u32 = 2;
/// Expected shares of the bandwidth and of the matrix rate, per
/// mille. On Hopper the rate is that of `wgmma`.
const EFFICIENCY: (u32, u32) = (750, 600);
const EFFICIENCY_ON_HOPPER: (u32, u32) = (750, 330);

/// The kernel family.
#[derive(Debug)]
pub(super) struct AttentionCpAsync;

fn attend_spec(dtype: DType, dim: u32, (masked, bounded): (bool, bool), variant: Variant) -> AttentionSpec {
    // Shared memory of these variants holds two CTAs only
    // with a smaller key tile.
    let has_little = matches!(variant, Variant::Sm89 | Variant::Sm120) && dim > 64;
    // A mask needs registers beside the accumulators, so
    // the key tile is smaller.
    let has_few_registers = masked && dim > 64;
    let keys = if has_little || has_few_registers { 32 } else { 64 };
    let attend = AttentionSpec::attend(KvFormats::both(KvFormat::Plain(dtype)), [dim; 2], ROWS, keys);
    AttentionSpec { x: KernelDType::Of(dtype), masked, bounded, ..attend }
}

/// `SharedStorage` of `attention/sm80/prefill_work.cuh`.
fn shared_bytes(spec: &AttentionSpec) -> u32 {
    let tiles = (ROWS + spec.keys) * spec.qk * 2 + spec.keys * spec.v * 2;
    // Absent keys, flags for infinite or NaN values, masked
    // tiles, and the CTA's work item.
    let of_mask = if spec.masked { super::tile_bits_bytes(spec, THREADS / 32) } else { 0 };
    (tiles + 12 + of_mask).next_multiple_of(8).saturating_add(64).next_multiple_of(16)
}

/// Kernels for `variant`.
fn kernels(variant: Variant) -> impl Iterator<Item = AttentionSpec> {
    let dtypes = [DType::F16, DType::BF16].into_iter().filter(move |_| variant >= Variant::Sm80);
    dtypes.flat_map(move |dtype| {
        DIMS.into_iter()
            .flat_map(move |dim| super::MASKED_AND_BOUNDED.map(|axes| attend_spec(dtype, dim, axes, variant)))
    })
}

/// The kernel for `op`, or the refusal.
pub(super) fn spec_of(op: &CheckedAttention, info: &DeviceInfo) -> Result<(AttentionSpec, Variant), Unsupported> {
    let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
    let dtype = [DType::F16, DType::BF16].into_iter().find(|&dtype| variant >= Variant::Sm80 && is_all(op, dtype));
    let dtype = dtype.ok_or_else(|| Unsupported::new("multiplies Q, K and V of f16 or all of bf16, from Ampere on"))?;
    if op.most_queries() < super::LEAST_QUERIES {
        return Err(Unsupported::new(format!("leaves fewer than {} queries to others", super::LEAST_QUERIES)));
    }
    if !op.q.aligned || !op.k.rows.aligned || !op.v.rows.aligned {
        return Err(Unsupported::new("reads Q, K and V whose rows begin at multiples of 16 bytes"));
    }
    let dim = DIMS.into_iter().find(|&dim| dim as usize >= op.qk_dim.max(op.v_dim));
    let dim = dim.ok_or_else(|| Unsupported::new("has no kernel for so many features a head"))?;
    let spec = attend_spec(dtype, dim, (op.mask.is_some(), super::is_bounded(op)), variant);
    check_shared(shared_bytes(&spec), info)?;
    Ok((spec, variant))
}

fn id(spec: AttentionSpec, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::Attention(spec))
}

fn source(spec: AttentionSpec, variant: Variant) -> KernelSpec {
    let entry = "entry/sm80_attention_cp_async.cu";
    let prelude = Prelude {
        threads: Some(THREADS),
        ctas_per_sm: Some(CTAS_A_UNIT),
        kv: Some(kv_code(spec.kv.k)),
        qk: Some(spec.qk),
        v: Some(spec.v),
        sliced: Some(0),
        keys: Some(spec.keys),
        bounded: Some(spec.bounded.into()),
        bits: Some(spec.masked.into()),
        shared_bytes: Some(shared_bytes(&spec)),
        ..Prelude::of(variant)
    };
    let (name, symbol) = (id(spec, variant).to_string(), "qg_sm80_attention_cp_async");
    KernelSpec { name, entry, text: source::entry(entry), symbol, prelude: prelude.text(), arch_specific: false }
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    kernels(variant).map(move |spec| source(spec, variant))
}

/// `CpAsyncParams` in `attention/sm80/prefill_work.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct CpAsyncParams {
    attention: AttentionParams,
    heads_together: [u32; 2],
}

/// `CpAsyncParams` of kernels with a mask.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct MaskedCpAsyncParams {
    attention: MaskedParams,
    heads_together: [u32; 2],
}

impl Params for MaskedCpAsyncParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        Ok(LaunchParams::of(&Self { attention: self.attention.at(operands, at)?, ..*self }))
    }
}

impl Params for CpAsyncParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        Ok(LaunchParams::of(&Self { attention: self.attention.at(operands, at)?, ..*self }))
    }
}

/// Configs for plain keys and values.
fn configs(op: &CheckedAttention, info: &DeviceInfo) -> Result<Vec<AttentionConfig>, Unsupported> {
    let (spec, variant) = spec_of(op, info)?;
    super::check_invariant(NAME, op, info)?;
    ctas(&[op.sequences, op.heads, op.most_queries().div_ceil(ROWS as usize)])?;
    let efficiency = if variant == Variant::Sm90 { EFFICIENCY_ON_HOPPER } else { EFFICIENCY };
    Ok(vec![super::one_launch(op, id(spec, variant), &spec, efficiency)])
}

impl Family<CheckedAttention> for AttentionCpAsync {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedAttention, info: &DeviceInfo) -> Result<Vec<AttentionConfig>, Unsupported> {
        dequantized::configs(op, |op| configs(op, info))
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedAttention,
        plan: &AttentionPlan,
    ) -> Result<LaunchSequence, HalError> {
        super::sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, _: &CheckedAttention, config: &AttentionConfig) -> u64 {
        super::source_hash(config, source)
    }
}

/// Launch sequence of a plan.
pub(super) fn sequence(
    op: &CheckedAttention,
    config: &AttentionConfig,
    info: &DeviceInfo,
    variant: Variant,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    use AttentionOperand as O;
    let Spec::Attention(spec) = config.kernel.spec else { unreachable!("a configuration is of a kernel of attention") };
    let row_ctas = op.most_queries().div_ceil(ROWS as usize) as u32;
    let of_head = op.sequences as u32 * row_ctas;
    let attention = AttentionParams::new(op, 1, config.part_keys, row_ctas);
    let heads_together = [super::heads_together(op.heads, of_head, info.units.max(1) * CTAS_A_UNIT), 0];
    let params: Arc<dyn Params> = match op.mask {
        Some(mask) => {
            Arc::new(MaskedCpAsyncParams { attention: MaskedParams::new(attention, op, mask), heads_together })
        }
        None => Arc::new(CpAsyncParams { attention, heads_together }),
    };
    let launch = KernelLaunch {
        id: config.kernel,
        spec: source(spec, variant),
        geometry: Geometry {
            grid: [op.heads as u32 * of_head, 1, 1],
            threads: THREADS,
            shared_bytes: shared_bytes(&spec),
        },
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: O::ALL,
        updated: None,
        params,
    };
    let step = launch.step::<O>(make)?.of_operation().unbind(O::Workspace);
    Ok(LaunchSequence::new::<O>(format!("{NAME}_{}", op.dtype), vec![step]))
}
