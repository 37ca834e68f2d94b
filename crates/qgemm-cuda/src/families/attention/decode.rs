//! `attention_decode`: attention of few queries with matrix instructions.
//! The query heads of a KV head share a tile; split-KV
//! for few sequences, as in `simt`.

use qgemm_formats::DType;
use qgemm_hal::abi::dtype_code;
use qgemm_hal::{
    AttentionConfig, AttentionPlan, AttentionSpec, CheckedAttention, Device, DeviceInfo, Family, HalError, KernelDType,
    KernelId, KvFormat, KvFormats, LaunchSequence, Math, Spec, Unsupported, Variant, WorkspaceLayout,
};

use super::super::kernel_launch::{MakeKernel, load};
use super::super::prelude::Prelude;
use super::decode_pairs as pairs;
use super::dequantized;
use super::params::{for_attend, kv_code};
use super::simt::{self, Attend, Cut, ctas};
use crate::arch::check_shared;
use crate::source;
use crate::spec::KernelSpec;

/// Family name.
pub(super) const NAME: &str = "attention_decode";
/// Counters in a workspace: one for the split-KV
/// CTAs of the same rows.
const COUNTERS: usize = WorkspaceLayout::RESERVED / size_of::<u32>();
/// Maximum rows per sequence and KV head. Beyond it,
/// keys are read too often.
const MOST_ROWS: usize = 128;
/// Bytes after the rings, for what the end of a CTA
/// needs (`SavedWork` in `attention/sm80/decode_work.cuh`).
const STATE_BYTES: u32 = 48;
/// Supported head dimensions (Q and K, V).
const DIMS: [[u32; 2]; 5] = [[64, 64], [128, 128], [256, 256], [512, 256], [512, 512]];
/// Largest head dimension of quantized keys, of sixteen rows,
/// and of bundles.
const MOST_CODES_DIM: u32 = 128;
/// Minimum keys of a split-KV part.
const LEAST_PART: usize = 256;
/// Start and end of a CTA, expressed as the keys it
/// could process meanwhile.
const CTA_KEYS: usize = 160;
/// Maximum waves of split-KV CTAs.
const MOST_WAVES: usize = 6;
/// Expected shares of the bandwidth and of the
/// matrix rate, per mille.
const EFFICIENCY: (u32, u32) = (920, 300);

/// The kernel family.
#[derive(Debug)]
pub(super) struct AttentionDecode;

/// The kernel for Q of type `x`.
fn attend_spec(x: DType, kv: KvFormat, dims: [u32; 2], is_masked: bool, rows: u32, variant: Variant) -> AttentionSpec {
    let keys = warps(dims, rows, is_masked, variant) * tile(kv, dims[0]);
    AttentionSpec {
        x: KernelDType::Of(x),
        masked: is_masked,
        ..AttentionSpec::attend(KvFormats::both(kv), dims, rows, keys)
    }
}

/// Format of a kernel's keys and values.
fn format(spec: &AttentionSpec) -> KvFormat {
    spec.kv.k
}

/// Head dimensions of kernels for a KV format.
fn dims(kv: KvFormat) -> impl Iterator<Item = [u32; 2]> {
    DIMS.into_iter().filter(move |dims| kv.bits() > 8 || dims[0] <= MOST_CODES_DIM)
}

/// Supported row tiles (queries of the heads that share a
/// KV head), smallest first.
///
/// Eight rows, the usual GQA group, are the columns of `mma`;
/// sixteen are its rows. Dequantizing keys twice costs less than half-empty
/// tiles, hence 8 rows for quantized keys. Registers hold eight
/// rows of long heads.
fn rows(kv: KvFormat, dims: [u32; 2], is_masked: bool, variant: Variant) -> &'static [u32] {
    match kv.bits() > 8 && dims[0] <= MOST_CODES_DIM {
        true if is_masked || variant != Variant::Sm90 => &[16],
        true => &[8, 16],
        false => &[8],
    }
}

/// Whether the product is transposed: keys are the rows of
/// `mma`, queries the columns.
fn is_transposed(spec: &AttentionSpec) -> bool {
    spec.rows == 8
}

/// Warps of a CTA, which split its keys. More warps where
/// registers are few and shared memory holds their rings: few parts
/// are combined faster than many.
fn warps(dims: [u32; 2], rows: u32, is_masked: bool, variant: Variant) -> u32 {
    match dims[0] {
        257.. => 2,
        _ if rows == 8 && !is_masked && variant == Variant::Sm90 => 8,
        _ => 4,
    }
}

/// Threads of a CTA.
fn threads(spec: &AttentionSpec) -> u32 {
    if pairs::is_of(spec) {
        return pairs::THREADS;
    }
    spec.keys / tile(format(spec), spec.qk) * 32
}

/// Keys of a warp tile. Small keys get larger tiles to
/// amortize the cost of a tile.
fn tile(kv: KvFormat, dim: u32) -> u32 {
    if kv.bits() > 8 && dim > 64 { 16 } else { 32 }
}

/// Types of Q with the KV formats that kernels of
/// `variant` multiply with them.
fn formats(variant: Variant) -> impl Iterator<Item = (DType, KvFormat)> {
    let halves = [DType::F16, DType::BF16].into_iter().filter(move |_| variant >= Variant::Sm80);
    halves.flat_map(|x| [KvFormat::Plain(x), KvFormat::E4M3, KvFormat::Q8_0, KvFormat::Q4_0].map(|kv| (x, kv)))
}

/// Resident CTAs per SM: enough bytes in flight to saturate memory
/// bandwidth. Quantized keys need more instructions per byte, so they get
/// more CTAs where shared memory allows.
fn ctas_a_unit(spec: &AttentionSpec, variant: Variant) -> usize {
    if pairs::is_of(spec) {
        return 1;
    }
    // Shared memory of an SM. Each CTA takes another 1024 bytes.
    let room: u32 = match variant {
        Variant::Sm80 => 164 << 10,
        Variant::Sm90 => 228 << 10,
        _ => 100 << 10,
    };
    // Limited by registers.
    let most = match format(spec).bits() > 8 || (spec.masked && variant < Variant::Sm90) {
        true => 2,
        false if threads(spec) > 128 => 2,
        false => 3,
    };
    (room / (shared_bytes(spec) + 1024)).clamp(1, most) as usize
}

/// Slots of a warp's ring. A slot holds the keys
/// or the values of a tile.
fn slots(spec: &AttentionSpec) -> u32 {
    match format(spec).bits() > 8 {
        _ if pairs::is_of(spec) => pairs::SLOTS,
        true if is_transposed(spec) => 3,
        true => 6,
        false if spec.qk > 64 => 3,
        false => 4,
    }
}

/// Shared memory of `entry/sm80_attention_decode.cu`:
/// rings and parked work.
fn shared_bytes(spec: &AttentionSpec) -> u32 {
    if pairs::is_of(spec) {
        return pairs::ring_bytes() + STATE_BYTES;
    }
    let bytes = |numbers: u32| format(spec).bytes_of(numbers as usize) as u32;
    let scales = format(spec).scale_bytes_of(spec.qk as usize) as u32;
    // Swizzled rows need no padding.
    let is_permuted = |numbers| format(spec).bits() > 8 || bytes(numbers) == 128;
    let k_gap = match format(spec) {
        _ if is_permuted(spec.qk) || format(spec) == KvFormat::E4M3 => 0,
        _ if format(spec).bits() == 8 => 32,
        _ => 16,
    };
    let v_gap = if is_permuted(spec.v) { 0 } else { 16 };
    let row = (bytes(spec.qk) + k_gap).max(bytes(spec.v) + v_gap) + scales;
    // f16 weights (softmax probabilities) of eight rows.
    let weights = if is_transposed(spec) { spec.rows * 2 } else { 0 };
    spec.keys * (slots(spec) * row + weights) + STATE_BYTES
}

fn id(spec: AttentionSpec, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::Attention(spec))
}

fn source(spec: AttentionSpec, variant: Variant) -> KernelSpec {
    let entry = "entry/sm80_attention_decode.cu";
    let KernelDType::Of(x) = spec.x else { unreachable!("kernels are compiled for a type of Q") };
    let prelude = Prelude {
        threads: Some(threads(&spec)),
        x: Some(dtype_code(x)),
        kv: Some(kv_code(format(&spec))),
        qk: Some(spec.qk),
        v: Some(spec.v),
        rows: Some(spec.rows),
        tile: Some(tile(format(&spec), spec.qk)),
        slots: Some(slots(&spec)),
        counters: Some(COUNTERS as u32),
        shared_bytes: Some(shared_bytes(&spec)),
        ctas_per_sm: Some(ctas_a_unit(&spec, variant) as u32),
        bits: Some(spec.masked.into()),
        pairs: Some(pairs::is_of(&spec).into()),
        ..Prelude::of(variant)
    };
    let (name, symbol) = (id(spec, variant).to_string(), "qg_attention_decode");
    KernelSpec {
        name,
        entry,
        text: source::entry(entry),
        symbol,
        prelude: prelude.text(),
        arch_specific: pairs::is_of(&spec),
    }
}

/// All kernels of the family for `variant` but those of long
/// heads, which are compiled on first use.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    let all = formats(variant).flat_map(move |(x, kv)| {
        dims(kv).filter(|dims| dims[0] <= MOST_CODES_DIM).flat_map(move |dims| {
            [false, true].into_iter().flat_map(move |is_masked| {
                let of_rows = move |&rows| attend_spec(x, kv, dims, is_masked, rows, variant);
                rows(kv, dims, is_masked, variant).iter().map(of_rows)
            })
        })
    });
    let of_pairs = formats(variant).filter(move |&(_, kv)| pairs::has(kv, variant));
    all.chain(of_pairs.map(|(x, kv)| pairs::attend_spec(x, kv))).map(move |spec| source(spec, variant))
}

/// The kernel for `op`, or the refusal.
pub(super) fn spec_of(op: &CheckedAttention, info: &DeviceInfo) -> Result<(AttentionSpec, Variant), Unsupported> {
    let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
    let kv = op.kv.single().filter(|&kv| formats(variant).any(|served| served == (op.dtype, kv)));
    let kv = kv.ok_or_else(|| {
        Unsupported::new(
            "multiplies Q of f16 or bf16 with keys and values of its type or in codes of one format, from Ampere on",
        )
    })?;
    if !op.q.aligned || !op.k.rows.aligned || !op.v.rows.aligned {
        return Err(Unsupported::new("reads Q, K and V whose rows begin at multiples of what it loads at once"));
    }
    let rows = op.most_queries() * op.group();
    if rows > MOST_ROWS {
        return Err(Unsupported::new(format!("has at most {MOST_ROWS} queries of heads that share keys, not {rows}")));
    }
    let dims = dims(kv).find(|&[qk, v]| qk as usize >= op.qk_dim && v as usize >= op.v_dim);
    let dims = dims.ok_or_else(|| Unsupported::new("has no kernel for so many features a head"))?;
    let all = self::rows(kv, dims, op.mask.is_some(), variant);
    let of_cta = all.iter().copied().find(|&of_cta| of_cta as usize >= rows).unwrap_or(all[all.len() - 1]);
    let spec = match takes_pairs(op, kv, variant, info) {
        true => pairs::attend_spec(op.dtype, kv),
        false => attend_spec(op.dtype, kv, dims, op.mask.is_some(), of_cta, variant),
    };
    check_shared(shared_bytes(&spec), info)?;
    Ok((spec, variant))
}

/// Whether a kernel for pairs of heads is faster: its CTAs
/// process more keys, but take longer to start and end.
/// With batch invariance the choice must not depend on the
/// batch, so pairs are never used.
fn takes_pairs(op: &CheckedAttention, kv: KvFormat, variant: Variant, info: &DeviceInfo) -> bool {
    let spec = pairs::attend_spec(op.dtype, kv);
    let part_keys = || cut(op, &spec, ctas_a_unit(&spec, variant), info.units).part_keys;
    !op.batch_invariant && pairs::serves(op, variant) && part_keys() >= pairs::LEAST_PART
}

/// CTAs along the KV heads.
fn head_ctas(op: &CheckedAttention, spec: &AttentionSpec) -> usize {
    if pairs::is_of(spec) { op.kv_heads / pairs::HEADS } else { op.kv_heads }
}

/// Split-KV: enough parts to keep all concurrent
/// CTAs busy to the end.
fn cut(op: &CheckedAttention, spec: &AttentionSpec, ctas_a_unit: usize, units: u32) -> Cut {
    let row_ctas = (op.most_queries() * op.group()).div_ceil(spec.rows as usize);
    if op.batch_invariant {
        return Cut::of(op, row_ctas, simt::INVARIANT_PART);
    }
    let at_once = ctas_a_unit * units.max(1) as usize;
    let tiles = op.sequences * head_ctas(op, spec) * row_ctas;
    let part_keys = part_keys(op.most_keys, tiles, at_once, spec.keys as usize);
    Cut::of(op, row_ctas, part_keys)
}

/// Keys of a split-KV part, a multiple of `turn`, for `keys`
/// keys and `tiles` row tiles with `at_once` concurrent CTAs.
fn part_keys(keys: usize, tiles: usize, at_once: usize, turn: usize) -> usize {
    let of_parts = |parts: usize| keys.div_ceil(parts).max(LEAST_PART).next_multiple_of(turn);
    // A partly filled wave takes nearly as
    // long as a full one.
    let cost = |part: usize| (tiles * keys.div_ceil(part)).div_ceil(at_once) * (part + CTA_KEYS);
    let most_parts = keys.div_ceil(LEAST_PART).min((MOST_WAVES * at_once).div_ceil(tiles.max(1))).max(1);
    let all = (1..=most_parts).map(of_parts);
    all.reduce(|best, part| if cost(part) < cost(best) { part } else { best }).unwrap_or(keys)
}

/// Whether there are enough counters for the attention kernel
/// to combine the parts itself.
fn combines_splits(op: &CheckedAttention, row_ctas: usize) -> bool {
    op.sequences * op.kv_heads * row_ctas <= COUNTERS
}

/// Workspace bytes of counters and split-KV results. A kernel that combines
/// them itself uses constant strides.
fn partial_bytes(op: &CheckedAttention, spec: &AttentionSpec, cut: &Cut) -> usize {
    match combines_splits(op, cut.row_ctas) {
        true => op.partial_bytes_of(cut.parts, spec.v as usize),
        false => op.partial_bytes(cut.parts),
    }
}

/// Configs for keys and values as they are stored.
fn configs(op: &CheckedAttention, info: &DeviceInfo) -> Result<Vec<AttentionConfig>, Unsupported> {
    let (spec, variant) = spec_of(op, info)?;
    super::check_invariant(NAME, op, info)?;
    let cut = cut(op, &spec, ctas_a_unit(&spec, variant), info.units);
    ctas(&[op.sequences, op.kv_heads, cut.row_ctas, cut.parts])?;
    ctas(&[op.sequences, op.most_queries(), op.heads])?;
    let rows = op.most_queries() * op.group();
    Ok(vec![AttentionConfig {
        kernel: id(spec, variant),
        launches: if cut.parts > 1 && !combines_splits(op, cut.row_ctas) { 2 } else { 1 },
        parts: cut.parts as u32,
        part_keys: cut.part_keys as u32,
        workspace_bytes: if cut.parts > 1 { partial_bytes(op, &spec, &cut) } else { 0 },
        dequantized_bytes: 0,
        math: Math::TensorF16,
        padding: (cut.row_ctas * spec.rows as usize) as f64 / rows as f64,
        efficiency: EFFICIENCY,
    }])
}

impl Family<CheckedAttention> for AttentionDecode {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedAttention, info: &DeviceInfo) -> Result<Vec<AttentionConfig>, Unsupported> {
        let multiplied = configs(op, info);
        // Kernels that multiply codes need no plain keys.
        if multiplied.is_ok() || op.kv.are_plain() {
            return multiplied;
        }
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
        let (Spec::Attention(spec), Some(variant)) = (config.kernel.spec, config.kernel.variant) else { return 0 };
        let plain = if config.dequantized_bytes > 0 { dequantized::source(variant).source_hash().short() } else { 0 };
        source(spec, variant).source_hash().short().rotate_left(7) ^ simt::combine_hash(variant) ^ plain.rotate_left(13)
    }
}

/// Launch sequence of a plan.
pub(super) fn sequence(
    op: &CheckedAttention,
    config: &AttentionConfig,
    variant: Variant,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let Spec::Attention(spec) = config.kernel.spec else { unreachable!("a configuration is of a kernel of attention") };
    let row_ctas = (op.most_queries() * op.group()).div_ceil(spec.rows as usize);
    let attend = Attend {
        id: config.kernel,
        spec: source(spec, variant),
        row_ctas,
        head_ctas: head_ctas(op, &spec),
        params: if pairs::is_of(&spec) { pairs::params } else { for_attend },
        threads: threads(&spec),
        shared_bytes: shared_bytes(&spec),
        counts: true,
        combines_splits: combines_splits(op, row_ctas),
    };
    simt::in_parts(NAME, op, config, variant, attend, make)
}

#[cfg(test)]
mod tests {
    use super::part_keys;

    #[test]
    fn parts_keep_all_ctas_busy() {
        // 264 concurrent CTAs: one sequence of eight heads in 32 parts,
        // three sequences in 11; 32 sequences unsplit, 40 in four.
        assert_eq!(part_keys(8192, 8, 264, 256), 256);
        assert_eq!(part_keys(65536, 8, 264, 256), 2048);
        assert_eq!(part_keys(8192, 24, 264, 64), 768);
        assert_eq!(part_keys(8192, 256, 264, 256), 8192);
        assert_eq!(part_keys(2048, 320, 264, 256), 512);
        // Few keys, or none.
        assert_eq!([part_keys(100, 1, 264, 256), part_keys(0, 1, 264, 256)], [256, 256]);
    }
}
