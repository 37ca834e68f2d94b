//! Online softmax of queries that share keys, one
//! tile of keys at a time.

use std::ops::Range;

use qgemm_hal::CheckedAttention;

use super::keys::{Mask, Rows, Source, TILE_KEYS, whole};

/// Maximum rows of a block: queries of all heads
/// that share a KV head.
pub(super) const MOST_ROWS: usize = 32;

/// A block of rows. Query `i` of head `g` of
/// the group is row `i · group + g` of its
/// sequence and KV head.
pub(super) struct Block<'a> {
    pub source: Source<'a>,
    pub k: &'a Rows<'a>,
    pub v: &'a Rows<'a>,
    pub mask: Option<&'a Mask<'a>>,
    /// Rows of the sequence.
    pub rows: Range<usize>,
    /// Range of keys. It starts at a multiple of a tile,
    /// and ends at one or at the last key.
    pub keys: Range<usize>,
    /// Softmax scale, including the factor of the KV head.
    pub scale: f32,
}

/// Online softmax state of a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Weights {
    /// row_max: the largest score.
    pub row_max: f32,
    /// row_sum: the sum of `exp(score − row_max)`.
    pub row_sum: f32,
}

impl Weights {
    /// The state without keys.
    pub const NONE: Self = Self { row_max: f32::NEG_INFINITY, row_sum: 0.0 };

    /// Merges the state and values of further keys into `self` and
    /// `sums`. The other state has a finite maximum or NaN.
    pub fn add(&mut self, sums: &mut [f32], other: Weights, values: &[f32]) {
        if other.row_sum == 0.0 {
            return;
        }
        let most = self.row_max.max(other.row_max);
        let rescale = if self.row_sum == 0.0 { 0.0 } else { (self.row_max - most).exp() };
        let added = (other.row_max - most).exp();
        *self = Self { row_max: most, row_sum: self.row_sum * rescale + other.row_sum * added };
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum = *sum * rescale + value * added);
    }

    /// Normalizes the sums, scaled by `factor`, and returns the
    /// log-sum-exp. Without keys: zeros and −∞.
    pub fn finish(self, sums: &mut [f32], factor: f32) -> f32 {
        if self.row_sum == 0.0 {
            return f32::NEG_INFINITY;
        }
        let factor = factor / self.row_sum;
        sums.iter_mut().for_each(|sum| *sum *= factor);
        self.row_max + self.row_sum.ln()
    }
}

/// Scratch floats of a block.
pub(super) fn scratch_len(op: &CheckedAttention) -> usize {
    let (qk, v) = (whole(op.qk_dim), whole(op.v_dim));
    (MOST_ROWS + TILE_KEYS) * (qk + v) + MOST_ROWS * (TILE_KEYS + 2)
}

impl Block<'_> {
    /// Visible keys of row `row`.
    fn visible(&self, row: usize) -> Range<usize> {
        let (op, sequence) = (self.source.op, &self.source.sequence);
        let query = row / op.group();
        // One past the query's position.
        let end = (sequence.keys + query + 1).saturating_sub(sequence.queries);
        let first = op.window.map_or(0, |window| end.saturating_sub(window));
        let last = if op.causal { end.min(sequence.keys) } else { sequence.keys };
        first.min(last)..last
    }

    /// Visible keys of row `row` within the tile from
    /// `first` on: a bit each.
    fn visible_in_tile(&self, row: usize, first: usize) -> u64 {
        let Source { op, sequence, head, .. } = &self.source;
        let (group, visible) = (op.group(), mask_of(self.visible(row), first));
        let bits = |mask: &Mask<'_>| mask.tile(sequence, head * group + row % group, row / group, first);
        if visible == 0 { 0 } else { visible & self.mask.map_or(u64::MAX, bits) }
    }

    /// Attention of the block. `load` loads a row of queries as
    /// f32. `store` gets each row's weighted sums and softmax state.
    pub fn attend(
        &self,
        scratch: &mut [f32],
        load: impl Fn(usize, &mut [f32]),
        mut store: impl FnMut(usize, &mut [f32], Weights),
    ) {
        let (op, simd) = (self.source.op, self.source.simd);
        let (qk, v_width, rows) = (whole(op.qk_dim), whole(op.v_dim), self.rows.len());
        let (q, rest) = scratch.split_at_mut(rows * qk);
        let (sums, rest) = rest.split_at_mut(rows * v_width);
        let (k_tile, rest) = rest.split_at_mut(TILE_KEYS * qk);
        let (v_tile, rest) = rest.split_at_mut(TILE_KEYS * v_width);
        let (scores, rest) = rest.split_at_mut(rows * TILE_KEYS);
        let (row_max, rest) = rest.split_at_mut(rows);
        let row_sums = &mut rest[..rows];
        for (row, q) in self.rows.clone().zip(q.chunks_exact_mut(qk)) {
            let (values, padding) = q.split_at_mut(op.qk_dim);
            load(row, values);
            padding.fill(0.0);
        }
        sums.fill(0.0);
        row_max.fill(f32::NEG_INFINITY);
        row_sums.fill(0.0);
        let visible = self.rows.clone().map(|row| self.visible(row));
        let all = visible.filter(|visible| !visible.is_empty()).reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
        let all = all.unwrap_or(0..0);
        let all = all.start.max(self.keys.start)..all.end.min(self.keys.end);
        // Tiles start at multiples of their length, so that sums do
        // not depend on the rows of a block.
        for first in (all.start / TILE_KEYS * TILE_KEYS..all.end).step_by(TILE_KEYS) {
            let mut visible = [0; MOST_ROWS];
            visible
                .iter_mut()
                .zip(self.rows.clone())
                .for_each(|(visible, row)| *visible = self.visible_in_tile(row, first));
            if self.mask.is_some() && visible.iter().all(|keys| *keys == 0) {
                continue;
            }
            let there = self.k.load(&self.source, first, qk, k_tile);
            self.v.load(&self.source, first, v_width, v_tile);
            simd.match_keys(q, k_tile, qk, scores);
            let mut all_visible = true;
            for (i, keys) in visible[..rows].iter_mut().enumerate() {
                *keys &= there;
                let mask = *keys;
                all_visible &= mask == u64::MAX;
                let scores = &mut scores[i * TILE_KEYS..][..TILE_KEYS];
                self.mask(scores, mask);
                let most = scores.iter().copied().fold(row_max[i], f32::max);
                if most == f32::NEG_INFINITY && scores.iter().all(|score| *score == most) {
                    scores.fill(0.0);
                    continue;
                }
                let sum = simd.exponentials(scores, most);
                let rescale = (row_max[i] - most).exp();
                row_sums[i] = row_sums[i] * rescale + sum;
                row_max[i] = most;
                if rescale != 1.0 {
                    sums[i * v_width..][..v_width].iter_mut().for_each(|sum| *sum *= rescale);
                }
            }
            // Zero weights suffice for masked keys, unless their
            // values are infinite or NaN.
            if all_visible || (self.mask.is_some() && v_tile.iter().all(|value| value.is_finite())) {
                simd.add_values(scores, v_tile, v_width, sums);
                continue;
            }
            // Masked values may be infinite or NaN, so each row
            // adds only its visible keys.
            for (i, keys) in visible[..rows].iter().enumerate() {
                for run in runs(*keys) {
                    let weights = &scores[i * TILE_KEYS..][..TILE_KEYS][run.clone()];
                    let v = &v_tile[run.start * v_width..run.end * v_width];
                    simd.add_values(weights, v, v_width, &mut sums[i * v_width..][..v_width]);
                }
            }
        }
        for (i, row) in self.rows.clone().enumerate() {
            let weights = Weights { row_max: row_max[i], row_sum: row_sums[i] };
            store(row, &mut sums[i * v_width..][..op.v_dim], weights);
        }
    }

    /// Scores of the products; −∞ for masked keys.
    fn mask(&self, scores: &mut [f32], mask: u64) {
        let cap = self.source.op.soft_cap;
        for (i, score) in scores.iter_mut().enumerate() {
            let product = *score * self.scale;
            let bounded = cap.map_or(product, |cap| cap * (product / cap).tanh());
            *score = if mask >> i & 1 == 1 { bounded } else { f32::NEG_INFINITY };
        }
    }
}

/// Mask of the keys in `visible` within the tile from
/// `first` on: a bit each.
fn mask_of(visible: Range<usize>, first: usize) -> u64 {
    let below = |end: usize| match end.saturating_sub(first) {
        TILE_KEYS.. => u64::MAX,
        count => (1 << count) - 1,
    };
    below(visible.end) & !below(visible.start)
}

/// Ranges of consecutive set bits.
fn runs(bits: u64) -> impl Iterator<Item = Range<usize>> {
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
    fn runs_are_the_ranges_of_bits_that_are_set() {
        let of = |bits| runs(bits).collect::<Vec<_>>();
        assert!(of(0).is_empty() && of(u64::MAX).iter().eq([&(0..64)]));
        assert_eq!(of(0b1011 | 1 << 63), [0..2, 3..4, 63..64]);
    }

    #[test]
    fn weights_of_parts_add_up_to_those_of_all() {
        let parts = [
            (Weights { row_max: 2.0, row_sum: 1.5 }, [3.0]),
            (Weights::NONE, [0.0]),
            (Weights { row_max: 90.0, row_sum: 2.0 }, [4.0]),
            (Weights { row_max: 89.0, row_sum: 1.0 }, [-1.0]),
        ];
        let (mut all, mut sums) = (Weights::NONE, [0.0]);
        parts.iter().for_each(|(weights, values)| all.add(&mut sums, *weights, values));
        let e = (-1f32).exp();
        assert_eq!(all, Weights { row_max: 90.0, row_sum: 2.0 + e });
        let lse = all.finish(&mut sums, 2.0);
        assert!((lse - (90.0 + (2.0 + e).ln())).abs() < 1e-5 && (sums[0] - 2.0 * (4.0 - e) / (2.0 + e)).abs() < 1e-6);
        let mut zeros = [0.0];
        assert_eq!((Weights::NONE.finish(&mut zeros, 1.0), zeros), (f32::NEG_INFINITY, [0.0]));
        // NaN stays NaN, whatever the maximum of the part.
        all.add(&mut sums, Weights { row_max: f32::NEG_INFINITY, row_sum: f32::NAN }, &[f32::NAN]);
        assert!(all.finish(&mut sums, 1.0).is_nan() && sums[0].is_nan());
    }

    #[test]
    fn masks_have_a_bit_for_every_key_that_is_seen() {
        assert_eq!(mask_of(0..64, 0), u64::MAX);
        assert_eq!(mask_of(66..70, 64), 0b11_1100);
        assert_eq!(mask_of(3..200, 64), u64::MAX);
        assert_eq!((mask_of(0..64, 64), mask_of(128..130, 64), mask_of(70..70, 64)), (0, 0, 0));
    }
}
