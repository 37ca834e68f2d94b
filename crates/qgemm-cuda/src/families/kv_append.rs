//! `kv_append`: rotary embedding and Hadamard rotation of
//! heads, and KV-cache append, in one launch.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{self, AttentionPointers, AttentionShape, KvAppendPointers, dtype_code};
use qgemm_hal::op::kv_append::{hadamard_block, hadamard_scale};
use qgemm_hal::{
    CheckedKvAppend, Device, DeviceInfo, Families, Family, Geometry, HalError, KernelId, KvAddressing, KvAppendConfig,
    KvAppendLaunch, KvAppendOperand, KvAppendSpec, KvAppendStep, KvFormat, LaunchSequence, Operand, OperandDesc,
    Operands, Operation, Paging, QueryLengths, RotaryAngles, RotaryPairs, Spec, Unsupported, Variant,
};

use super::attention::params::{AttentionParams, kv_code};
use super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load, with_constants};
use super::launch_params::LaunchParams;
use super::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

/// Family name.
const NAME: &str = "kv_append";
/// Threads of a CTA.
const THREADS: u32 = 128;
/// Features of a lane.
const LANE_FEATURES: usize = 8;
/// Maximum heads that a lane processes in
/// turn, as in the kernel.
const MOST_LANE_HEADS: usize = 6;
/// Cosines and sines of a head's pairs, and gammas (`SharedStorage`).
const SHARED_BYTES: u32 = 1024 + 2048;
/// Below this many CTAs per SM, heads are spread over more
/// CTAs instead of several per lane.
const FEW_CTAS: usize = 8;
/// Expected share of the bandwidth, per mille.
const EFFICIENCY: u32 = 750;

/// Operand access where indices are ready before the launch: they, angles, gammas and
/// factors are constant, like weights.
static READY_OPERANDS: [OperandDesc; KvAppendOperand::ALL.len()] = {
    use KvAppendOperand as O;
    let ready = [
        O::QOffsets as usize,
        O::KvOffsets as usize,
        O::KvLengths as usize,
        O::BlockTable as usize,
        O::Positions as usize,
        O::Cos as usize,
        O::Sin as usize,
        O::QGamma as usize,
        O::KGamma as usize,
    ];
    with_constants(O::ALL, &ready)
};

/// Families of `kv_append`.
pub(super) const FAMILIES: Families<CheckedKvAppend> = &[&KvAppend];

/// The kernel family.
#[derive(Debug)]
struct KvAppend;

fn spec_of(x: DType, kv: KvFormat) -> KvAppendSpec {
    KvAppendSpec { step: KvAppendStep::All, x, kv }
}

fn id(spec: KvAppendSpec, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::KvAppend(spec))
}

fn source(spec: KvAppendSpec, variant: Variant) -> KernelSpec {
    let entry = "entry/kv_append.cu";
    let prelude = Prelude {
        threads: Some(THREADS),
        shared_bytes: Some(SHARED_BYTES),
        x: Some(dtype_code(spec.x)),
        kv: Some(kv_code(spec.kv)),
        ..Prelude::of(variant)
    };
    let name = id(spec, variant).to_string();
    KernelSpec {
        name,
        entry,
        text: source::entry(entry),
        symbol: "qg_kv_append",
        prelude: prelude.text(),
        arch_specific: false,
    }
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let all = DType::ALL.into_iter().flat_map(|x| KvFormat::ALL.map(|kv| spec_of(x, kv)));
    all.map(move |spec| source(spec, variant))
}

/// `KvAppendParams` in `entry/kv_append.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct KvAppendParams {
    attention: AttentionParams,
    at: KvAppendPointers,
}

impl Params for KvAppendParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        use KvAppendOperand as O;
        let mut params = *self;
        let (attention, own) = (&mut params.attention.at, &mut params.at);
        let pointers = [
            (&mut attention.q, O::Q),
            (&mut attention.k, O::K),
            (&mut attention.v, O::V),
            (&mut attention.k_factors, O::KFactors),
            (&mut attention.v_factors, O::VFactors),
            (&mut attention.k_scales, O::KScales),
            (&mut attention.v_scales, O::VScales),
            (&mut attention.q_offsets, O::QOffsets),
            (&mut attention.kv_offsets, O::KvOffsets),
            (&mut attention.kv_lengths, O::KvLengths),
            (&mut attention.block_table, O::BlockTable),
            (&mut own.new_k, O::NewK),
            (&mut own.new_v, O::NewV),
            (&mut own.q_gamma, O::QGamma),
            (&mut own.k_gamma, O::KGamma),
            (&mut own.positions, O::Positions),
            (&mut own.frequencies, O::Frequencies),
            (&mut own.cos, O::Cos),
            (&mut own.sin, O::Sin),
        ];
        at.fill(operands, pointers)?;
        Ok(LaunchParams::of(&params))
    }
}

/// Split of a token's heads over lanes and CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    /// Lanes of a head.
    head_lanes: u32,
    /// Heads that a lane processes in turn.
    lane_heads: u32,
    /// CTAs of a token.
    splits: u32,
}

impl Cut {
    fn of(op: &CheckedKvAppend, info: &DeviceInfo) -> Self {
        let head_lanes = (op.qk_dim.max(op.v_dim).div_ceil(LANE_FEATURES)).next_power_of_two();
        let rounds = (op.heads + 2 * op.kv_heads).div_ceil(THREADS as usize / head_lanes);
        let is_alone = op.addressing.tokens * rounds <= FEW_CTAS * info.units as usize;
        let splits = if is_alone { rounds } else { rounds.div_ceil(MOST_LANE_HEADS) };
        Self { head_lanes: head_lanes as u32, lane_heads: rounds.div_ceil(splits) as u32, splits: splits as u32 }
    }
}

/// Kernel parameters without addresses.
fn params(op: &CheckedKvAppend, cut: Cut) -> KvAppendParams {
    let addressing = &op.addressing;
    let Paging { pages, page_size, width } = addressing.paging();
    let flags = [
        (abi::FLAG_Q_OFFSETS, matches!(addressing.queries, QueryLengths::Offsets { .. })),
        (abi::FLAG_KV_OFFSETS, matches!(addressing.places, KvAddressing::Offsets { .. })),
        (abi::FLAG_KV_LENGTHS, width > 0 || matches!(addressing.places, KvAddressing::Pages { lengths: true, .. })),
        (abi::FLAG_KEYS_READY, addressing.keys_ready),
        (abi::FLAG_Q_ALIGNED, op.q.aligned),
        (abi::FLAG_KV_ALIGNED, op.k.rows.aligned && op.v.rows.aligned),
    ];
    let shape = AttentionShape {
        sequences: addressing.sequences as u32,
        tokens: addressing.tokens as u32,
        most_queries: addressing.most_queries() as u32,
        most_keys: addressing.most_keys as u32,
        heads: op.heads as u32,
        kv_heads: op.kv_heads as u32,
        qk_dim: op.qk_dim as u32,
        v_dim: op.v_dim as u32,
        pages: pages as u32,
        page_size: page_size as u32,
        table_width: width as u32,
        window: u32::MAX,
        flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
        dtype: dtype_code(op.dtype),
        ..AttentionShape::default()
    };
    let page_shift = if page_size.is_power_of_two() { page_size.trailing_zeros() } else { 32 };
    let attention = AttentionPointers {
        q_token: op.q.token_stride,
        q_head: op.q.head_stride,
        k_page: op.k.page_stride,
        k_token: op.k.rows.token_stride,
        k_head: op.k.rows.head_stride,
        v_page: op.v.page_stride,
        v_token: op.v.rows.token_stride,
        v_head: op.v.rows.head_stride,
        page_shift,
        ..AttentionPointers::default()
    };
    let (table_positions, table_row) = match op.angles() {
        Some(RotaryAngles::Tables { positions, row_stride }) => (positions as u32, row_stride),
        _ => (0, 0),
    };
    let lanes = |is_rotated, dim| if is_rotated { (hadamard_block(dim) / LANE_FEATURES) as u32 } else { 0 };
    let at = KvAppendPointers {
        new_k_token: op.new_k.token_stride,
        new_k_head: op.new_k.head_stride,
        new_v_token: op.new_v.token_stride,
        new_v_head: op.new_v.head_stride,
        table_row,
        table_positions,
        rotary_dim: op.rotary.map_or(0, |rotary| rotary.dim as u32),
        interleaved: u32::from(op.rotary.is_some_and(|rotary| rotary.pairs == RotaryPairs::Interleaved)),
        new_aligned: u32::from(op.new_k.aligned && op.new_v.aligned),
        head_lanes: cut.head_lanes,
        splits: cut.splits,
        lane_heads: cut.lane_heads,
        amplitude: op.rotary.map_or(1.0, |rotary| rotary.amplitude),
        sine_amplitude: op.rotary.map_or(1.0, |rotary| rotary.sine_amplitude()),
        k_lanes: lanes(op.rotate_k, op.qk_dim),
        v_lanes: lanes(op.rotate_v, op.v_dim),
        k_scale: hadamard_scale(hadamard_block(op.qk_dim)),
        v_scale: hadamard_scale(hadamard_block(op.v_dim)),
        turns_last: op.turns_last().into(),
        is_normed: op.head_norm.is_some().into(),
        gamma_dtype: op.head_norm.map_or(0, |norm| dtype_code(norm.gamma)),
        eps: op.head_norm.map_or(0.0, |norm| norm.eps),
        head_inverse: 1.0 / op.qk_dim as f32,
        ..KvAppendPointers::default()
    };
    KvAppendParams { attention: AttentionParams { shape, at: attention }, at }
}

/// CTAs of a launch; `None` on overflow.
fn ctas(op: &CheckedKvAppend, cut: Cut) -> Option<u32> {
    let ctas = u32::try_from(op.addressing.tokens).ok()?.checked_mul(cut.splits)?;
    i32::try_from(ctas).is_ok().then_some(ctas)
}

/// Launch sequence of a plan. `make` prepares its kernels.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel
/// variant, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedKvAppend,
    _: &KvAppendLaunch,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let wrong_device = HalError::WrongDevice { device: info.id, what: "a CUDA kernel" };
    let (cut, spec) = (Cut::of(op, info), spec_of(op.dtype, op.kv));
    let (Some(variant), Some(ctas)) = (info.variant, ctas(op, cut)) else { return Err(wrong_device) };
    let launch = KernelLaunch {
        id: id(spec, variant),
        spec: source(spec, variant),
        geometry: Geometry { grid: [ctas, 1, 1], threads: THREADS, shared_bytes: SHARED_BYTES },
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: if op.addressing.keys_ready { &READY_OPERANDS } else { KvAppendOperand::ALL },
        updated: None,
        params: Arc::new(params(op, cut)),
    };
    let step = launch.step::<KvAppendOperand>(make)?;
    let step = step.bind_all(op.operands());
    Ok(LaunchSequence::new::<KvAppendOperand>(format!("{NAME}_{}_{}", op.dtype, op.kv), vec![step]))
}

impl Family<CheckedKvAppend> for KvAppend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedKvAppend, info: &DeviceInfo) -> Result<Vec<KvAppendConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        if ctas(op, Cut::of(op, info)).is_none() {
            return Err(Unsupported::new("counts CTAs in 31 bits: append fewer tokens at once"));
        }
        let kernel = id(spec_of(op.dtype, op.kv), variant);
        Ok(vec![KvAppendConfig { kernel, launches: 1, efficiency: EFFICIENCY }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedKvAppend,
        plan: &KvAppendLaunch,
    ) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, _: &CheckedKvAppend, config: &KvAppendConfig) -> u64 {
        match (config.kernel.spec, config.kernel.variant) {
            (Spec::KvAppend(spec), Some(variant)) => source(spec, variant).source_hash().short(),
            _ => 0,
        }
    }
}
