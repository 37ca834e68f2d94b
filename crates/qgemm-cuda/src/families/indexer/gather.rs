//! Keys that are gathered while they are scored, so that scores are not kept: every so many-th key is scored first, which gives a bound for
//! each query that somewhat more keys reach than are wanted.

use qgemm_hal::{CheckedIndexer, DeviceInfo, IndexerKeys, Variant, WorkspaceLayout};

use super::{Chooser, Cut, Kept, Part, WHOLE, params, wgmma};
use crate::families::kernel_launch::KernelLaunch;

/// Keys of a sample, roughly.
const SAMPLED: usize = 2048;
/// Fewest keys for which a sample pays.
const LEAST_KEYS: usize = 1 << 14;
/// Standard deviations of a sample from what is wanted to what is aimed at.
const BELOW: f64 = 4.3;
/// Most bytes of what is gathered, and of scores of queries that are served again.
const KEPT_BYTES: usize = 256 << 20;
/// Bytes of the note of a query, of a record of 16 keys of it, and of what is known of all queries (`indexer_notes.cuh`).
const NOTE_BYTES: usize = 16;
const RECORD_BYTES: usize = 8;
const RECORD_KEYS: usize = 16;
const HEADER_BYTES: usize = 16;
/// Chunks begin at lines of a cache.
const LINE_BYTES: usize = 128;
/// Bytes of a chunk, and one of how many of all chunks are spare.
const CHUNK_BYTES: usize = 1024 * 4;
const SPARE: usize = 4;
/// Launches for some queries: scores of a sample, bounds, keys, and the choice among them.
const LAUNCHES: u32 = 4;

/// How keys are gathered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gathering {
    /// Keys from one of a sample to the next.
    key_step: usize,
    /// Keys that should be gathered of a query.
    aim: usize,
    /// Queries whose keys are kept at a time.
    pub(super) part_queries: usize,
    /// Queries that are served again at a time.
    pub(super) score_queries: usize,
    spare_chunks: usize,
    /// Where found scores are, behind the records of queries, and a header with notes behind it.
    found_at: usize,
    header_at: usize,
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
        if aim * 4 > keys {
            return None;
        }
        let unit = if matches!(op.keys, IndexerKeys::Pages { .. }) { op.sequences().1.max(1) } else { 1 };
        let kept = KEPT_BYTES.min(usize::try_from(info.memory_bytes / 4).unwrap_or(KEPT_BYTES));
        let score_queries = (kept / (op.kept_stride() * size_of::<f32>()) / unit * unit).min(op.queries);
        // The most queries whose records and chunks fit, in halves of all.
        let halves = std::iter::successors(Some(op.queries), |&queries| {
            let half = queries.div_ceil(2).next_multiple_of(unit);
            (half < queries).then_some(half)
        });
        let gathering = |part_queries| {
            let of_part = |queries| wgmma::warps(op, Part { first: 0, queries }, info);
            let warps = of_part(part_queries)?.max(of_part(op.queries % part_queries)?);
            let spare_chunks = warps.div_ceil(SPARE);
            let records = (part_queries + 1) * record_row(op) * RECORD_BYTES;
            let sample = part_queries * sample_row(op, key_step) * size_of::<f32>();
            let scores = score_queries * op.kept_stride() * size_of::<f32>();
            // Scores of a sample, and of queries that are served again, lie in the same place.
            let found_at = records.next_multiple_of(LINE_BYTES);
            let found_end = found_at + (1 + spare_chunks + warps) * CHUNK_BYTES;
            let header_at = found_end.max(sample).max(scores).next_multiple_of(HEADER_BYTES);
            let all = Self { key_step, aim, part_queries, score_queries, spare_chunks, found_at, header_at };
            (found_end <= kept).then_some(all)
        };
        halves.filter(|_| score_queries > 0).find_map(gathering)
    }

    /// All launches.
    pub(super) fn launches(&self, op: &CheckedIndexer) -> u32 {
        let of_part = |part: usize| LAUNCHES + 2 * part.div_ceil(self.score_queries) as u32;
        let rest = op.queries % self.part_queries;
        let of_rest = if rest > 0 { of_part(rest) } else { 0 };
        (op.queries / self.part_queries) as u32 * of_part(self.part_queries) + of_rest
    }

    /// Bytes of workspace.
    pub(super) fn workspace_bytes(&self) -> usize {
        WorkspaceLayout::RESERVED + self.header_at + HEADER_BYTES + self.part_queries * NOTE_BYTES
    }

    /// What kernels are told for queries from the `first` one of those whose keys are kept on.
    pub(super) fn kept(&self, first: usize) -> Kept {
        Kept {
            notes: (self.header_at + HEADER_BYTES + first * NOTE_BYTES) as u64,
            found: self.found_at as u64,
            found_header: self.header_at as u64,
            row: None,
            spare_chunks: self.spare_chunks as u32,
            aim: self.aim as u32,
        }
    }

    /// The launches for the queries of `part`.
    pub(super) fn launch(
        &self,
        op: &CheckedIndexer,
        part: Part,
        info: &DeviceInfo,
        variant: Variant,
    ) -> [KernelLaunch; LAUNCHES as usize] {
        let kept = self.kept(0);
        let sampled = Kept { row: Some(sample_row(op, self.key_step) as u64), ..kept };
        let gathered = Kept { row: Some(record_row(op) as u64), ..kept };
        let of_sample = Cut { key_step: self.key_step, ..WHOLE };
        [
            wgmma::launch(op, part, info, self.key_step, false, Kept { notes: 0, ..sampled }),
            Chooser::Bound.launch(variant, part, params(op, part, of_sample, sampled)),
            wgmma::launch(op, part, info, 1, true, gathered),
            Chooser::Gathered.launch(variant, part, params(op, part, WHOLE, gathered)),
        ]
    }
}

/// Records of a query: of whole CTAs.
fn record_row(op: &CheckedIndexer) -> usize {
    op.most_keys().next_multiple_of(wgmma::KEYS as usize) / RECORD_KEYS
}

/// Scores of a sample from one query to the next.
fn sample_row(op: &CheckedIndexer, key_step: usize) -> usize {
    op.most_keys().div_ceil(key_step).next_multiple_of(4)
}
