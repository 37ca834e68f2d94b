//! Keys that are gathered while they are scored, so that scores are not kept: every so many-th key is scored first, which gives a bound for
//! each query that somewhat more keys reach than are wanted.

use qgemm_hal::{CheckedIndexer, DeviceInfo, IndexerKeys, Variant, WorkspaceLayout};

use super::{Chooser, Cut, Kept, Part, WHOLE, params, wgmma};
use crate::families::kernel_launch::KernelLaunch;

/// Keys of a sample, roughly.
const SAMPLED: usize = 2048;
/// Fewest keys for which a sample pays.
const LEAST_KEYS: usize = 1 << 14;
/// Keys that are all gathered where a query sees no more (`MOST_GATHERED`).
const ALL_GATHERED: usize = 4096;
/// Standard deviations of a sample from what is wanted to what is aimed at, and from there to what there is room for.
const BELOW: f64 = 4.3;
const ABOVE: f64 = 6.0;
/// Most bytes of keys that are kept at a time.
const KEPT_BYTES: usize = 128 << 20;
/// Bytes of a key, and of the note of a query (`QueryNote`).
const KEY_BYTES: usize = 8;
const NOTE_BYTES: usize = 16;
/// Launches for some queries: scores of a sample, bounds, keys, and the choice among them.
const LAUNCHES: u32 = 4;

/// How keys are gathered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gathering {
    /// Keys from one of a sample to the next.
    key_step: usize,
    /// Keys that should be gathered of a query, and those that there is room for.
    aim: usize,
    room: usize,
    /// Queries whose keys are kept at a time.
    pub(super) part_queries: usize,
}

impl Gathering {
    /// For an operation that wants few of many keys, and has more scores than the last cache holds.
    pub(super) fn of(op: &CheckedIndexer, info: &DeviceInfo) -> Option<Self> {
        let (chosen, keys) = (op.chosen(), op.most_keys());
        let score_bytes = op.queries as u64 * keys as u64 * size_of::<f32>() as u64;
        let is_large = keys >= LEAST_KEYS && score_bytes >= info.cache_bytes;
        if chosen == 0 || !is_large || u32::try_from(keys).is_err() {
            return None;
        }
        let key_step = keys / SAMPLED;
        // How many of a sample are expected among the wanted varies by the root of their number.
        let expected = chosen as f64 / key_step as f64;
        let of_sample = ((BELOW + (BELOW * BELOW + 4.0 * expected).sqrt()) / 2.0).powi(2);
        let aim = (of_sample * key_step as f64) as usize;
        let room = ((of_sample + ABOVE * of_sample.sqrt()) * key_step as f64) as usize;
        let room = room.max(ALL_GATHERED).next_multiple_of(2);
        let unit = if matches!(op.keys, IndexerKeys::Pages { .. }) { op.sequences().1.max(1) } else { 1 };
        let part_queries = KEPT_BYTES / (room * KEY_BYTES) / unit * unit;
        let pays = aim * 4 <= keys && part_queries > 0;
        pays.then_some(Self { key_step, aim, room, part_queries: part_queries.min(op.queries) })
    }

    /// Launches beside those that score all and choose from scores.
    pub(super) fn launches(&self, op: &CheckedIndexer) -> u32 {
        op.queries.div_ceil(self.part_queries) as u32 * LAUNCHES
    }

    /// Bytes of workspace, in which scores of `score_queries` queries take the place of keys.
    pub(super) fn workspace_bytes(&self, op: &CheckedIndexer, score_queries: usize) -> usize {
        WorkspaceLayout::RESERVED + self.notes_at(op, score_queries) + self.part_queries * NOTE_BYTES
    }

    /// Where notes are, behind whatever else is kept.
    fn notes_at(&self, op: &CheckedIndexer, score_queries: usize) -> usize {
        let scores = op.score_bytes(score_queries) - WorkspaceLayout::RESERVED;
        let sample = self.part_queries * self.sample_stride(op) * size_of::<f32>();
        let keys = self.part_queries * self.room * KEY_BYTES;
        scores.max(sample).max(keys).next_multiple_of(NOTE_BYTES)
    }

    /// Scores of a sample from one query to the next.
    fn sample_stride(&self, op: &CheckedIndexer) -> usize {
        op.most_keys().div_ceil(self.key_step).next_multiple_of(4)
    }

    /// What kernels are told for queries from the `first` one of those whose keys are kept on.
    pub(super) fn kept(&self, op: &CheckedIndexer, score_queries: usize, first: usize) -> Kept {
        let notes = (self.notes_at(op, score_queries) + first * NOTE_BYTES) as u64;
        Kept { notes, scores_row: None, gathered: self.room as u32, aim: self.aim as u32 }
    }

    /// The launches for the queries of `part`.
    pub(super) fn launch(
        &self,
        op: &CheckedIndexer,
        part: Part,
        score_queries: usize,
        info: &DeviceInfo,
        variant: Variant,
    ) -> [KernelLaunch; LAUNCHES as usize] {
        let kept = self.kept(op, score_queries, 0);
        let scores_row = Some(self.sample_stride(op) as u64);
        let of_sample = Cut { key_step: self.key_step, ..WHOLE };
        [
            wgmma::launch(op, part, info, self.key_step, false, Kept { notes: 0, scores_row, ..kept }),
            Chooser::Bound.launch(variant, part, params(op, part, of_sample, Kept { scores_row, ..kept })),
            wgmma::launch(op, part, info, 1, true, kept),
            Chooser::Gathered.launch(variant, part, params(op, part, WHOLE, kept)),
        ]
    }
}
