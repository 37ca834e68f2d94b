//! Attention of blocks of rows: query-key products, online
//! softmax and weighted values, one tile of keys at a time.

use std::ops::Range;

use qgemm_hal::CheckedAttention;

use super::cache::{Cache, TileRows};
use super::keys::{Index, Mask, Sequence, bits_below, bits_of, runs, visible_keys};
use super::softmax::Softmax;
use crate::simd::{Extent, LANES, Panel, Simd, TILE_KEYS};

/// Maximum rows of a task: queries of all heads that
/// share a KV head, for one KV head or several.
pub(super) const MOST_ROWS: usize = 64;

/// Keys of a chunk. States of chunks are merged in
/// order, so bits do not depend on which threads
/// have which chunks.
pub(super) const CHUNK_KEYS: usize = 512;

const _: () = assert!(CHUNK_KEYS.is_multiple_of(TILE_KEYS));

/// Rows of a task. Query `i` of head `g` of the
/// group is row `i · group + g` of its sequence
/// and KV head.
pub(super) struct Block<'a> {
    pub simd: &'static Simd,
    pub op: &'a CheckedAttention,
    pub index: &'a Index<'a>,
    pub sequence: Sequence,
    /// KV heads. Heads of a key are neighbours in memory, so a
    /// tile is read for all of them before the next.
    pub heads: Range<usize>,
    /// Rows of the sequence, of each head.
    pub rows: Range<usize>,
    pub k: &'a Cache<'a>,
    pub v: &'a Cache<'a>,
    pub mask: Option<&'a Mask<'a>>,
    /// Factors of the keys of each head.
    pub k_factors: Option<&'a [f32]>,
}

/// Online softmax of the rows of a task.
struct States<'a> {
    softmax: [Softmax; MOST_ROWS],
    /// `[row][feature]`, rows of whole vectors.
    sums: &'a mut [f32],
}

/// Scratch memory of a task.
struct Scratch<'a> {
    /// `[row][feature]`.
    q: &'a [f32],
    /// `[feature][key]` of a head.
    k: &'a mut [f32],
    /// `[key][feature]` of a head, rows of whole vectors.
    v: &'a mut [f32],
    /// Rows of the cache at the end of its operand.
    staged: &'a mut [f32],
    /// `[row][key]` of a head: scores, then weights.
    scores: &'a mut [f32],
}

/// A tile of keys.
struct Tile {
    first: usize,
    /// A bit for each key with a place.
    there: u64,
    k: TileRows,
    v: TileRows,
}

/// Floats of scratch memory of a task.
pub(super) fn scratch_len(op: &CheckedAttention) -> usize {
    let staged = Cache::staged_len(op);
    MOST_ROWS * (op.qk_dim + 2 * whole(op.v_dim) + TILE_KEYS) + TILE_KEYS * (op.qk_dim + whole(op.v_dim)) + staged
}

/// Columns rounded up to whole vectors.
fn whole(columns: usize) -> usize {
    columns.next_multiple_of(LANES)
}

impl<'a> States<'a> {
    fn new(sums: &'a mut [f32]) -> Self {
        Self { softmax: [Softmax::NONE; MOST_ROWS], sums }
    }

    fn clear(&mut self) {
        self.softmax.fill(Softmax::NONE);
        self.sums.fill(0.0);
    }

    /// Merges the states of further keys, rows of `width` sums.
    fn merge(&mut self, other: &States<'_>, width: usize) {
        let own = self.softmax.iter_mut().zip(self.sums.chunks_exact_mut(width));
        let others = other.softmax.iter().zip(other.sums.chunks_exact(width));
        own.zip(others).for_each(|((state, sums), (other, values))| state.merge(sums, *other, values));
    }
}

impl Block<'_> {
    /// Attention of the rows to the keys of these chunks.
    /// `load` loads the query of a head and row as
    /// f32. `store` gets the number of each row in the
    /// task, its head and row, its sums and its state.
    pub fn attend(
        &self,
        chunks: Range<usize>,
        scratch: &mut [f32],
        load: impl Fn(usize, usize, &mut [f32]),
        mut store: impl FnMut(usize, [usize; 2], &mut [f32], Softmax),
    ) {
        let (op, v_width) = (self.op, whole(self.op.v_dim));
        let of_task = || self.heads.clone().flat_map(|head| self.rows.clone().map(move |row| [head, row]));
        let rows = self.heads.len() * self.rows.len();
        let (q, rest) = scratch.split_at_mut(rows * op.qk_dim);
        let (sums, rest) = rest.split_at_mut(rows * v_width);
        let (all_sums, rest) = rest.split_at_mut(rows * v_width);
        let (scores, rest) = rest.split_at_mut(self.rows.len() * TILE_KEYS);
        let (k, rest) = rest.split_at_mut(TILE_KEYS * op.qk_dim);
        let (v, staged) = rest.split_at_mut(TILE_KEYS * v_width);
        of_task().zip(q.chunks_exact_mut(op.qk_dim)).for_each(|([head, row], q)| load(head, row, q));
        let mut scratch = Scratch { q, k, v, staged, scores };
        let mut visible = [const { 0..0 }; MOST_ROWS];
        visible.iter_mut().zip(self.rows.clone()).for_each(|(keys, row)| *keys = visible_keys(op, &self.sequence, row));
        let visible = &visible[..self.rows.len()];
        let all = visible.iter().filter(|keys| !keys.is_empty()).cloned();
        let all = all.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0);
        let (mut states, mut merged) = (States::new(sums), States::new(all_sums));
        merged.clear();
        for chunk in chunks.start.max(all.start / CHUNK_KEYS)..chunks.end.min(all.end.div_ceil(CHUNK_KEYS)) {
            states.clear();
            let keys = all.start.max(chunk * CHUNK_KEYS)..all.end.min((chunk + 1) * CHUNK_KEYS);
            self.attend_keys(keys, visible, &mut scratch, &mut states);
            merged.merge(&states, v_width);
        }
        for (i, (of, sums)) in of_task().zip(merged.sums.chunks_exact_mut(v_width)).enumerate() {
            store(i, of, &mut sums[..op.v_dim], merged.softmax[i]);
        }
    }

    /// Adds keys to the states. Tiles start at multiples of their length,
    /// so that bits do not depend on the rows of a task.
    fn attend_keys(
        &self,
        keys: Range<usize>,
        visible: &[Range<usize>],
        scratch: &mut Scratch<'_>,
        states: &mut States<'_>,
    ) {
        let mut tile = self.tile(keys.start / TILE_KEYS * TILE_KEYS);
        while tile.first < keys.end {
            let next = self.tile(tile.first + TILE_KEYS);
            for number in 0..self.heads.len() {
                self.attend_tile(&tile, &next, number, visible, scratch, states);
            }
            tile = next;
        }
    }

    /// The tile of keys from `first` on.
    fn tile(&self, first: usize) -> Tile {
        let mut places = [None; TILE_KEYS];
        let there = self.index.places(self.op.paging(), &self.sequence, first, &mut places);
        Tile { first, there, k: self.k.rows_at(&places), v: self.v.rows_at(&places) }
    }

    /// Adds the keys of a tile to the states of the task's head
    /// `number`, and prefetches the next tile.
    fn attend_tile(
        &self,
        tile: &Tile,
        next: &Tile,
        number: usize,
        visible: &[Range<usize>],
        scratch: &mut Scratch<'_>,
        states: &mut States<'_>,
    ) {
        let Self { simd, op, .. } = *self;
        let (head, first_row, v_width) = (self.heads.start + number, number * self.rows.len(), whole(op.v_dim));
        let mut bits = [0; MOST_ROWS];
        for ((bits, row), keys) in bits.iter_mut().zip(self.rows.clone()).zip(visible) {
            *bits = tile.there & self.visible_in_tile(head, row, bits_of(keys, tile.first), tile.first);
        }
        let bits = &bits[..visible.len()];
        let depth = TILE_KEYS - bits.iter().fold(0, |all, bits| all | bits).leading_zeros() as usize;
        if depth == 0 {
            return;
        }
        let (rows, columns) = (bits.len(), whole(depth));
        self.k.load_keys(simd, [&tile.k[..columns], &next.k], head, scratch.staged, scratch.k);
        scratch.scores.fill(0.0);
        let q = Panel { values: &scratch.q[first_row * op.qk_dim..], stride: op.qk_dim };
        let k = Panel { values: scratch.k, stride: TILE_KEYS };
        simd.add_products(Extent { rows, depth: op.qk_dim, columns }, q, k, scratch.scores, TILE_KEYS);
        let sums = &mut states.sums[first_row * v_width..][..rows * v_width];
        let of_rows = states.softmax[first_row..].iter_mut().zip(sums.chunks_exact_mut(v_width));
        let scale = op.scale * self.k_factors.map_or(1.0, |factors| factors[head]);
        for ((scores, bits), (state, sums)) in scratch.scores.chunks_exact_mut(TILE_KEYS).zip(bits).zip(of_rows) {
            self.softmax(&mut scores[..columns], *bits, scale, state, sums);
        }
        self.v.load_values(simd, [&tile.v[..depth], &next.v], head, scratch.staged, scratch.v);
        self.add_values(bits, depth, scratch.scores, scratch.v, sums);
    }

    /// Keys that row `row` attends to, of the bits that causality
    /// and window leave.
    fn visible_in_tile(&self, head: usize, row: usize, visible: u64, first: usize) -> u64 {
        let (Some(mask), true) = (self.mask, visible != 0) else { return visible };
        let group = self.op.group();
        visible & mask.tile(&self.sequence, head * group + row % group, row / group, first)
    }

    /// Replaces products by weights, zero for masked keys.
    fn softmax(&self, scores: &mut [f32], visible: u64, mut scale: f32, state: &mut Softmax, sums: &mut [f32]) {
        if visible == 0 {
            return scores.fill(0.0);
        }
        if self.op.soft_cap.is_some() || visible != bits_below(scores.len()) {
            self.mask(scores, visible, scale);
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
    fn mask(&self, scores: &mut [f32], visible: u64, scale: f32) {
        scores.iter_mut().for_each(|score| *score *= scale);
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
