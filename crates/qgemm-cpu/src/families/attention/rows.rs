//! Attention of a block of rows: query-key products, online
//! softmax and weighted values, one tile of keys at a time.

use std::ops::Range;

use qgemm_hal::CheckedAttention;

use super::cache::Cache;
use super::keys::{Index, Mask, Place, Sequence, bits_below, bits_of, runs, visible_keys};
use super::softmax::Softmax;
use crate::simd::{Extent, LANES, Panel, Simd, TILE_KEYS};

/// Maximum rows of a block: queries of all heads
/// that share a KV head.
pub(super) const MOST_ROWS: usize = 64;

/// Keys whose softmax is computed from the beginning. States of chunks are
/// merged in order, so the bits of a row do not depend on
/// which threads have which chunks.
pub(super) const CHUNK_KEYS: usize = 512;

const _: () = assert!(CHUNK_KEYS.is_multiple_of(TILE_KEYS));

/// A block of rows. Query `i` of head `g` of
/// the group is row `i · group + g` of its
/// sequence and KV head.
pub(super) struct Block<'a> {
    pub simd: &'static Simd,
    pub op: &'a CheckedAttention,
    pub index: &'a Index<'a>,
    pub sequence: Sequence,
    /// KV head.
    pub head: usize,
    pub k: &'a Cache<'a>,
    pub v: &'a Cache<'a>,
    pub mask: Option<&'a Mask<'a>>,
    /// Rows of the sequence.
    pub rows: Range<usize>,
    /// Softmax scale, including the factor of the KV head.
    pub scale: f32,
}

/// Scratch memory of a block.
struct Scratch<'a> {
    /// `[row][feature]`.
    q: &'a [f32],
    /// `[feature][key]`.
    k: &'a mut [f32],
    /// `[key][feature]`, rows of whole vectors.
    v: &'a mut [f32],
    /// Rows of the cache at the end of its operand.
    staged: &'a mut [f32],
    /// `[row][key]`: scores, then weights.
    scores: &'a mut [f32],
}

/// Floats of scratch memory of a block.
pub(super) fn scratch_len(op: &CheckedAttention) -> usize {
    let staged = Cache::staged_len(op, op.qk_dim.max(op.v_dim));
    MOST_ROWS * (op.qk_dim + 2 * whole(op.v_dim) + TILE_KEYS) + TILE_KEYS * (op.qk_dim + whole(op.v_dim)) + staged
}

/// Columns rounded up to whole vectors.
fn whole(columns: usize) -> usize {
    columns.next_multiple_of(LANES)
}

impl Block<'_> {
    /// Attention of the block to the keys of these chunks. `load` loads a row of
    /// queries as f32. `store` gets each row's weighted sums and softmax state.
    pub fn attend(
        &self,
        chunks: Range<usize>,
        scratch: &mut [f32],
        load: impl Fn(usize, &mut [f32]),
        mut store: impl FnMut(usize, &mut [f32], Softmax),
    ) {
        let (op, rows, v_width) = (self.op, self.rows.len(), whole(self.op.v_dim));
        let (q, rest) = scratch.split_at_mut(rows * op.qk_dim);
        let (sums, rest) = rest.split_at_mut(rows * v_width);
        let (all_sums, rest) = rest.split_at_mut(rows * v_width);
        let (scores, rest) = rest.split_at_mut(rows * TILE_KEYS);
        let (k, rest) = rest.split_at_mut(TILE_KEYS * op.qk_dim);
        let (v, staged) = rest.split_at_mut(TILE_KEYS * v_width);
        self.rows.clone().zip(q.chunks_exact_mut(op.qk_dim)).for_each(|(row, q)| load(row, q));
        let mut scratch = Scratch { q, k, v, staged, scores };
        let mut visible = [const { 0..0 }; MOST_ROWS];
        visible.iter_mut().zip(self.rows.clone()).for_each(|(keys, row)| *keys = visible_keys(op, &self.sequence, row));
        let visible = &visible[..rows];
        let all = visible.iter().filter(|keys| !keys.is_empty()).cloned();
        let all = all.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
        let (mut states, mut all_states) = ([Softmax::NONE; MOST_ROWS], [Softmax::NONE; MOST_ROWS]);
        all_sums.fill(0.0);
        for chunk in chunks.start.max(all.start / CHUNK_KEYS)..chunks.end.min(all.end.div_ceil(CHUNK_KEYS)) {
            states.fill(Softmax::NONE);
            sums.fill(0.0);
            let keys = all.start.max(chunk * CHUNK_KEYS)..all.end.min((chunk + 1) * CHUNK_KEYS);
            // Tiles start at multiples of their length, so that sums do
            // not depend on the rows of a block.
            for first in (keys.start / TILE_KEYS * TILE_KEYS..keys.end).step_by(TILE_KEYS) {
                self.attend_tile(first, visible, &mut scratch, &mut states, sums);
            }
            let parts = states.iter().zip(sums.chunks_exact(v_width));
            let merged = all_states.iter_mut().zip(all_sums.chunks_exact_mut(v_width));
            merged.zip(parts).for_each(|((all, all_sums), (part, sums))| all.merge(all_sums, *part, sums));
        }
        for ((row, sums), state) in self.rows.clone().zip(all_sums.chunks_exact_mut(v_width)).zip(all_states) {
            store(row, &mut sums[..op.v_dim], state);
        }
    }

    /// Adds the keys of the tile from `first` on to
    /// the rows' states and sums.
    fn attend_tile(
        &self,
        first: usize,
        visible: &[Range<usize>],
        scratch: &mut Scratch<'_>,
        states: &mut [Softmax],
        sums: &mut [f32],
    ) {
        let Self { simd, op, head, .. } = *self;
        let mut places: [Place; TILE_KEYS] = [None; TILE_KEYS];
        let there = self.index.places(op.paging(), &self.sequence, first, &mut places);
        let mut bits = [0; MOST_ROWS];
        for ((bits, row), keys) in bits.iter_mut().zip(self.rows.clone()).zip(visible) {
            *bits = there & self.visible_in_tile(row, bits_of(keys, first), first);
        }
        let bits = &bits[..visible.len()];
        let depth = TILE_KEYS - bits.iter().fold(0, |all, bits| all | bits).leading_zeros() as usize;
        if depth == 0 {
            return;
        }
        let (rows, columns) = (bits.len(), whole(depth));
        self.k.load_keys(simd, &places[..columns], head, scratch.staged, scratch.k);
        scratch.scores.fill(0.0);
        let q = Panel { values: scratch.q, stride: op.qk_dim };
        let k = Panel { values: scratch.k, stride: TILE_KEYS };
        simd.add_products(Extent { rows, depth: op.qk_dim, columns }, q, k, scratch.scores, TILE_KEYS);
        let of_rows = states.iter_mut().zip(sums.chunks_exact_mut(whole(op.v_dim)));
        for ((scores, bits), (state, sums)) in scratch.scores.chunks_exact_mut(TILE_KEYS).zip(bits).zip(of_rows) {
            self.softmax(&mut scores[..columns], *bits, state, sums);
        }
        self.v.load_values(simd, &places[..depth], head, scratch.staged, scratch.v);
        self.add_values(bits, depth, scratch.scores, scratch.v, sums);
    }

    /// Keys that row `row` attends to, of the bits that causality
    /// and window leave.
    fn visible_in_tile(&self, row: usize, visible: u64, first: usize) -> u64 {
        let (Some(mask), true) = (self.mask, visible != 0) else { return visible };
        let group = self.op.group();
        visible & mask.tile(&self.sequence, self.head * group + row % group, row / group, first)
    }

    /// Replaces products by weights, zero for masked keys.
    fn softmax(&self, scores: &mut [f32], visible: u64, state: &mut Softmax, sums: &mut [f32]) {
        if visible == 0 {
            return scores.fill(0.0);
        }
        let mut scale = self.scale;
        if self.op.soft_cap.is_some() || visible != bits_below(scores.len()) {
            self.mask(scores, visible);
            scale = 1.0;
        }
        let most = self.simd.scale_scores(scores, scale, state.row_max);
        if most == f32::NEG_INFINITY && scores.iter().all(|score| *score == most) {
            return scores.fill(0.0);
        }
        let sum = self.simd.exponentials(scores, most);
        state.add_keys(sums, most, sum);
    }

    /// Scores of the products; −∞ for masked keys.
    fn mask(&self, scores: &mut [f32], visible: u64) {
        scores.iter_mut().for_each(|score| *score *= self.scale);
        if let Some(cap) = self.op.soft_cap {
            scores.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
        }
        for run in runs(bits_below(scores.len()) & !visible) {
            scores[run].fill(f32::NEG_INFINITY);
        }
    }

    /// Adds the weighted values of `depth` keys to the sums.
    fn add_values(&self, visible: &[u64], depth: usize, weights: &[f32], v: &[f32], sums: &mut [f32]) {
        let width = whole(self.op.v_dim);
        let all_visible = visible.iter().all(|bits| *bits == bits_below(depth));
        // Zero weights suffice for masked keys, unless their
        // values are infinite or NaN.
        if all_visible || self.simd.are_finite(&v[..depth * width]) {
            let extent = Extent { rows: visible.len(), depth, columns: width };
            let weights = Panel { values: weights, stride: TILE_KEYS };
            return self.simd.add_products(extent, weights, Panel { values: v, stride: width }, sums, width);
        }
        for ((bits, weights), sums) in visible.iter().zip(weights.chunks(TILE_KEYS)).zip(sums.chunks_mut(width)) {
            for run in runs(*bits) {
                let extent = Extent { rows: 1, depth: run.len(), columns: width };
                let v = Panel { values: &v[run.start * width..], stride: width };
                self.simd.add_products(extent, Panel { values: &weights[run], stride: TILE_KEYS }, v, sums, width);
            }
        }
    }
}
