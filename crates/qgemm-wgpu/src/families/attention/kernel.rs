//! The attention kernel: its shader, parameters and bindings.

use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::dtype_code;
use qgemm_hal::{
    AttentionOperand, CheckedAttention, HalError, Kernel, KvAddressing, Operand, Operands, Paging, Stream,
};

use super::launch::{
    THREADS, WORD, Writes, caches, columns, extra_bindings, gate_bytes, has_extra, has_kv_index, has_q_offsets, rows,
    token_bytes,
};
use super::split::Split;
use crate::event::WgpuStream;
use crate::families::dispatch::{Dispatch, submit};
use crate::families::kv_cache::kv_code;
use crate::families::operands::{Bound, Touched};
use crate::pipeline::{Compiled, Interface};
use crate::shader::{Shader, compose_attention};
use crate::shared::Shared;

/// `Params` of `shaders/attention.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(super) struct Params {
    sequences: u32,
    tokens: u32,
    most_queries: u32,
    most_keys: u32,
    pages: u32,
    page_size: u32,
    table_width: u32,
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

/// Workgroup memory: `var<workgroup>` of the shader.
pub(super) const fn shared_bytes(rows: u32, columns: u32) -> u32 {
    (rows * (columns + THREADS + 8) + 2 * THREADS + 64 + 3) * 4
}

/// The shader of `op`. Values that differ between plans
/// of a model are parameters.
pub(super) fn shader(op: &CheckedAttention, writes: Writes, split: Option<Split>) -> Shader {
    let stride = |stride: u64| stride as u32;
    let [mask_at, sinks_at, gate_at] = extra_bindings(op, writes);
    let (gate_token, gate_head) = op.gate.map_or((0, 0), |gate| (gate.token_stride, gate.head_stride));
    let Split { parts, part_keys } = split.unwrap_or(Split { parts: 1, part_keys: op.most_keys });
    let words = [
        ("THREADS", THREADS),
        ("ROWS", rows(op)),
        ("PARTS", parts as u32),
        ("PART_KEYS", part_keys as u32),
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
        ("LSE", op.lse && matches!(writes, Writes::All | Writes::LogSumExp)),
        ("PARTIAL", writes == Writes::Partial),
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
    compose_attention(&words, &choices, op.kv.are_plain(), op.kv.are_plain() && has_extra(op, writes))
}

/// The kernel for one operation. A launch allocates no device memory.
#[derive(Debug)]
pub(super) struct AttentionKernel {
    pub compiled: Compiled,
    pub interface: &'static Interface,
    pub shared: Arc<Shared>,
    pub op: CheckedAttention,
    pub writes: Writes,
    /// Split of the keys, of partial results.
    pub split: Option<Split>,
    pub grid: [u32; 3],
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
        let (d_bytes, d_width) = match self.split {
            Some(split) => (split.bytes(op), WORD),
            None => (of_results(token_bytes(op, &op.d, op.v_dim)), op.dtype.bytes()),
        };
        (d, p.d_base) = touched(O::D, 0..d_bytes, d_width).bind_written(shared)?;
        let has_lse = op.lse && matches!(self.writes, Writes::All | Writes::LogSumExp);
        let lse_bytes = if has_lse { op.tokens * op.heads * WORD } else { 0 };
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
        for (binding, (operand, bytes, width, base)) in extra_bindings(op, self.writes).into_iter().zip(extra) {
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
