//! Sizes and bindings of a launch.

use qgemm_hal::{
    AttentionSpec, AttentionStep, CheckedAttention, HeadRows, KernelDType, KernelId, KvAddressing, QueryLengths, Spec,
};

use crate::families::kv_cache::Cache;

/// Family name.
pub(super) const NAME: &str = "attention";
/// Invocations of a workgroup, and keys of its tile.
pub(super) const THREADS: u32 = 64;
/// Row tiles: queries of the heads that share a KV head.
const ROWS: [u32; 3] = [1, 4, 8];
/// Row tiles of long heads, for which workgroup memory has room.
const LONG_ROWS: [u32; 2] = [1, 4];
/// Head dimensions that shaders have memory for.
const DIMS: [u32; 2] = [256, 512];
/// Bytes of an offset, a length, a page
/// number and a log-sum-exp.
pub(super) const WORD: usize = 4;

/// Outputs of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writes {
    /// The results, and the log-sum-exp if requested.
    All,
    /// The results only.
    Results,
    /// The log-sum-exp only.
    LogSumExp,
    /// Partial results of parts of the keys.
    Partial,
}

/// Whether `op` has key offsets or lengths.
pub(super) fn has_kv_index(op: &CheckedAttention) -> bool {
    !matches!(op.places, KvAddressing::Pages { lengths: false, .. })
}

/// Whether `op` has query offsets.
pub(super) fn has_q_offsets(op: &CheckedAttention) -> bool {
    matches!(op.queries, QueryLengths::Offsets { .. })
}

/// Mask, sinks and gate, if a launch needs bindings for them. The
/// combine applies sinks and gate to partial results.
pub(super) fn extras(op: &CheckedAttention, writes: Writes) -> [bool; 3] {
    let finishes = writes != Writes::Partial;
    [op.mask.is_some(), op.sinks && finishes, op.gate.is_some() && finishes]
}

/// Whether a launch has a mask, sinks or a gate.
pub(super) fn has_extra(op: &CheckedAttention, writes: Writes) -> bool {
    extras(op, writes).contains(&true)
}

/// Bindings of mask, sinks and gate, as far as they are free: a
/// buffer of their own, which quantized caches do not leave, or
/// that of an index that `op` does not have.
pub(super) fn extra_bindings(op: &CheckedAttention, writes: Writes) -> [Option<u32>; 3] {
    let free = [(8, op.kv.are_plain()), (3, !has_q_offsets(op)), (4, !has_kv_index(op)), (5, op.paging().width == 0)];
    let mut free = free.into_iter().filter(|(_, is_free)| *is_free).map(|(binding, _)| binding);
    extras(op, writes).map(|has| if has { free.next() } else { None })
}

/// Row tile of a workgroup.
pub(super) fn rows(op: &CheckedAttention) -> u32 {
    let all = op.most_queries() * op.group();
    let tiles: &[u32] = if columns(op) > DIMS[0] { &LONG_ROWS } else { &ROWS };
    tiles.iter().copied().find(|&most| most as usize >= all).unwrap_or(tiles[tiles.len() - 1])
}

/// Head dimension of the shader.
pub(super) fn columns(op: &CheckedAttention) -> u32 {
    if op.qk_dim.max(op.v_dim) as u32 > DIMS[0] { DIMS[1] } else { DIMS[0] }
}

pub(super) fn row_groups(op: &CheckedAttention) -> usize {
    (op.most_queries() * op.group()).div_ceil(rows(op) as usize)
}

pub(super) fn kernel_id(op: &CheckedAttention, step: AttentionStep) -> KernelId {
    let attend = AttentionSpec::attend(op.kv, [op.qk_dim as u32, op.v_dim as u32], rows(op), THREADS);
    let spec = AttentionSpec { step, x: KernelDType::Of(op.dtype), masked: op.mask.is_some(), ..attend };
    KernelId::new(NAME, None, Spec::Attention(spec))
}

/// Bytes of Q or D over all tokens.
pub(super) fn token_bytes(op: &CheckedAttention, rows: &HeadRows, columns: usize) -> usize {
    let last = (op.tokens - 1) as u64 * rows.token_stride + (op.heads - 1) as u64 * rows.head_stride;
    (last as usize + columns) * op.dtype.bytes()
}

/// Bytes of the gate; 0 without one.
pub(super) fn gate_bytes(op: &CheckedAttention) -> usize {
    op.gate.as_ref().map_or(0, |gate| token_bytes(op, gate, op.v_dim))
}

/// K and V.
pub(super) fn caches(op: &CheckedAttention) -> [Cache; 2] {
    let of = |format, rows, columns| Cache::new(format, op.kv_heads, op.paging(), rows, columns);
    [of(op.kv.k, &op.k, op.qk_dim), of(op.kv.v, &op.v, op.v_dim)]
}
