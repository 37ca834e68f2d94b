//! `attention`: a workgroup processes queries of the heads that
//! share a KV head, over all keys.
//!
//! Quantized KV caches leave no storage buffer for the log-sum-exp, which
//! then gets a separate launch, nor for a mask, sinks or a gate. Those
//! use the binding of an index buffer that the attention has not.

use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::dtype_code;
use qgemm_hal::{
    AttentionConfig, AttentionOperand, AttentionPlan, AttentionSpec, AttentionStep, CheckedAttention, Device,
    DeviceInfo, Families, Family, Geometry, HalError, HeadRows, Kernel, KernelDType, KernelId, KvAddressing,
    LaunchSequence, LaunchStep, Math, Operand, Operands, Paging, QueryLengths, Spec, Stream, Unsupported,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, submit, too_large};
use super::kv_cache::{Cache, kv_code};
use super::operands::{Bound, Touched};
use crate::device::shared_of;
use crate::event::WgpuStream;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{ATTENTION_TEXTS, Shader, compose_attention};
use crate::shared::Shared;
use crate::source_hash::hash_of;

/// wgpu families of `attention`.
pub(super) const FAMILIES: Families<CheckedAttention> = &[&Attention];

/// Kernel interface: the operands of `shaders/attention.wgsl`.
pub(crate) const INTERFACE: Interface = Interface {
    name: NAME,
    bindings: &[(0, false), (1, false), (2, false), (3, false), (4, false), (5, false), (6, true), (7, true)],
    params_bytes: size_of::<Params>() as u32,
};

/// Kernel interface with a mask, sinks or a gate.
pub(crate) const EXTRA_INTERFACE: Interface = Interface {
    name: "attention_extra",
    bindings: &[
        (0, false),
        (1, false),
        (2, false),
        (3, false),
        (4, false),
        (5, false),
        (6, true),
        (7, true),
        (8, false),
    ],
    params_bytes: size_of::<Params>() as u32,
};

/// Kernel interface with a quantized KV cache: scales or factors use
/// the binding of the log-sum-exp.
pub(crate) const CODES_INTERFACE: Interface = Interface {
    name: "attention_codes",
    bindings: &[
        (0, false),
        (1, false),
        (2, false),
        (3, false),
        (4, false),
        (5, false),
        (6, true),
        (7, false),
        (8, false),
    ],
    params_bytes: size_of::<Params>() as u32,
};

/// Family name.
const NAME: &str = "attention";
/// Invocations of a workgroup, and keys of its tile.
const THREADS: u32 = 64;
/// Row tiles: queries of the heads that share a KV head.
const ROWS: [u32; 3] = [1, 4, 8];
/// Row tiles of long heads, for which workgroup memory has room.
const LONG_ROWS: [u32; 2] = [1, 4];
/// Head dimensions that shaders have memory for.
const DIMS: [u32; 2] = [256, 512];
/// Bytes of an offset, a length, a page
/// number and a log-sum-exp.
const WORD: usize = 4;

static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| hash_of(ATTENTION_TEXTS));

/// `Params` of `shaders/attention.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    sequences: u32,
    tokens: u32,
    most_queries: u32,
    most_keys: u32,
    pages: u32,
    page_size: u32,
    table_width: u32,
    row_groups: u32,
    factor: f32,
    soft_cap: f32,
    q_base: u32,
    k_base: u32,
    v_base: u32,
    q_offsets_base: u32,
    kv_index_base: u32,
    table_base: u32,
    d_base: u32,
    lse_base: u32,
    k_scales_base: u32,
    v_scales_base: u32,
    mask_base: u32,
    sinks_base: u32,
    gate_base: u32,
}

/// The kernel family.
#[derive(Debug)]
struct Attention;

/// Outputs of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writes {
    /// The results, and the log-sum-exp if requested.
    All,
    /// The results only.
    Results,
    /// The log-sum-exp only.
    LogSumExp,
}

/// Launches of `op`; the last one writes the results.
fn launches(op: &CheckedAttention) -> &'static [Writes] {
    match (op.kv.are_plain(), op.lse) {
        (true, _) => &[Writes::All],
        (false, false) => &[Writes::Results],
        (false, true) => &[Writes::LogSumExp, Writes::Results],
    }
}

/// Kernel interface of `op`.
fn interface(op: &CheckedAttention) -> &'static Interface {
    match (op.kv.are_plain(), has_extra(op)) {
        (true, false) => &INTERFACE,
        (true, true) => &EXTRA_INTERFACE,
        (false, _) => &CODES_INTERFACE,
    }
}

/// Whether `op` has key offsets or lengths.
fn has_kv_index(op: &CheckedAttention) -> bool {
    !matches!(op.places, KvAddressing::Pages { lengths: false, .. })
}

/// Whether `op` has query offsets.
fn has_q_offsets(op: &CheckedAttention) -> bool {
    matches!(op.queries, QueryLengths::Offsets { .. })
}

/// Operands that need a binding beside those of every attention.
fn extras(op: &CheckedAttention) -> [bool; 3] {
    [op.mask.is_some(), op.sinks, op.gate.is_some()]
}

/// Whether `op` has a mask, sinks or a gate.
fn has_extra(op: &CheckedAttention) -> bool {
    extras(op).contains(&true)
}

/// Bindings of mask, sinks and gate, as far as they are free: a
/// buffer of their own, which quantized caches do not leave, or
/// that of an index that `op` does not have.
fn extra_bindings(op: &CheckedAttention) -> [Option<u32>; 3] {
    let free = [(8, op.kv.are_plain()), (3, !has_q_offsets(op)), (4, !has_kv_index(op)), (5, op.paging().width == 0)];
    let mut free = free.into_iter().filter(|(_, is_free)| *is_free).map(|(binding, _)| binding);
    extras(op).map(|has| if has { free.next() } else { None })
}

/// Row tile of a workgroup.
fn rows(op: &CheckedAttention) -> u32 {
    let all = op.most_queries() * op.group();
    let tiles: &[u32] = if columns(op) > DIMS[0] { &LONG_ROWS } else { &ROWS };
    tiles.iter().copied().find(|&most| most as usize >= all).unwrap_or(tiles[tiles.len() - 1])
}

/// Head dimension of the shader.
fn columns(op: &CheckedAttention) -> u32 {
    if op.qk_dim.max(op.v_dim) as u32 > DIMS[0] { DIMS[1] } else { DIMS[0] }
}

fn row_groups(op: &CheckedAttention) -> usize {
    (op.most_queries() * op.group()).div_ceil(rows(op) as usize)
}

fn kernel_id(op: &CheckedAttention, writes: Writes) -> KernelId {
    let step = if writes == Writes::LogSumExp { AttentionStep::LogSumExp } else { AttentionStep::Attend };
    let attend = AttentionSpec::attend(op.kv, [op.qk_dim as u32, op.v_dim as u32], rows(op), THREADS);
    let spec = AttentionSpec { step, x: KernelDType::Of(op.dtype), masked: op.mask.is_some(), ..attend };
    KernelId::new(NAME, None, Spec::Attention(spec))
}

/// Bytes of Q or D over all tokens.
fn token_bytes(op: &CheckedAttention, rows: &HeadRows, columns: usize) -> usize {
    let last = (op.tokens - 1) as u64 * rows.token_stride + (op.heads - 1) as u64 * rows.head_stride;
    (last as usize + columns) * op.dtype.bytes()
}

/// Bytes of the gate; 0 without one.
fn gate_bytes(op: &CheckedAttention) -> usize {
    op.gate.as_ref().map_or(0, |gate| token_bytes(op, gate, op.v_dim))
}

/// K and V.
fn caches(op: &CheckedAttention) -> [Cache; 2] {
    let of = |format, rows, columns| Cache::new(format, op.kv_heads, op.paging(), rows, columns);
    [of(op.kv.k, &op.k, op.qk_dim), of(op.kv.v, &op.v, op.v_dim)]
}

/// Checks that the kernel supports `op`.
fn check(op: &CheckedAttention, limit: u64) -> Result<(), Unsupported> {
    let [k, v] = caches(op);
    k.check("K")?;
    v.check("V")?;
    let sizes = [
        ("Q", token_bytes(op, &op.q, op.qk_dim)),
        ("K", k.bytes()),
        ("V", v.bytes()),
        ("the result", token_bytes(op, &op.d, op.v_dim)),
        ("the block table", op.sequences * op.paging().width * WORD),
        ("the log-sum-exp", op.tokens * op.heads * WORD),
        ("the mask", op.mask_words() * WORD),
        ("the gate", gate_bytes(op)),
    ];
    for (name, bytes) in sizes {
        if bytes as u64 + MARGIN > limit {
            return Err(too_large(name, bytes as u64, limit));
        }
    }
    let names = ["a mask", "sinks", "an output gate"];
    for ((name, has), binding) in names.into_iter().zip(extras(op)).zip(extra_bindings(op)) {
        if has && binding.is_none() {
            return Err(Unsupported::new(format!(
                "has no storage buffer for {name} beside a mask, sinks, a cache in codes, offsets of queries and a block table: give \
                 one of them up, or keep keys and values as plain numbers"
            )));
        }
    }
    let groups = [op.kv_heads, row_groups(op)].into_iter().try_fold(op.sequences, usize::checked_mul);
    if groups.is_none_or(|groups| groups >= 1 << 31) {
        return Err(Unsupported::new("counts workgroups in 31 bits: attend to fewer sequences at once"));
    }
    Ok(())
}

impl Family<CheckedAttention> for Attention {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedAttention, info: &DeviceInfo) -> Result<Vec<AttentionConfig>, Unsupported> {
        check(op, info.max_buffer_bytes)?;
        // Adapters do not report bandwidth, and there is no
        // other family to rank against.
        Ok(vec![AttentionConfig {
            kernel: kernel_id(op, Writes::Results),
            launches: launches(op).len() as u32,
            parts: 1,
            part_keys: op.most_keys as u32,
            workspace_bytes: 0,
            dequantized_bytes: 0,
            math: Math::FmaF32,
            padding: 1.0,
            efficiency: (300, 100),
        }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedAttention,
        _: &AttentionPlan,
    ) -> Result<LaunchSequence, HalError> {
        let shared = shared_of(device, "an attention of the wgpu backend")?;
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: shared.id, what: NAME.to_owned(), why: reason.why };
        check(op, device.info().max_buffer_bytes).map_err(refused)?;
        let groups = (op.sequences * op.kv_heads * row_groups(op)) as u32;
        let x = groups.min(MAX_GROUPS);
        let grid = [x, groups.div_ceil(x), 1];
        let geometry = Geometry { grid, threads: THREADS, shared_bytes: shared_bytes(rows(op), columns(op)) };
        let step = |&writes: &Writes| {
            use AttentionOperand as O;
            let interface = interface(op);
            let compiled = Compiled::new(shared, interface, NAME.to_owned(), shader(op, writes))?;
            let kernel = AttentionKernel { compiled, interface, shared: shared.clone(), op: op.clone(), writes, grid };
            let step = LaunchStep::new::<O>(kernel_id(op, writes), geometry, Arc::new(kernel)).of_operation();
            Ok(match writes {
                Writes::All => step,
                Writes::Results => step.unbind(O::Lse),
                Writes::LogSumExp => {
                    [O::V, O::VFactors, O::VScales, O::Gate, O::D].into_iter().fold(step, LaunchStep::unbind)
                }
            })
        };
        let steps = launches(op).iter().map(step).collect::<Result<_, HalError>>()?;
        Ok(LaunchSequence::new::<AttentionOperand>(NAME, steps))
    }

    fn source_hash(&self, _: &CheckedAttention, _: &AttentionConfig) -> u64 {
        *SOURCE_HASH
    }
}

/// Workgroup memory: `var<workgroup>` of the shader.
const fn shared_bytes(rows: u32, columns: u32) -> u32 {
    (rows * (columns + THREADS + 8) + 2 * THREADS + 64 + 3) * 4
}

/// The shader of `op`. Values that differ between plans
/// of a model are parameters.
fn shader(op: &CheckedAttention, writes: Writes) -> Shader {
    let stride = |stride: u64| stride as u32;
    let [mask_at, sinks_at, gate_at] = extra_bindings(op);
    let (gate_token, gate_head) = op.gate.map_or((0, 0), |gate| (gate.token_stride, gate.head_stride));
    let words = [
        ("THREADS", THREADS),
        ("ROWS", rows(op)),
        ("COLUMNS", columns(op)),
        ("HEADS", op.heads as u32),
        ("KV_HEADS", op.kv_heads as u32),
        ("QK_DIM", op.qk_dim as u32),
        ("V_DIM", op.v_dim as u32),
        ("DTYPE", dtype_code(op.dtype)),
        ("KV_DTYPE", kv_code(op.kv.k)),
        ("V_DTYPE", kv_code(op.kv.v)),
        ("WINDOW", op.window.map_or(u32::MAX, |window| u32::try_from(window).unwrap_or(u32::MAX))),
        ("Q_TOKEN", stride(op.q.token_stride)),
        ("Q_HEAD", stride(op.q.head_stride)),
        ("K_PAGE", stride(op.k.page_stride)),
        ("K_TOKEN", stride(op.k.rows.token_stride)),
        ("K_HEAD", stride(op.k.rows.head_stride)),
        ("V_PAGE", stride(op.v.page_stride)),
        ("V_TOKEN", stride(op.v.rows.token_stride)),
        ("V_HEAD", stride(op.v.rows.head_stride)),
        ("D_TOKEN", stride(op.d.token_stride)),
        ("D_HEAD", stride(op.d.head_stride)),
        ("MASK_AT", mask_at.unwrap_or_default()),
        ("SINKS_AT", sinks_at.unwrap_or_default()),
        ("GATE_AT", gate_at.unwrap_or_default()),
        ("GATE_TOKEN", stride(gate_token)),
        ("GATE_HEAD", stride(gate_head)),
    ];
    let has_table = matches!(op.places, KvAddressing::Table { .. });
    let choices = [
        ("CAUSAL", op.causal),
        ("SOFT_CAP", op.soft_cap.is_some()),
        ("LSE", op.lse && writes != Writes::Results),
        ("RESULTS", writes != Writes::LogSumExp),
        ("Q_OFFSETS", has_q_offsets(op)),
        ("KV_OFFSETS", matches!(op.places, KvAddressing::Offsets { .. })),
        ("KV_LENGTHS", has_table || matches!(op.places, KvAddressing::Pages { lengths: true, .. })),
        ("TABLE", has_table),
        ("MASK", op.mask.is_some()),
        ("SINKS", op.sinks),
        ("GATED", op.gate.is_some()),
        ("MASK_SHARED", op.mask.is_some_and(|mask| mask.is_shared)),
        ("MASK_PER_HEAD", op.mask.is_some_and(|mask| mask.is_per_head)),
    ];
    compose_attention(&words, &choices, op.kv.are_plain(), op.kv.are_plain() && has_extra(op))
}

/// The kernel for one operation. A launch allocates no device memory.
#[derive(Debug)]
struct AttentionKernel {
    compiled: Compiled,
    interface: &'static Interface,
    shared: Arc<Shared>,
    op: CheckedAttention,
    writes: Writes,
    grid: [u32; 3],
}

impl AttentionKernel {
    fn dispatch<'a>(&'a self, operands: &'a Operands<'a>) -> Result<Dispatch<'a, Params>, HalError> {
        use AttentionOperand as O;
        let (op, shared) = (&self.op, &self.shared);
        let Paging { pages, page_size, width } = op.paging();
        let mut p = Params {
            sequences: op.sequences as u32,
            tokens: op.tokens as u32,
            most_queries: op.most_queries() as u32,
            most_keys: op.most_keys as u32,
            pages: pages as u32,
            page_size: page_size as u32,
            table_width: width as u32,
            row_groups: row_groups(op) as u32,
            factor: op.soft_cap.map_or(op.scale * LOG2_E, |cap| op.scale / cap),
            soft_cap: op.soft_cap.map_or(0.0, |cap| cap * LOG2_E),
            ..Params::default()
        };
        let touched = |operand: O, bytes: Range<usize>, width: usize| Touched {
            what: operand.name(),
            view: operands.get(operand),
            bytes,
            width,
        };
        let words = |operand: O, count: usize, is_used: bool| -> Result<Bound<'a>, HalError> {
            touched(operand, 0..if is_used { count * WORD } else { 0 }, WORD).bind(shared)
        };
        let by_offsets = matches!(op.places, KvAddressing::Offsets { .. });
        let (kv_index, index_len) =
            if by_offsets { (O::KvOffsets, op.sequences + 1) } else { (O::KvLengths, op.sequences) };
        let [of_k, of_v] = caches(op);
        // Operands of the weighted sum, which a
        // log-sum-exp launch does not touch.
        let of_results = |bytes: usize| if self.writes == Writes::LogSumExp { 0 } else { bytes };
        let (q, k, v, q_offsets, kv_index_bound, table, d, lse, k_scales, v_scales);
        (q, p.q_base) = touched(O::Q, 0..token_bytes(op, &op.q, op.qk_dim), op.dtype.bytes()).bind(shared)?;
        (k, p.k_base) = touched(O::K, 0..of_k.bytes(), op.kv.k.width()).bind(shared)?;
        (v, p.v_base) = touched(O::V, 0..of_results(of_v.bytes()), op.kv.v.width()).bind(shared)?;
        (q_offsets, p.q_offsets_base) = words(O::QOffsets, op.sequences + 1, has_q_offsets(op))?;
        (kv_index_bound, p.kv_index_base) = words(kv_index, index_len, has_kv_index(op))?;
        (table, p.table_base) = words(O::BlockTable, op.sequences * width, width > 0)?;
        (d, p.d_base) =
            touched(O::D, 0..of_results(token_bytes(op, &op.d, op.v_dim)), op.dtype.bytes()).bind_written(shared)?;
        let lse_bytes = if op.lse && self.writes != Writes::Results { op.tokens * op.heads * WORD } else { 0 };
        (lse, p.lse_base) = touched(O::Lse, 0..lse_bytes, WORD).bind_written(shared)?;
        let mut bindings = vec![q, k, v, q_offsets, kv_index_bound, table];
        if op.kv.are_plain() {
            bindings.extend([d, lse]);
        } else {
            let of_keys = if op.kv.k.has_factors() { O::KFactors } else { O::KScales };
            let of_values = if op.kv.v.has_factors() { O::VFactors } else { O::VScales };
            let ((k_bytes, k_width), (v_bytes, v_width)) = (of_k.scale_bytes(), of_v.scale_bytes());
            (k_scales, p.k_scales_base) = touched(of_keys, 0..k_bytes, k_width).bind(shared)?;
            (v_scales, p.v_scales_base) = touched(of_values, 0..of_results(v_bytes), v_width).bind(shared)?;
            bindings.extend([if self.writes == Writes::LogSumExp { lse } else { d }, k_scales, v_scales]);
        }
        let extra = [
            (O::Mask, op.mask_words() * WORD, WORD, &mut p.mask_base),
            (O::Sinks, op.heads * WORD, WORD, &mut p.sinks_base),
            (O::Gate, of_results(gate_bytes(op)), op.dtype.bytes(), &mut p.gate_base),
        ];
        for (binding, (operand, bytes, width, base)) in extra_bindings(op).into_iter().zip(extra) {
            let Some(binding) = binding else { continue };
            let bound;
            (bound, *base) = touched(operand, 0..bytes, width).bind(shared)?;
            match bindings.get_mut(binding as usize) {
                Some(place) => *place = bound,
                None => bindings.push(bound),
            }
        }
        Ok(Dispatch { params: p, bindings, grid: self.grid })
    }
}

impl Kernel for AttentionKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let dispatch = self.dispatch(&operands)?;
        submit(&self.shared, self.interface, &self.compiled, &[dispatch])
    }
}

/// Shaders of a plan with all options and with none, for
/// the test that all shaders are valid.
#[cfg(test)]
pub(crate) fn all_shaders() -> Vec<Shader> {
    use qgemm_formats::DType;
    use qgemm_hal::{KvFormat, KvFormats, KvRows, MaskBits};
    let rows = HeadRows { token_stride: 256, head_stride: 64, aligned: true };
    let plain = CheckedAttention {
        sequences: 2,
        tokens: 3,
        queries: QueryLengths::Offsets { most: 2 },
        most_keys: 64,
        places: KvAddressing::Offsets { rows: 100 },
        heads: 4,
        kv_heads: 2,
        qk_dim: 64,
        v_dim: 64,
        dtype: DType::F16,
        kv: KvFormat::Plain(DType::F16).into(),
        q: rows,
        k: KvRows { page_stride: 0, rows },
        v: KvRows { page_stride: 0, rows },
        d: rows,
        causal: false,
        window: None,
        mask: None,
        sinks: false,
        gate: None,
        scale: 0.125,
        soft_cap: None,
        lse: false,
        batch_invariant: false,
    };
    let table = KvAddressing::Table { pages: 9, page_size: 5, width: 3 };
    let chosen = CheckedAttention { places: table, causal: true, soft_cap: Some(30.0), lse: true, ..plain.clone() };
    let f32 = CheckedAttention {
        dtype: DType::F32,
        kv: KvFormat::Plain(DType::F32).into(),
        window: Some(9),
        ..plain.clone()
    };
    let codes =
        [KvFormat::E4M3, KvFormat::Q8_0, KvFormat::Q4_0].map(|kv| CheckedAttention { kv: kv.into(), ..chosen.clone() });
    let formats = [KvFormat::Plain(DType::F16), KvFormat::E4M3, KvFormat::Q8_0, KvFormat::Q4_0];
    let mixed = (0..4).map(|i| KvFormats { k: formats[i], v: formats[(i + 1) % 4] });
    let mixed: Vec<_> = mixed.map(|kv| CheckedAttention { kv, ..chosen.clone() }).collect();
    let masked = [&plain, &codes[0]].map(|op| CheckedAttention {
        queries: QueryLengths::Each(2),
        mask: Some(MaskBits::shared().per_head()),
        ..op.clone()
    });
    let with_sinks = [&plain, &codes[1], &masked[0]].map(|op| CheckedAttention {
        queries: QueryLengths::Each(2),
        sinks: true,
        ..op.clone()
    });
    let long = CheckedAttention { qk_dim: 512, v_dim: 512, ..chosen.clone() };
    let gated = [&plain, &f32, &with_sinks[1]].map(|op| CheckedAttention {
        places: KvAddressing::Pages { capacity: 64, lengths: false },
        gate: Some(rows),
        ..op.clone()
    });
    let all =
        [plain, chosen, f32, long].into_iter().chain(codes).chain(masked).chain(with_sinks).chain(gated).chain(mixed);
    all.flat_map(|op| launches(&op).iter().map(|&writes| shader(&op, writes)).collect::<Vec<_>>()).collect()
}
