//! `attention_simt`: attention with FMA. A group of lanes holds a key
//! and runs an online softmax. Split-KV for few queries, with a
//! second kernel for the combine.

use std::sync::Arc;

use qgemm_hal::{
    AttentionConfig, AttentionOperand, AttentionPlan, AttentionSpec, AttentionStep, CheckedAttention, Device,
    DeviceInfo, Family, Geometry, HalError, KernelId, KvFormat, KvFormats, LaunchSequence, LaunchStep, Math, Spec,
    Unsupported, Variant, WorkspaceLayout,
};

use super::super::kernel_launch::{KernelLaunch, MakeKernel, Params, load};
use super::super::prelude::Prelude;
use super::params::{AttentionParams, for_attend, kv_code, operands};
use crate::source;
use crate::spec::KernelSpec;

/// Family name.
pub(super) const NAME: &str = "attention_simt";
/// Threads of a CTA.
const THREADS: u32 = 128;
/// Row tiles: queries of the heads that share a KV head.
const ROWS: [u32; 3] = [1, 4, 8];
/// Row tiles of kernels with a mask.
const MASKED_ROWS: [u32; 1] = [4];
/// Row tiles with sixteen features a lane.
const WIDE_ROWS: [u32; 2] = [1, 2];
/// Row tiles of these with a mask.
const MASKED_WIDE_ROWS: [u32; 1] = [2];
/// Head dimensions. A key is held by up to 32 lanes with eight
/// features each, beyond that with sixteen.
const DIMS: [u32; 4] = [64, 128, 256, 512];
/// Value features of a CTA that combines parts.
const COMBINE_FEATURES: usize = 256;
/// CTAs per SM to aim for: keys are split until
/// there are this many CTAs.
const CTAS_A_UNIT: usize = 4;
/// Minimum keys of a split-KV part.
const LEAST_PART: usize = 256;
/// Keys of a split-KV part when bits must not depend on
/// the number of sequences.
pub(super) const INVARIANT_PART: usize = 512;
/// Maximum queries for that fixed split.
const INVARIANT_QUERIES: usize = 16;
/// Maximum bytes of partial results.
const MOST_PARTIAL_BYTES: usize = 1 << 28;
/// Expected shares of the bandwidth and of the FMA rate,
/// per mille. Conversions, shuffles and the softmax take
/// as many instructions as FMA.
const EFFICIENCY: (u32, u32) = (850, 350);

/// The kernel family.
#[derive(Debug)]
pub(super) struct AttentionSimt;

/// Head dimension of the kernel for `op`.
fn dim(op: &CheckedAttention) -> u32 {
    let dim = op.qk_dim.max(op.v_dim) as u32;
    DIMS.into_iter().find(|&most| most >= dim).unwrap_or(DIMS[DIMS.len() - 1])
}

/// Features of a lane.
const fn lane_features(dim: u32) -> u32 {
    if dim > 32 * 8 { 16 } else { 8 }
}

/// Lanes that hold a key.
const fn lanes(dim: u32) -> u32 {
    dim / lane_features(dim)
}

/// Lane groups of a CTA.
const fn groups(dim: u32) -> u32 {
    THREADS / lanes(dim)
}

/// Keys that a lane group loads together. With more rows or
/// features, fewer registers remain for keys.
const fn keys_together(dim: u32, rows: u32) -> u32 {
    if rows > 4 || lane_features(dim) > 8 { 2 } else { 4 }
}

fn spec_of(op: &CheckedAttention) -> AttentionSpec {
    let (dim, rows) = (dim(op), op.most_queries() * op.group());
    let is_masked = op.mask.is_some();
    let most = rows_of(dim, is_masked);
    let rows = most.iter().copied().find(|&most| most as usize >= rows).unwrap_or(most[most.len() - 1]);
    attend_spec(op.kv, dim, rows, is_masked)
}

/// Row tiles.
const fn rows_of(dim: u32, is_masked: bool) -> &'static [u32] {
    match (lane_features(dim) > 8, is_masked) {
        (false, false) => &ROWS,
        (false, true) => &MASKED_ROWS,
        (true, false) => &WIDE_ROWS,
        (true, true) => &MASKED_WIDE_ROWS,
    }
}

fn attend_spec(kv: KvFormats, dim: u32, rows: u32, is_masked: bool) -> AttentionSpec {
    let keys = groups(dim) * keys_together(dim, rows);
    AttentionSpec { masked: is_masked, ..AttentionSpec::attend(kv, [dim; 2], rows, keys) }
}

/// The split-KV combine kernel, for every format and dimension.
fn combine_spec() -> AttentionSpec {
    let kv = KvFormats::both(KvFormat::Plain(qgemm_formats::DType::F32));
    AttentionSpec { step: AttentionStep::Combine, ..AttentionSpec::attend(kv, [256; 2], 1, 1) }
}

/// `SharedStorage` of `entry/attention_combine.cu`: row_max, row_sum and
/// the sums of each warp.
const COMBINE_SHARED_BYTES: u32 = THREADS / 32 * (2 + COMBINE_FEATURES as u32) * 4;

fn id(spec: AttentionSpec, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::Attention(spec))
}

/// `SharedStorage` of `attention/simt/rows.cuh`.
fn shared_bytes(spec: &AttentionSpec) -> u32 {
    groups(spec.qk) * spec.rows * (spec.qk + 2) * 4
}

fn source(spec: AttentionSpec, variant: Variant) -> KernelSpec {
    let ((entry, symbol), prelude) = match spec.step {
        AttentionStep::Combine => {
            let shared_bytes = Some(COMBINE_SHARED_BYTES);
            (("entry/attention_combine.cu", "qg_attention_combine"), Prelude { shared_bytes, ..Prelude::of(variant) })
        }
        _ => (("entry/attention_simt.cu", "qg_attention_simt"), attend_prelude(&spec, variant)),
    };
    let prelude = Prelude { threads: Some(THREADS), ..prelude }.text();
    let name = id(spec, variant).to_string();
    KernelSpec { name, entry, text: source::entry(entry), symbol, prelude, arch_specific: false }
}

fn attend_prelude(spec: &AttentionSpec, variant: Variant) -> Prelude<'static> {
    // With one more CTA per SM the compiler would spill, for
    // four rows of 256 features and for masked block formats.
    let spills_blocks = spec.masked && spec.kv.have_scales() && variant == Variant::Sm120;
    let spills = (spec.qk == 256 && spec.rows == 4) || spills_blocks;
    Prelude {
        kv: Some(kv_code(spec.kv.k)),
        v_kv: Some(kv_code(spec.kv.v)),
        lanes: Some(lanes(spec.qk)),
        lane_features: Some(lane_features(spec.qk)),
        rows: Some(spec.rows),
        keys: Some(spec.keys),
        shared_bytes: Some(shared_bytes(spec)),
        ctas_per_sm: Some(if spills { 2 } else { 0 }),
        bits: Some(spec.masked.into()),
        ..Prelude::of(variant)
    }
}

/// All kernels of the family for `variant` but those of rare head
/// dimensions and of keys and values in two formats, which are compiled on first use.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let of_dim = |kv, dim| {
        [false, true].into_iter().flat_map(move |is_masked| {
            rows_of(dim, is_masked).iter().map(move |&rows| attend_spec(kv, dim, rows, is_masked))
        })
    };
    let dims = || DIMS.into_iter().filter(|&dim| super::is_common(dim));
    let attend =
        KvFormat::ALL.map(KvFormats::both).into_iter().flat_map(move |kv| dims().flat_map(move |dim| of_dim(kv, dim)));
    attend.chain([combine_spec()]).map(move |spec| source(spec, variant))
}

/// Split-KV of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// CTAs for the rows of a sequence and KV head.
    pub row_ctas: usize,
    /// Maximum parts of a sequence.
    pub parts: usize,
    /// Keys of a part.
    pub part_keys: usize,
}

impl Cut {
    fn new(op: &CheckedAttention, spec: &AttentionSpec, units: u32) -> Self {
        let row_ctas = (op.most_queries() * op.group()).div_ceil(spec.rows as usize);
        let whole = Self { row_ctas, parts: 1, part_keys: op.most_keys };
        let part_keys = match op.batch_invariant {
            true if op.most_queries() <= INVARIANT_QUERIES => INVARIANT_PART,
            true => return whole,
            false => {
                let ctas = op.sequences * op.kv_heads * row_ctas;
                let wanted = (CTAS_A_UNIT * units.max(1) as usize).div_ceil(ctas);
                op.most_keys.div_ceil(wanted).max(LEAST_PART).next_multiple_of(LEAST_PART)
            }
        };
        Self::of(op, row_ctas, part_keys)
    }

    /// Parts of `part_keys` keys, unless there is only one or the
    /// partial results are too large. With batch invariance that
    /// decision does not depend on the batch.
    pub fn of(op: &CheckedAttention, row_ctas: usize, part_keys: usize) -> Self {
        let parts = op.most_keys.div_ceil(part_keys);
        let is_small = parts
            .checked_mul(op.tokens * op.heads)
            .is_some_and(|rows| rows.checked_mul((op.v_dim + 4) * 4).is_some_and(|bytes| bytes <= MOST_PARTIAL_BYTES));
        let whole = Self { row_ctas, parts: 1, part_keys: op.most_keys };
        if parts > 1 && (is_small || op.batch_invariant) { Self { row_ctas, parts, part_keys } } else { whole }
    }
}

/// CTAs of a launch, which kernels count in 31 bits.
pub(super) fn ctas(counts: &[usize]) -> Result<u32, Unsupported> {
    let all = counts.iter().try_fold(1usize, |all, count| all.checked_mul(*count));
    let all = all.and_then(|all| i32::try_from(all).ok());
    let all = all.ok_or_else(|| Unsupported::new("counts CTAs in 31 bits: attend to fewer sequences at once"))?;
    Ok(all.cast_unsigned())
}

impl Family<CheckedAttention> for AttentionSimt {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedAttention, info: &DeviceInfo) -> Result<Vec<AttentionConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        super::check_invariant(NAME, op, info)?;
        let spec = spec_of(op);
        let cut = Cut::new(op, &spec, info.units);
        ctas(&[op.sequences, op.kv_heads, cut.row_ctas, cut.parts])?;
        ctas(&[op.sequences, op.most_queries(), op.heads])?;
        let rows = op.most_queries() * op.group();
        Ok(vec![AttentionConfig {
            kernel: id(spec, variant),
            launches: if cut.parts > 1 { 2 } else { 1 },
            parts: cut.parts as u32,
            part_keys: cut.part_keys as u32,
            workspace_bytes: if cut.parts > 1 { op.partial_bytes(cut.parts) } else { 0 },
            dequantized_bytes: 0,
            math: Math::FmaF32,
            padding: (cut.row_ctas * spec.rows as usize) as f64 / rows as f64,
            efficiency: EFFICIENCY,
        }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedAttention,
        plan: &AttentionPlan,
    ) -> Result<LaunchSequence, HalError> {
        super::sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedAttention, config: &AttentionConfig) -> u64 {
        let Some(variant) = config.kernel.variant else { return 0 };
        source(spec_of(op), variant).source_hash().short().rotate_left(7) ^ combine_hash(variant)
    }
}

/// Source hash of the combine kernel.
pub(super) fn combine_hash(variant: Variant) -> u64 {
    source(combine_spec(), variant).source_hash().short()
}

/// Launch sequence of a plan.
pub(super) fn sequence(
    op: &CheckedAttention,
    config: &AttentionConfig,
    variant: Variant,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let spec = spec_of(op);
    let row_ctas = (op.most_queries() * op.group()).div_ceil(spec.rows as usize);
    let attend = Attend {
        id: id(spec, variant),
        spec: source(spec, variant),
        row_ctas,
        head_ctas: op.kv_heads,
        params: for_attend,
        threads: THREADS,
        shared_bytes: shared_bytes(&spec),
        counts: false,
        combines_splits: false,
    };
    in_parts(NAME, op, config, variant, attend, make)
}

/// A split-KV attention kernel.
pub(super) struct Attend {
    pub id: KernelId,
    pub spec: KernelSpec,
    /// CTAs for the rows of a sequence and KV head.
    pub row_ctas: usize,
    /// CTAs along the KV heads.
    pub head_ctas: usize,
    /// The kernel's parameter.
    pub params: fn(&CheckedAttention, AttentionParams) -> Arc<dyn Params>,
    pub threads: u32,
    pub shared_bytes: u32,
    /// Whether the kernel uses the whole workspace, including counters.
    pub counts: bool,
    /// Whether the last CTA to arrive combines the parts, so that
    /// no combine kernel is needed.
    pub combines_splits: bool,
}

/// Launches of a split-KV plan: the attention kernel, then the combine
/// kernel unless the former combines itself.
pub(super) fn in_parts(
    family: &str,
    op: &CheckedAttention,
    config: &AttentionConfig,
    variant: Variant,
    attend: Attend,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    use AttentionOperand as O;
    let Attend {
        id: attend_id,
        spec: attend_spec,
        row_ctas,
        head_ctas,
        threads,
        shared_bytes,
        counts,
        combines_splits,
        ..
    } = attend;
    let params = AttentionParams::new(op, config.parts, config.part_keys, row_ctas as u32);
    let of_attend = (attend.params)(op, params);
    let mut step = |id: KernelId,
                    spec: KernelSpec,
                    [ctas, slices]: [usize; 2],
                    threads: u32,
                    shared_bytes: u32,
                    params: Arc<dyn Params>|
     -> Result<LaunchStep, HalError> {
        let launch = KernelLaunch {
            id,
            spec,
            geometry: Geometry { grid: [ctas as u32, slices as u32, 1], threads, shared_bytes },
            // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
            starts_early: variant >= Variant::Sm90,
            operands: operands(op),
            updated: None,
            params,
        };
        launch.step::<O>(make)
    };
    let parts = config.parts as usize;
    let attend = step(
        attend_id,
        attend_spec,
        [op.sequences * head_ctas * row_ctas * parts, 1],
        threads,
        shared_bytes,
        of_attend,
    )?;
    let workspace = WorkspaceLayout::RESERVED..config.workspace_bytes;
    let name = format!("{family}_{}_{}", op.dtype, op.kv);
    if parts == 1 {
        return Ok(LaunchSequence::new::<O>(name, vec![attend.of_operation().unbind(O::Workspace)]));
    }
    let of_attend = if counts { 0..config.workspace_bytes } else { workspace.clone() };
    let attend = attend.of_operation().bind_part(O::Workspace, O::Workspace, of_attend);
    if combines_splits {
        return Ok(LaunchSequence::new::<O>(name, vec![attend]));
    }
    let slices = op.v_dim.div_ceil(COMBINE_FEATURES);
    let combine_ctas = [op.sequences * op.most_queries() * op.heads, slices];
    let (combine_id, combine) = (id(combine_spec(), variant), source(combine_spec(), variant));
    let combine = step(combine_id, combine, combine_ctas, THREADS, COMBINE_SHARED_BYTES, Arc::new(params))?;
    let combine = [O::QOffsets, O::KvOffsets, O::KvLengths, O::VFactors, O::Sinks, O::Gate, O::D, O::Lse]
        .into_iter()
        .fold(combine, |step, operand| step.bind(operand, operand))
        .bind_part(O::Workspace, O::Workspace, workspace);
    Ok(LaunchSequence::new::<O>(name, vec![attend.unbind(O::Gate).unbind(O::D).unbind(O::Lse), combine]))
}
