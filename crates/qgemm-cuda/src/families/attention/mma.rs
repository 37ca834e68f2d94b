//! `attention_mma`: attention with `mma.sync`, 64 queries of a head per
//! CTA; 128 on Volta where registers suffice. Value features beyond
//! what registers hold are slices of further CTAs.

use std::ops::ControlFlow;

use qgemm_formats::DType;
use qgemm_hal::{
    AttentionConfig, AttentionOperand, AttentionPlan, AttentionSpec, CheckedAttention, Device, DeviceInfo, Family,
    Geometry, HalError, KernelDType, KernelId, KvFormat, KvFormats, LaunchSequence, Operand, Spec, Unsupported,
    Variant,
};

use super::super::kernel_launch::{KernelLaunch, MakeKernel, load};
use super::super::prelude::Prelude;
use super::dequantized;
use super::params::{AttentionParams, for_attend, is_all, kv_code};
use super::simt::ctas;
use crate::arch::check_shared;
use crate::source;
use crate::spec::KernelSpec;

/// Family name.
pub(super) const NAME: &str = "attention_mma";
/// Supported head dimensions (Q and K, V). Others are
/// padded to the next pair.
const DIMS: [(u32, u32); 10] =
    [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (320, 256), (512, 256), (512, 512)];
/// Value features of a CTA: its accumulators are 128 registers, on
/// Volta 96 beside those of keys in flight.
const MOST_SLICE: u32 = 256;
const VOLTA_SLICE: u32 = 192;
/// Value features that Volta's `mma` multiplies together.
const VOLTA_FEATURES: u32 = 32;
/// Shared memory of a CTA on Turing; on Volta
/// two CTAs fit with it.
const TURING_SHARED_BYTES: u32 = 64 << 10;
/// Shared memory of a CTA on Volta.
const VOLTA_SHARED_BYTES: u32 = 96 << 10;
/// Expected shares of the bandwidth and of the matrix rate, per
/// mille. On Hopper the rate is that of `wgmma`.
const EFFICIENCY: (u32, u32) = (700, 450);
const EFFICIENCY_ON_HOPPER: (u32, u32) = (700, 135);

/// The kernel family.
#[derive(Debug)]
pub(super) struct AttentionMma;

/// Element types that `mma` supports on a variant.
fn dtypes(variant: Variant) -> &'static [DType] {
    match variant {
        Variant::Sm70 | Variant::Sm75 => &[DType::F16],
        _ => &[DType::F16, DType::BF16],
    }
}

/// Value features of a CTA.
fn slice(spec: &AttentionSpec, variant: Variant) -> u32 {
    match spec.v > MOST_SLICE {
        true if variant == Variant::Sm70 => VOLTA_SLICE,
        _ => spec.v.min(MOST_SLICE),
    }
}

/// Threads of a CTA: one warp for every 16 queries, on Volta
/// also for 32.
fn threads(spec: &AttentionSpec) -> u32 {
    spec.rows.min(64) * 2
}

fn attend_spec(dtype: DType, (qk, v): (u32, u32), is_masked: bool, variant: Variant) -> AttentionSpec {
    // Turing has shared memory and registers for fewer rows. Volta's warps
    // take twice as many queries where registers suffice.
    let rows = match qk {
        ..=96 if variant == Variant::Sm70 => 128,
        ..=128 if variant == Variant::Sm70 && !is_masked => 128,
        321.. if variant == Variant::Sm75 => 32,
        _ => 64,
    };
    let keys = match qk {
        65..=128 if variant == Variant::Sm70 => 32,
        193.. if variant < Variant::Sm80 => 16,
        129.. if variant < Variant::Sm80 => 32,
        193.. => 32,
        _ => 64,
    };
    let attend = AttentionSpec::attend(KvFormats::both(KvFormat::Plain(dtype)), [qk, v], rows, keys);
    AttentionSpec { x: KernelDType::Of(dtype), masked: is_masked, ..attend }
}

/// `SharedStorage` of `attention/sm70/prefill_tile.cuh`.
fn shared_bytes(spec: &AttentionSpec, variant: Variant) -> u32 {
    let (qk_pitch, v_pitch) = (spec.qk * 2 + 16, slice(spec, variant) * 2 + 16);
    // On Volta keys and values share a buffer in turn.
    let a_key = if variant == Variant::Sm70 { qk_pitch.max(v_pitch) } else { qk_pitch + v_pitch };
    let of_mask = if spec.masked { super::tile_bits_bytes(spec, threads(spec) / 32) } else { 0 };
    let bytes = spec.rows * qk_pitch + spec.keys * a_key + (2 + spec.keys) * 4 + of_mask;
    bytes.next_multiple_of(4)
}

/// Most shared memory of a CTA.
fn most_shared_bytes(spec: &AttentionSpec, variant: Variant) -> u32 {
    match variant {
        Variant::Sm70 if spec.qk > 320 => VOLTA_SHARED_BYTES,
        Variant::Sm70 | Variant::Sm75 => TURING_SHARED_BYTES,
        _ => u32::MAX,
    }
}

/// Kernels of a type that fit on `variant`.
fn kernels(dtype: DType, is_masked: bool, variant: Variant) -> impl Iterator<Item = AttentionSpec> {
    let of_dims = move |dims| {
        let spec = attend_spec(dtype, dims, is_masked, variant);
        // Large heads have half the queries where shared memory is small.
        let fewer =
            (spec.qk > 320 && variant >= Variant::Sm80).then_some(AttentionSpec { rows: spec.rows / 2, ..spec });
        [Some(spec), fewer].into_iter().flatten()
    };
    let all = DIMS.into_iter().flat_map(of_dims);
    // Mask words hold 32 keys.
    let has_words = move |spec: &AttentionSpec| !is_masked || spec.keys.is_multiple_of(32);
    all.filter(move |spec| variant > Variant::Sm70 || spec.v.is_multiple_of(VOLTA_FEATURES))
        .filter(move |spec| shared_bytes(spec, variant) <= most_shared_bytes(spec, variant))
        .filter(has_words)
}

/// The kernel for `op`, or the refusal.
pub(super) fn spec_of(op: &CheckedAttention, info: &DeviceInfo) -> Result<(AttentionSpec, Variant), Unsupported> {
    let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
    let dtype = dtypes(variant).iter().copied().find(|&dtype| is_all(op, dtype));
    let dtype = dtype.ok_or_else(|| {
        let served: Vec<&str> = dtypes(variant).iter().map(|dtype| dtype.name()).collect();
        Unsupported::new(format!("multiplies Q, K and V of one type of [{}]", served.join(", ")))
    })?;
    if !op.q.aligned || !op.k.rows.aligned || !op.v.rows.aligned {
        return Err(Unsupported::new("reads Q, K and V whose rows begin at multiples of 16 bytes"));
    }
    let fits = |spec: &AttentionSpec| spec.qk as usize >= op.qk_dim && spec.v as usize >= op.v_dim;
    let refusal = Unsupported::new("has no kernel for so many features a head");
    let fitting = kernels(dtype, op.mask.is_some(), variant).filter(fits);
    let mut checked = fitting.map(|spec| check_shared(shared_bytes(&spec, variant), info).map(|()| spec));
    let spec = checked.try_fold(refusal, |_, spec| spec.map_or_else(ControlFlow::Continue, ControlFlow::Break));
    match spec {
        ControlFlow::Break(spec) => Ok((spec, variant)),
        ControlFlow::Continue(refusal) => Err(refusal),
    }
}

fn id(spec: AttentionSpec, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::Attention(spec))
}

/// Resident CTAs to demand of the compiler, where it would
/// otherwise pick more and spill.
fn ctas_per_sm(spec: &AttentionSpec, variant: Variant) -> Option<u32> {
    let is_masked = spec.masked;
    match (spec.qk, spec.v) {
        (321.., _) => Some(1),
        _ if variant == Variant::Sm70 => Some(2),
        (64, 64) if is_masked => Some(3),
        (80, 80) | (128, 128) if is_masked => Some(2),
        (80, 80) => Some(3),
        (96, 96) if variant < Variant::Sm80 => Some(2),
        (192, 128) => Some(2),
        _ => None,
    }
}

fn source(spec: AttentionSpec, variant: Variant) -> KernelSpec {
    let entry = "entry/sm70_attention_mma.cu";
    let prelude = Prelude {
        threads: Some(threads(&spec)),
        kv: Some(kv_code(spec.kv.k)),
        qk: Some(spec.qk),
        v: Some(slice(&spec, variant)),
        sliced: Some((slice(&spec, variant) < spec.v).into()),
        rows: Some(spec.rows),
        keys: Some(spec.keys),
        bits: Some(spec.masked.into()),
        shared_bytes: Some(shared_bytes(&spec, variant)),
        ctas_per_sm: Some(ctas_per_sm(&spec, variant).unwrap_or(0)),
        ..Prelude::of(variant)
    };
    let (name, symbol) = (id(spec, variant).to_string(), "qg_attention_mma");
    KernelSpec { name, entry, text: source::entry(entry), symbol, prelude: prelude.text(), arch_specific: false }
}

/// All kernels of the family for `variant` but those of rare head
/// dimensions, which are compiled on first use.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let of_type =
        move |&dtype: &DType| [false, true].into_iter().flat_map(move |is_masked| kernels(dtype, is_masked, variant));
    let common = dtypes(variant).iter().flat_map(of_type).filter(|spec| super::is_common(spec.qk));
    common.map(move |spec| source(spec, variant))
}

/// Configs for plain keys and values.
fn configs(op: &CheckedAttention, info: &DeviceInfo) -> Result<Vec<AttentionConfig>, Unsupported> {
    let (spec, variant) = spec_of(op, info)?;
    super::check_invariant(NAME, op, info)?;
    ctas(&[op.sequences, op.heads, op.most_queries().div_ceil(spec.rows as usize)])?;
    let efficiency = if variant == Variant::Sm90 { EFFICIENCY_ON_HOPPER } else { EFFICIENCY };
    let config = super::one_launch(op, id(spec, variant), &spec, efficiency);
    Ok(vec![AttentionConfig { padding: super::padding_of_slices(op, &spec, slice(&spec, variant)), ..config }])
}

impl Family<CheckedAttention> for AttentionMma {
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
    variant: Variant,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    use AttentionOperand as O;
    let Spec::Attention(spec) = config.kernel.spec else { unreachable!("a configuration is of a kernel of attention") };
    let row_ctas = op.most_queries().div_ceil(spec.rows as usize);
    let slices = op.v_dim.div_ceil(slice(&spec, variant) as usize) as u32;
    let launch = KernelLaunch {
        id: config.kernel,
        spec: source(spec, variant),
        geometry: Geometry {
            grid: [(op.sequences * op.heads * row_ctas) as u32, slices, 1],
            threads: threads(&spec),
            shared_bytes: shared_bytes(&spec, variant),
        },
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: O::ALL,
        updated: None,
        params: for_attend(op, AttentionParams::new(op, 1, config.part_keys, row_ctas as u32)),
    };
    let step = launch.step::<O>(make)?.of_operation().unbind(O::Workspace);
    Ok(LaunchSequence::new::<O>(format!("{NAME}_{}", op.dtype), vec![step]))
}
