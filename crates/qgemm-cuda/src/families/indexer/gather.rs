//! Top-k without storing all scores: keys are
//! gathered while they are scored.
//!
//! Every n-th key is scored first. This sample yields a threshold
//! for each query that slightly more keys reach than are wanted.

use qgemm_hal::{CheckedIndexer, DeviceInfo, IndexerKeys, Variant, WorkspaceLayout};

use super::{Chooser, Cut, Kept, Part, WHOLE, params, wgmma};
use crate::families::kernel_launch::KernelLaunch;

/// Approximate size of the sample.
const SAMPLED: usize = 2048;
/// Minimum keys for which a sample pays.
const LEAST_KEYS: usize = 1 << 14;
/// Margin of the threshold, in standard deviations of the sample.
const BELOW: f64 = 4.3;
/// Maximum bytes of gathered keys, and of scores of retried queries.
const KEPT_BYTES: usize = 256 << 20;
/// Bytes of a query's note, of a query's record of 16
/// keys, and of the header for all queries (`indexer_records.cuh`).
const QUERY_STATE_BYTES: usize = 16;
const RECORD_BYTES: usize = 8;
const RECORD_KEYS: usize = 16;
const HEADER_BYTES: usize = 16;
/// Chunks are aligned to cache lines.
const LINE_BYTES: usize = 128;
/// Bytes of a chunk, and the number of chunks per spare one.
const CHUNK_BYTES: usize = 1024 * 4;
const SPARE: usize = 4;
/// Launches for a part of the queries: sample scores,
/// thresholds, keys, top-k.
const LAUNCHES: u32 = 4;

/// Gathering parameters of an operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gathering {
    /// Distance between sampled keys.
    key_step: usize,
    /// Expected number of gathered keys of a query.
    aim: usize,
    /// Queries whose keys are kept at a time.
    pub(super) part_queries: usize,
    /// Retried queries at a time.
    pub(super) score_queries: usize,
    spare_chunks: usize,
    /// Offset of the gathered scores, after the queries' records; and
    /// of a header followed by notes.
    found_at: usize,
    header_at: usize,
}

impl Gathering {
    /// For operations that select few of many keys and have more
    /// scores than the L2 cache holds.
    pub(super) fn of(op: &CheckedIndexer, info: &DeviceInfo) -> Option<Self> {
        let (chosen, keys) = (op.chosen(), op.most_keys());
        let score_bytes = op.queries as u64 * keys as u64 * size_of::<f32>() as u64;
        let is_large = keys >= LEAST_KEYS && score_bytes >= info.cache_bytes;
        if chosen == 0 || !is_large || u32::try_from(keys).is_err() {
            return None;
        }
        let key_step = keys / SAMPLED;
        // The number of wanted keys in a sample varies by the
        // root of its expectation.
        let expected = chosen as f64 / key_step as f64;
        let of_sample = ((BELOW + (BELOW * BELOW + 4.0 * expected).sqrt()) / 2.0).powi(2);
        let aim = (of_sample * key_step as f64) as usize;
        if aim * 4 > keys {
            return None;
        }
        let unit = if matches!(op.keys, IndexerKeys::Pages { .. }) { op.sequences().1.max(1) } else { 1 };
        let kept = KEPT_BYTES.min(usize::try_from(info.memory_bytes / 4).unwrap_or(KEPT_BYTES));
        let score_queries = (kept / (op.kept_stride() * size_of::<f32>()) / unit * unit).min(op.queries);
        // The largest halving of the queries whose records and chunks fit.
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
            // Sample scores and scores of retried queries share
            // memory with the records.
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
        WorkspaceLayout::RESERVED + self.header_at + HEADER_BYTES + self.part_queries * QUERY_STATE_BYTES
    }

    /// Kernel parameters for queries from `first` on, among
    /// those whose keys are kept.
    pub(super) fn kept(&self, first: usize) -> Kept {
        Kept {
            query_states: (self.header_at + HEADER_BYTES + first * QUERY_STATE_BYTES) as u64,
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
            wgmma::launch(op, part, info, self.key_step, false, Kept { query_states: 0, ..sampled }),
            Chooser::Bound.launch(variant, part, params(op, part, of_sample, sampled)),
            wgmma::launch(op, part, info, 1, true, gathered),
            Chooser::Gathered.launch(variant, part, params(op, part, WHOLE, gathered)),
        ]
    }
}

/// Records of a query, for whole CTAs.
fn record_row(op: &CheckedIndexer) -> usize {
    op.most_keys().next_multiple_of(wgmma::KEYS as usize) / RECORD_KEYS
}

/// Row stride of sample scores.
fn sample_row(op: &CheckedIndexer, key_step: usize) -> usize {
    op.most_keys().div_ceil(key_step).next_multiple_of(4)
}
