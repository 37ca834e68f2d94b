//! `attention`: a workgroup for queries of the heads that share keys, which goes through all of their keys.

use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::dtype_code;
use qgemm_hal::{
    AttentionConfig, AttentionFamilies, AttentionOperand, AttentionPlan, AttentionSpec, CheckedAttention, Device,
    DeviceInfo, Family, Geometry, HalError, HeadRows, Kernel, KernelId, KvFormat, KvPlaces, KvRows, LaunchSequence,
    LaunchStep, Math, Name, Operand, Operands, Paging, QueryLengths, Spec, Stream, Unsupported,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, submit, too_large};
use super::operands::{Bound, Touched};
use super::{hash_of, shared_of};
use crate::event::WgpuStream;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{ATTENTION_TEXTS, Shader, compose_attention};
use crate::shared::Shared;

/// What a wgpu device offers of `attention`.
pub(super) const FAMILIES: AttentionFamilies = &[&Attention];

/// What the kernel is given: the operands of `shaders/attention.wgsl`.
pub(crate) const INTERFACE: Interface = Interface {
    name: NAME,
    bindings: &[(0, false), (1, false), (2, false), (3, false), (4, false), (5, false), (6, true), (7, true)],
    params_bytes: size_of::<Params>() as u32,
};

/// Name of the family.
const NAME: &str = "attention";
/// Invocations of a workgroup, and keys that they look at together.
const THREADS: u32 = 64;
/// Rows of a workgroup: queries of the heads that share keys.
const ROWS: [u32; 3] = [1, 4, 8];
/// Bytes of an offset, a length, a page number and a log-sum-exp.
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
}

/// The family.
#[derive(Debug)]
struct Attention;

/// Rows of a workgroup.
fn rows(op: &CheckedAttention) -> u32 {
    let all = op.most_queries() * op.group();
    ROWS.into_iter().find(|&most| most as usize >= all).unwrap_or(ROWS[2])
}

fn row_groups(op: &CheckedAttention) -> usize {
    (op.most_queries() * op.group()).div_ceil(rows(op) as usize)
}

fn kernel_id(op: &CheckedAttention) -> KernelId {
    let (qk, v) = (op.qk_dim as u32, op.v_dim as u32);
    let spec = AttentionSpec { step: Name::new("attend"), kv: op.kv, qk, v, rows: rows(op), keys: THREADS };
    KernelId::new(NAME, None, Spec::Attention(spec))
}

/// Bytes of Q or D: rows of every token.
fn token_bytes(op: &CheckedAttention, rows: &HeadRows, columns: usize) -> usize {
    let last = (op.tokens - 1) as u64 * rows.token_stride + (op.heads - 1) as u64 * rows.head_stride;
    (last as usize + columns) * op.dtype.bytes()
}

/// Bytes of K or V: rows of every page.
fn key_bytes(op: &CheckedAttention, rows: &KvRows, columns: usize) -> usize {
    let Paging { pages, page_size, .. } = op.paging();
    if pages == 0 || page_size == 0 {
        return 0;
    }
    let KvRows { page_stride, rows } = rows;
    let last = (pages - 1) as u64 * page_stride
        + (page_size - 1) as u64 * rows.token_stride
        + (op.kv_heads - 1) as u64 * rows.head_stride;
    op.kv.bytes_of(last as usize + columns)
}

/// Whether the kernel serves `op`.
fn check(op: &CheckedAttention, limit: u64) -> Result<(), Unsupported> {
    if !op.kv.is_plain() {
        return Err(Unsupported::new(format!("reads keys and values in f32, f16 and bf16, not in {}", op.kv)));
    }
    let sizes = [
        ("Q", token_bytes(op, &op.q, op.qk_dim)),
        ("K", key_bytes(op, &op.k, op.qk_dim)),
        ("V", key_bytes(op, &op.v, op.v_dim)),
        ("the result", token_bytes(op, &op.d, op.v_dim)),
        ("the block table", op.sequences * op.paging().width * WORD),
        ("the log-sum-exp", op.tokens * op.heads * WORD),
    ];
    for (name, bytes) in sizes {
        if bytes as u64 + MARGIN > limit {
            return Err(too_large(name, bytes as u64, limit));
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
        // Adapters tell no bandwidth; there is no other family to rank it against.
        Ok(vec![AttentionConfig {
            kernel: kernel_id(op),
            launches: 1,
            parts: 1,
            part_keys: op.most_keys as u32,
            workspace_bytes: 0,
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
        let shader = shader(op);
        let compiled = Compiled::new(shared, &INTERFACE, NAME.to_owned(), shader)?;
        let groups = (op.sequences * op.kv_heads * row_groups(op)) as u32;
        let x = groups.min(MAX_GROUPS);
        let grid = [x, groups.div_ceil(x), 1];
        let geometry = Geometry { grid, threads: THREADS, shared_bytes: shared_bytes(rows(op)) };
        let kernel = AttentionKernel { compiled, shared: shared.clone(), op: op.clone(), grid };
        let step = LaunchStep::new::<AttentionOperand>(kernel_id(op), geometry, Arc::new(kernel)).of_operation();
        Ok(LaunchSequence::new::<AttentionOperand>(NAME, vec![step]))
    }

    fn source_hash(&self, _: &CheckedAttention, _: &AttentionConfig) -> u64 {
        *SOURCE_HASH
    }
}

/// Workgroup memory: `var<workgroup>` of the shader.
const fn shared_bytes(rows: u32) -> u32 {
    (rows * (256 + THREADS + 6) + 2 * THREADS + 64 + 2) * 4
}

/// The shader for what `op` states; what may change between plans of a model is among the parameters.
fn shader(op: &CheckedAttention) -> Shader {
    let kv = match op.kv {
        KvFormat::Plain(dtype) => dtype_code(dtype),
        _ => unreachable!("`check` refuses formats with factors"),
    };
    let stride = |stride: u64| stride as u32;
    let words = [
        ("THREADS", THREADS),
        ("ROWS", rows(op)),
        ("HEADS", op.heads as u32),
        ("KV_HEADS", op.kv_heads as u32),
        ("QK_DIM", op.qk_dim as u32),
        ("V_DIM", op.v_dim as u32),
        ("DTYPE", dtype_code(op.dtype)),
        ("KV_DTYPE", kv),
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
    ];
    let has_table = matches!(op.places, KvPlaces::Table { .. });
    let choices = [
        ("CAUSAL", op.causal),
        ("SOFT_CAP", op.soft_cap.is_some()),
        ("LSE", op.lse),
        ("Q_OFFSETS", matches!(op.queries, QueryLengths::Offsets { .. })),
        ("KV_OFFSETS", matches!(op.places, KvPlaces::Offsets { .. })),
        ("KV_LENGTHS", has_table || matches!(op.places, KvPlaces::Pages { lengths: true, .. })),
        ("TABLE", has_table),
    ];
    compose_attention(&words, &choices)
}

/// The kernel for one operation. A launch makes no device memory.
#[derive(Debug)]
struct AttentionKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedAttention,
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
        let by_offsets = matches!(op.places, KvPlaces::Offsets { .. });
        let (kv_index, index_len) =
            if by_offsets { (O::KvOffsets, op.sequences + 1) } else { (O::KvLengths, op.sequences) };
        let has_index = !matches!(op.places, KvPlaces::Pages { lengths: false, .. });
        let has_offsets = matches!(op.queries, QueryLengths::Offsets { .. });
        let (q, k, v, q_offsets, kv_index_bound, table, d, lse);
        (q, p.q_base) = touched(O::Q, 0..token_bytes(op, &op.q, op.qk_dim), op.dtype.bytes()).bind(shared)?;
        (k, p.k_base) = touched(O::K, 0..key_bytes(op, &op.k, op.qk_dim), op.kv.width()).bind(shared)?;
        (v, p.v_base) = touched(O::V, 0..key_bytes(op, &op.v, op.v_dim), op.kv.width()).bind(shared)?;
        (q_offsets, p.q_offsets_base) = words(O::QOffsets, op.sequences + 1, has_offsets)?;
        (kv_index_bound, p.kv_index_base) = words(kv_index, index_len, has_index)?;
        (table, p.table_base) = words(O::BlockTable, op.sequences * width, width > 0)?;
        (d, p.d_base) = touched(O::D, 0..token_bytes(op, &op.d, op.v_dim), op.dtype.bytes()).bind_written(shared)?;
        let lse_bytes = if op.lse { op.tokens * op.heads * WORD } else { 0 };
        (lse, p.lse_base) = touched(O::Lse, 0..lse_bytes, WORD).bind_written(shared)?;
        let bindings = vec![q, k, v, q_offsets, kv_index_bound, table, d, lse];
        Ok(Dispatch { params: p, bindings, grid: self.grid })
    }
}

impl Kernel for AttentionKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let dispatch = self.dispatch(&operands)?;
        submit(&self.shared, &INTERFACE, &self.compiled, &[dispatch])
    }
}

/// The shader of a plan with every choice made, and with none: for the test that all shaders are valid.
#[cfg(test)]
pub(crate) fn all_shaders() -> Vec<Shader> {
    use qgemm_formats::DType;
    let rows = HeadRows { token_stride: 256, head_stride: 64, aligned: true };
    let plain = CheckedAttention {
        sequences: 2,
        tokens: 3,
        queries: QueryLengths::Offsets { most: 2 },
        most_keys: 64,
        places: KvPlaces::Offsets { rows: 100 },
        heads: 4,
        kv_heads: 2,
        qk_dim: 64,
        v_dim: 64,
        dtype: DType::F16,
        kv: KvFormat::Plain(DType::F16),
        q: rows,
        k: KvRows { page_stride: 0, rows },
        v: KvRows { page_stride: 0, rows },
        d: rows,
        causal: false,
        window: None,
        scale: 0.125,
        soft_cap: None,
        lse: false,
        batch_invariant: false,
    };
    let table = KvPlaces::Table { pages: 9, page_size: 5, width: 3 };
    let chosen = CheckedAttention { places: table, causal: true, soft_cap: Some(30.0), lse: true, ..plain.clone() };
    let f32 = CheckedAttention { dtype: DType::F32, kv: KvFormat::Plain(DType::F32), window: Some(9), ..plain.clone() };
    [plain, chosen, f32].iter().map(shader).collect()
}
