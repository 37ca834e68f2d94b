//! `attention_decode` kernels for pairs of KV heads
//! on Hopper: the quantized key of two heads is one
//! cache line, copied by TMA.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::AttentionPointers;
use qgemm_hal::{
    AttentionSpec, CheckedAttention, HalError, KernelDType, KvFormat, KvFormats, KvRows, Operands, Paging, Variant,
};

use super::super::kernel_launch::{Addresses, Params};
use super::super::launch_params::LaunchParams;
use super::params::AttentionParams;
use crate::tensor_map::{EncodedMap, MapElement, MapSwizzle, TileMap};

/// Head dimension.
pub(super) const DIM: u32 = 128;
/// KV heads of a CTA.
pub(super) const HEADS: usize = 2;
/// Bytes of the codes of one key, for both heads.
const LINE: u32 = 128;
/// Bytes of the scales of one key.
const SCALES: u32 = 16;
/// Rows of a CTA; keys of a warp tile; keys that
/// all warps process per turn.
const ROWS: u32 = 8;
const TILE: u32 = 32;
const TURN_KEYS: u32 = 256;
/// Rings, each shared by a pair of warps; and all warps.
const RINGS: u32 = TURN_KEYS / TILE;
const WARPS: u32 = RINGS * HEADS as u32;
/// Threads of a CTA.
pub(super) const THREADS: u32 = WARPS * 32;
/// Slots of a ring. A slot holds the keys or
/// the values of a tile.
pub(super) const SLOTS: u32 = 4;
/// Minimum keys of a TMA box; the maximum is a tile.
const LEAST_BOX: usize = 16;
/// Minimum split-KV part for which these kernels pay off.
pub(super) const LEAST_PART: usize = 1024;
/// Maximum key or page stride in bytes (`cuTensorMapEncodeTiled`).
const MOST_STRIDE: u64 = 1 << 40;

/// The kernel for Q of type `x`.
pub(super) fn attend_spec(x: DType, kv: KvFormat) -> AttentionSpec {
    let attend = AttentionSpec::attend(KvFormats::both(kv), [DIM; 2], ROWS, TURN_KEYS);
    AttentionSpec { x: KernelDType::Of(x), kv_heads: HEADS as u32, ..attend }
}

/// Whether `spec` is one of these kernels.
pub(super) fn is_of(spec: &AttentionSpec) -> bool {
    spec.kv_heads == HEADS as u32
}

/// Whether `kv` is supported: the pair's codes must be one cache
/// line, its scales sixteen bytes.
pub(super) fn has(kv: KvFormat, variant: Variant) -> bool {
    let bytes = HEADS * kv.bytes_of(DIM as usize);
    variant == Variant::Sm90 && kv.has_scales() && bytes == LINE as usize
}

/// Shared memory before the parked work: `ALL_RINGS` of
/// `attention/sm90/pairs.cuh`.
pub(super) fn ring_bytes() -> u32 {
    let slots = RINGS * SLOTS * TILE * (LINE + SCALES);
    // Two mbarriers and a mask for each slot.
    let barriers = (SLOTS * (8 + 8 + 4)).next_multiple_of(8);
    (slots + WARPS * TILE * ROWS * 2 + RINGS * barriers).next_multiple_of(16)
}

/// Whether such a kernel supports `op`: the heads of a pair
/// must be contiguous, and a box of keys within one page.
pub(super) fn serves(op: &CheckedAttention, variant: Variant) -> bool {
    let Paging { page_size, width, .. } = op.paging();
    let are_whole = width == 0 || (page_size.is_power_of_two() && page_size >= LEAST_BOX);
    op.kv.single().is_some_and(|kv| has(kv, variant))
        && op.mask.is_none()
        && op.kv_heads.is_multiple_of(HEADS)
        && [op.qk_dim, op.v_dim] == [DIM as usize; 2]
        && are_whole
        && [&op.k, &op.v].iter().all(|rows| Lines::of(op, rows).is_some())
}

/// Keys or values as TMA sees them: bytes of a line,
/// pairs of heads, rows of a page, pages.
#[derive(Clone, Copy, Debug)]
struct Lines {
    size: [u64; 4],
    /// Byte strides of pairs, rows and pages.
    strides: [u64; 3],
}

impl Lines {
    /// `None` when TMA cannot read this layout.
    fn of(op: &CheckedAttention, rows: &KvRows) -> Option<Self> {
        let Paging { pages, page_size, .. } = op.paging();
        let size = [LINE as usize, op.kv_heads / HEADS, page_size, pages].map(|size| size as u64);
        // Elements of a pair.
        let pair = u64::from(DIM) * HEADS as u64;
        let is_pair = rows.rows.head_stride == u64::from(DIM);
        let lines = |stride: u64| (stride / pair).saturating_mul(u64::from(LINE));
        let are_lines = [rows.rows.token_stride, rows.page_stride].iter().all(|stride| stride.is_multiple_of(pair));
        // A stride over a single element is unused;
        // choose a valid one.
        let of_token = if page_size > 1 { lines(rows.rows.token_stride) } else { size[1] * u64::from(LINE) };
        let of_page = if pages > 1 { lines(rows.page_stride) } else { of_token.saturating_mul(size[2]) };
        let strides = [u64::from(LINE), of_token, of_page];
        let fits = strides.iter().all(|stride| (1..MOST_STRIDE).contains(stride))
            && size.iter().all(|&size| size > 0 && i32::try_from(size).is_ok());
        (is_pair && are_lines && fits).then_some(Self { size, strides })
    }

    /// Tensor map of the keys or values. Misaligned addresses are rounded
    /// down: the kernel does not use such a map.
    fn map(&self, address: u64, box_keys: u32) -> TileMap {
        let ([line, pairs, rows, pages], [of_pair, of_row, of_page]) = (self.size, self.strides);
        TileMap {
            address: address / 16 * 16,
            element: MapElement::Byte,
            dimensions: 5,
            size: [line, pairs, rows, pages, 1],
            strides: [of_pair, of_row, of_page, of_page],
            tile: [LINE, 1, box_keys, 1, 1],
            swizzle: MapSwizzle::Bytes128,
        }
    }
}

/// `TmaParams` of `attention/sm90/pairs.cuh`.
#[repr(C, align(64))]
#[derive(Clone, Copy, Pod, Zeroable)]
struct TmaParams {
    attention: AttentionParams,
    box_keys: u32,
    padding: [u32; PADDING / 4],
    maps: [EncodedMap; 2],
}

/// Padding up to the tensor maps, which are
/// aligned to 64 bytes.
const PADDING: usize = {
    let bytes = size_of::<AttentionParams>() + size_of::<u32>();
    bytes.next_multiple_of(64) - bytes
};

/// Kernel parameter without addresses.
#[derive(Debug)]
struct Mapped {
    attention: AttentionParams,
    box_keys: u32,
    keys: Lines,
    values: Lines,
}

/// Kernel parameter for `op`.
pub(super) fn params(op: &CheckedAttention, attention: AttentionParams) -> Arc<dyn Params> {
    let of = |rows| Lines::of(op, rows);
    let (Some(keys), Some(values)) = (of(&op.k), of(&op.v)) else {
        unreachable!("`serves` found that TMA can read both")
    };
    let Paging { page_size, width, .. } = op.paging();
    // Page sizes are powers of two.
    let box_keys = if width == 0 { TILE } else { TILE.min(page_size as u32) };
    Arc::new(Mapped { attention, box_keys, keys, values })
}

impl Params for Mapped {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        let attention = self.attention.at(operands, at)?;
        let AttentionPointers { k, v, .. } = attention.at;
        let maps = [(at.encode)(&self.keys.map(k, self.box_keys))?, (at.encode)(&self.values.map(v, self.box_keys))?];
        Ok(LaunchParams::of(&TmaParams { attention, box_keys: self.box_keys, padding: [0; PADDING / 4], maps }))
    }
}
