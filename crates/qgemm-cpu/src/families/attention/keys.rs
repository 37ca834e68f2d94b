//! Queries and keys of a sequence, where keys are, and which
//! of them a query attends to.

use std::ops::Range;

use qgemm_hal::{Addressing, CheckedAttention, KvAddressing, MaskBits, Paging, QueryLengths};

use crate::simd::TILE_KEYS;

/// Page and row of a key; `None` when the table
/// has no valid page.
pub(super) type Place = Option<(usize, usize)>;

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

    /// Pages and rows of the keys from `first` on, none
    /// past the sequence. Returns a bit for each key.
    pub(super) fn places(&self, paging: Paging, of: &Sequence, first: usize, out: &mut [Place; TILE_KEYS]) -> u64 {
        let mut there = 0;
        let count = of.keys.saturating_sub(first).min(TILE_KEYS);
        out[count..].fill(None);
        let paged = self.table.map(|table| &table[of.index * paging.width..][..paging.width]);
        let (mut page, mut row) =
            if paged.is_some() { (first / paging.page_size, first % paging.page_size) } else { (0, 0) };
        for (i, place) in out[..count].iter_mut().enumerate() {
            *place = match paged {
                Some(table) => {
                    let (at, number) = (row, table[page] as usize);
                    row += 1;
                    if row == paging.page_size {
                        (page, row) = (page + 1, 0);
                    }
                    (number < paging.pages).then_some((number, at))
                }
                None => self.place(paging, of, first + i),
            };
            there |= u64::from(place.is_some()) << i;
        }
        there
    }

    /// Place of key `key`.
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

/// Keys of the sequence that row `row` of its block attends
/// to, unless a mask says otherwise.
pub(super) fn visible_keys(op: &CheckedAttention, sequence: &Sequence, row: usize) -> Range<usize> {
    let query = row / op.group();
    // One past the query's position.
    let end = (sequence.keys + query + 1).saturating_sub(sequence.queries);
    let first = op.window.map_or(0, |window| end.saturating_sub(window));
    let last = if op.causal { end.min(sequence.keys) } else { sequence.keys };
    first.min(last)..last
}

/// Bits of the keys in `visible` within the tile
/// from `first` on.
pub(super) fn bits_of(visible: &Range<usize>, first: usize) -> u64 {
    bits_below(visible.end.saturating_sub(first)) & !bits_below(visible.start.saturating_sub(first))
}

/// The lowest `count` bits.
pub(super) fn bits_below(count: usize) -> u64 {
    if count >= TILE_KEYS { u64::MAX } else { (1 << count) - 1 }
}

/// Ranges of consecutive set bits.
pub(super) fn runs(bits: u64) -> impl Iterator<Item = Range<usize>> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let left = bits.checked_shr(start).filter(|left| *left != 0)?;
        let first = start + left.trailing_zeros();
        start = first + (bits >> first).trailing_ones();
        Some(first as usize..start as usize)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_never_lead_out_of_what_there_is() {
        let spans = [[3, 7], [7, 5], [5, u32::MAX], [u32::MAX, 2]].map(|offsets| span(offsets, 10));
        assert_eq!(spans, [(3, 4), (7, 0), (5, 5), (10, 0)]);
    }

    #[test]
    fn runs_are_the_ranges_of_bits_that_are_set() {
        let of = |bits| runs(bits).collect::<Vec<_>>();
        assert!(of(0).is_empty() && of(u64::MAX).iter().eq([&(0..64)]));
        assert_eq!(of(0b1011 | 1 << 63), [0..2, 3..4, 63..64]);
    }

    #[test]
    fn masks_have_a_bit_for_every_key_that_is_seen() {
        assert_eq!(bits_of(&(0..64), 0), u64::MAX);
        assert_eq!(bits_of(&(66..70), 64), 0b11_1100);
        assert_eq!(bits_of(&(3..200), 64), u64::MAX);
        assert_eq!((bits_of(&(0..64), 64), bits_of(&(128..130), 64), bits_of(&(70..70), 64)), (0, 0, 0));
    }

    #[test]
    fn places_of_a_tile_are_those_of_its_keys() {
        let table = [2, 9, 0, 1, 1, 0];
        let index = Index { q_offsets: None, kv_offsets: None, lengths: None, table: Some(&table) };
        let paging = Paging { pages: 3, page_size: 50, width: 3 };
        let of = Sequence { index: 1, token: 0, queries: 1, row: 0, keys: 140 };
        for (sequence, table) in [(0, [2, 9, 0]), (1, [1, 1, 0])] {
            let of = Sequence { index: sequence, ..of };
            for first in [0, 64, 128] {
                let mut places = [None; TILE_KEYS];
                let there = index.places(paging, &of, first, &mut places);
                for (i, place) in places.into_iter().enumerate() {
                    let key = first + i;
                    let expected = (key < 140 && table[key / 50] < 3).then(|| (table[key / 50], key % 50));
                    assert_eq!((place, there >> i & 1 == 1), (expected, expected.is_some()), "{key}");
                }
            }
        }
    }
}
