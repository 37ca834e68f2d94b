//! Queries and keys of a sequence, and tiles of
//! keys and values in f32.

use qgemm_formats::DType;
use qgemm_formats::float8::e4m3_to_f32;
use qgemm_hal::op::attention::{KV_BLOCK, KV_SCALE_BYTES};
use qgemm_hal::{
    Addressing, CheckedAttention, HalError, KvAddressing, KvFormat, KvRows, MaskBits, Paging, QueryLengths,
};

use crate::operand::absent;
use crate::simd::{LANES, Simd};

/// Keys of a tile: whole vectors.
pub(super) const TILE_KEYS: usize = 64;

/// Offsets, lengths and block table, as given.
pub(in crate::families) struct Index<'a> {
    pub q_offsets: Option<&'a [u32]>,
    pub kv_offsets: Option<&'a [u32]>,
    pub lengths: Option<&'a [u32]>,
    pub table: Option<&'a [u32]>,
}

/// Queries and keys of a sequence, clamped to the operands.
#[derive(Clone, Copy, Debug)]
pub(in crate::families) struct Sequence {
    /// Index of the sequence.
    pub index: usize,
    /// Its first query token.
    pub token: usize,
    pub queries: usize,
    /// Row of its first key, if there are offsets.
    pub row: usize,
    pub keys: usize,
}

impl Index<'_> {
    /// Sequence `index`. For any numbers, the queries are within the
    /// tokens and the keys within the rows.
    pub fn sequence(&self, op: &Addressing, index: usize) -> Sequence {
        let most = op.most_queries();
        let (token, queries) = match (op.queries, self.q_offsets) {
            // Threads must not share tokens: an offset below an
            // earlier one is raised to it.
            (QueryLengths::Offsets { .. }, Some(offsets)) => {
                let before = |end: usize| offsets[..=end].iter().copied().fold(0, u32::max);
                span([before(index), before(index + 1)], op.tokens)
            }
            _ => (index * most, most),
        };
        let (row, keys) = match (op.places, self.kv_offsets) {
            (KvAddressing::Offsets { rows }, Some(offsets)) => span([offsets[index], offsets[index + 1]], rows),
            _ => (0, self.lengths.map_or(op.most_keys, |lengths| lengths[index] as usize)),
        };
        Sequence { index, token, queries: queries.min(most), row, keys: keys.min(op.most_keys) }
    }

    /// Page and row of key `key`; `None` when the
    /// table has no valid page.
    pub fn place(&self, paging: Paging, of: &Sequence, key: usize) -> Option<(usize, usize)> {
        match self.table {
            Some(table) => {
                let page = table[of.index * paging.width + key / paging.page_size] as usize;
                (page < paging.pages).then_some((page, key % paging.page_size))
            }
            None if self.kv_offsets.is_some() => Some((0, of.row + key)),
            None => Some((of.index, key)),
        }
    }
}

/// Start and length of the range between two
/// offsets, clamped to `all`.
fn span([first, end]: [u32; 2], all: usize) -> (usize, usize) {
    let first = (first as usize).min(all);
    let end = (end as usize).clamp(first, all);
    (first, end - first)
}

/// A bit mask, as given.
pub(super) struct Mask<'a> {
    words: &'a [u32],
    /// Words of a row.
    row_words: usize,
    /// Words from one head to the next.
    head_words: usize,
    is_shared: bool,
}

impl<'a> Mask<'a> {
    pub fn new(bits: MaskBits, words: &'a [u32], op: &CheckedAttention) -> Self {
        let row_words = MaskBits::words(op.most_keys);
        let head_words = if bits.is_per_head { bits.rows(&op.addressing()) * row_words } else { 0 };
        Self { words, row_words, head_words, is_shared: bits.is_shared }
    }

    /// Mask bits of query `query` of a head for the tile
    /// of keys from `first` on.
    pub fn tile(&self, sequence: &Sequence, head: usize, query: usize, first: usize) -> u64 {
        let row = if self.is_shared { query } else { sequence.token + query };
        let words = &self.words[head * self.head_words + row * self.row_words..][..self.row_words];
        let word = |i: usize| words.get(first / MaskBits::WORD_KEYS + i).copied().map_or(0, u64::from);
        word(0) | word(1) << MaskBits::WORD_KEYS
    }
}

const _: () = assert!(TILE_KEYS == 2 * MaskBits::WORD_KEYS);

/// Keys or values in memory.
pub(super) struct Rows<'a> {
    bytes: &'a [u8],
    /// Block scales, if the format has them.
    scales: Option<&'a [u8]>,
    layout: KvRows,
    kv: KvFormat,
    columns: usize,
}

impl<'a> Rows<'a> {
    /// # Errors
    /// [`HalError::OutOfBounds`] when they exceed `bytes`.
    pub fn new(
        bytes: &'a [u8],
        scales: Option<&'a [u8]>,
        layout: KvRows,
        op: &CheckedAttention,
        columns: usize,
        what: &'static str,
    ) -> Result<Self, HalError> {
        let Paging { pages, page_size, .. } = op.paging();
        let rows = Self { bytes, scales, layout, kv: op.kv, columns };
        if pages > 0 && page_size > 0 {
            let end = rows.at(pages - 1, page_size - 1, op.kv_heads - 1) + columns;
            if op.kv.bytes_of(end) > bytes.len() {
                return Err(absent(what, op.kv.bytes_of(end)));
            }
            let of_scales = end / KV_BLOCK * KV_SCALE_BYTES;
            if op.kv.has_scales() && scales.is_none_or(|scales| scales.len() < of_scales) {
                return Err(absent("the scales", of_scales));
            }
        }
        Ok(rows)
    }

    /// First element of a head of a row.
    fn at(&self, page: usize, row: usize, head: usize) -> usize {
        let KvRows { page_stride, rows } = self.layout;
        page * page_stride as usize + row * rows.token_stride as usize + head * rows.head_stride as usize
    }

    /// Loads rows of keys from `first` on as f32,
    /// `width` columns wide. Absent keys are zeros.
    /// Returns a bit for each present key.
    pub fn load(&self, from: &Source<'_>, first: usize, width: usize, tile: &mut [f32]) -> u64 {
        let Source { simd, index, op, sequence, head } = from;
        let (paging, mut there) = (op.paging(), 0);
        for (i, out) in tile.chunks_exact_mut(width).enumerate() {
            let key = first + i;
            let place = (key < sequence.keys).then(|| index.place(paging, sequence, key)).flatten();
            let Some((page, row)) = place else {
                out.fill(0.0);
                continue;
            };
            there |= 1 << i;
            let element = self.at(page, row, *head);
            let bytes = &self.bytes[self.kv.bytes_of(element)..];
            let (values, rest) = out.split_at_mut(self.columns);
            rest.fill(0.0);
            match self.kv {
                KvFormat::Plain(dtype) => simd.to_f32(dtype, bytes, values),
                KvFormat::Q8_0 | KvFormat::Q4_0 => self.load_blocks(element, bytes, values),
                _ => values.iter_mut().zip(bytes).for_each(|(value, code)| *value = e4m3_to_f32(*code)),
            }
        }
        there
    }

    /// Dequantizes elements with block scales from `element`
    /// on, the first of a block.
    fn load_blocks(&self, element: usize, codes: &[u8], values: &mut [f32]) {
        let scales = &self.scales.unwrap_or_default()[element / KV_BLOCK * KV_SCALE_BYTES..];
        for (block, values) in values.chunks_mut(KV_BLOCK).enumerate() {
            let scale = DType::F16.read(scales, block);
            let first = block * KV_BLOCK;
            for (i, value) in values.iter_mut().enumerate() {
                let code = match self.kv {
                    KvFormat::Q4_0 => i32::from(codes[(first + i) / 2] >> (4 * (i % 2)) & 15) - 8,
                    _ => i32::from(codes[first + i].cast_signed()),
                };
                *value = code as f32 * scale;
            }
        }
    }
}

/// Whose keys are loaded.
pub(super) struct Source<'a> {
    pub simd: &'static Simd,
    pub index: &'a Index<'a>,
    pub op: &'a CheckedAttention,
    pub sequence: Sequence,
    /// KV head.
    pub head: usize,
}

/// Columns rounded up to whole vectors.
pub(super) fn whole(columns: usize) -> usize {
    columns.next_multiple_of(LANES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_never_lead_out_of_what_there_is() {
        let spans = [[3, 7], [7, 5], [5, u32::MAX], [u32::MAX, 2]].map(|offsets| span(offsets, 10));
        assert_eq!(spans, [(3, 4), (7, 0), (5, 5), (10, 0)]);
    }
}
