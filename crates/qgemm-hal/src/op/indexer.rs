//! `indexer`: sparse-attention indexer of DeepSeek:
//! multi-head scores and top-k keys.

use qgemm_formats::DType;

use super::attention::{HeadRows, KvFormat, Paging};
use super::gemm::WorkspaceLayout;
use super::{Operation, operands};
use crate::axis::axis;
use crate::caps::Math;
use crate::error::Unsupported;
use crate::kernel_id::{KernelId, Spec, spec};

/// Feature counts are multiples of this.
pub const FEATURE_STEP: usize = 16;
/// Maximum features of a query head and of a key.
pub const MOST_FEATURES: usize = 256;
/// Maximum keys chosen for a query (top-k).
pub const MOST_CHOSEN: usize = 2048;
/// Formats of queries and keys.
pub const FORMATS: [KvFormat; 3] = [KvFormat::E4M3, KvFormat::Plain(DType::F16), KvFormat::Plain(DType::BF16)];

/// Bytes of scores kept at a time for top-k. Large enough
/// that each SM has several queries to choose for.
const SCORE_BYTES: usize = 128 << 20;
/// Maximum parts that queries are split into to keep fewer scores.
/// Each part costs two launches.
const MOST_PARTS: usize = 64;

/// Visible keys of each query, and where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IndexerKeys {
    /// Contiguous rows, shared by all queries.
    Rows {
        /// Number of rows.
        rows: usize,
        /// Whether each query has a start and an end row;
        /// otherwise all rows are visible.
        ranges: bool,
    },
    /// Paged keys: sequences with equally many queries, a
    /// block table and lengths. Query `i` of `each` attends to
    /// keys `j ≤ length − each + i`.
    Pages {
        /// Sequences.
        sequences: usize,
        /// Queries of each sequence.
        each: usize,
        /// Pages of the cache.
        pages: usize,
        /// Rows of a page.
        page_size: usize,
        /// Columns of the block table: maximum pages of a sequence.
        width: usize,
    },
}

impl IndexerKeys {
    /// Maximum visible keys of a query.
    pub const fn most(self) -> usize {
        match self {
            IndexerKeys::Rows { rows, .. } => rows,
            IndexerKeys::Pages { page_size, width, .. } => page_size.saturating_mul(width),
        }
    }

    /// Page geometry; without pages, all rows are one page.
    pub const fn paging(self) -> Paging {
        match self {
            IndexerKeys::Rows { rows, .. } => Paging { pages: 1, page_size: rows, width: 0 },
            IndexerKeys::Pages { pages, page_size, width, .. } => Paging { pages, page_size, width },
        }
    }
}

/// Layout of keys: feature `i` of row `r` of page `p`
/// is element `p · page_stride + r · row_stride + i`;
/// its scale is element `p · scale_page_stride + r`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IndexerRows {
    /// Page stride in elements; unused without pages.
    pub page_stride: u64,
    /// Row stride in elements.
    pub row_stride: u64,
    /// Scales between pages; unused without pages.
    pub scale_page_stride: u64,
    /// Whether rows are 16-byte aligned.
    pub aligned: bool,
}

/// The result: scores or top-k.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IndexerResult {
    /// Scores of all keys: f32 `[queries][most_keys]`
    /// ([`CheckedIndexer::most_keys`]).
    Scores {
        /// Elements between queries.
        row_stride: u64,
    },
    /// Keys with the highest scores: i32 `[queries][count]`.
    Best {
        /// Keys for each query.
        count: usize,
    },
}

/// Indexer scores or top-k keys; validated by the API.
///
/// The score of key `n` for query `m` is
/// `k_scale[n] · Σ_h weight[m, h] · q_scale[m, h] · ReLU(q[m, h] · k[n])`,
/// with scales for E4M3 only. NaN stays
/// NaN. Masked keys have a score of −∞.
///
/// Top-k picks keys as if sorted by descending score, then by
/// index, with NaN last; both zeros are equal. Queries with fewer
/// visible keys are padded with −1. Indices are row numbers, or
/// positions in the sequence for paged keys. Invalid pages have no
/// keys. Ranges and lengths are clamped to the existing keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CheckedIndexer {
    /// Queries; at least 1.
    pub queries: usize,
    /// Heads of each; at least 1.
    pub heads: usize,
    /// Features of a head and of a key.
    pub features: usize,
    /// Format of queries and keys: one of [`FORMATS`].
    pub format: KvFormat,
    /// Keys.
    pub keys: IndexerKeys,
    /// Queries: `token_stride` between queries.
    pub q: HeadRows,
    /// Whether each query head has a scale: f32 `[queries][heads]`.
    pub q_scales: bool,
    /// Stride of the f32 weights between queries.
    pub weights_stride: u64,
    /// Layout of the keys.
    pub k: IndexerRows,
    /// Scores or top-k.
    pub result: IndexerResult,
}

operands! {
    /// Operands of `indexer`.
    pub enum IndexerOperand {
        /// Queries.
        Q: "the queries" Read,
        /// Keys.
        K: "the keys" Read,
        /// Weight of each query head: f32.
        Weights: "the weights" Read,
        /// Scale of each query head: f32.
        QScales: "the scales of the queries" Read,
        /// Scale of each key: f32.
        KScales: "the scales of the keys" Read,
        /// First visible row of each query: u32.
        Starts: "the starts" Read,
        /// End of the visible rows of each query: u32.
        Ends: "the ends" Read,
        /// Key count of each sequence: u32.
        Lengths: "the lengths" Read,
        /// Page numbers of each sequence: u32.
        BlockTable: "the block table" Read,
        /// Scores: f32.
        Scores: "the scores" Write,
        /// Keys with the highest scores: i32.
        Indices: "the indices" Write,
        /// Scores of a part of the queries.
        Workspace: "the workspace" Accumulate,
    }
}

axis! {
    /// Kernel step of `indexer`.
    pub enum IndexerStep: "step of an indexer" {
        /// Scores and top-k.
        Index: "index",
        /// Scores.
        Score: "score",
        /// Scores, of which those above a threshold are gathered.
        Gather: "gather",
        /// Thresholds of gathering.
        Bound: "bound",
        /// Top-k over all scores.
        Choose: "choose",
        /// Top-k over gathered scores.
        ChooseGathered: "choose_gathered",
    }
}

spec! {
    /// Kernel identity keys of `indexer`.
    pub struct IndexerSpec {
        /// Kernel step.
        step: IndexerStep,
        /// Format of queries and keys.
        x: KvFormat,
        /// Maximum features.
        features: u32,
        /// Maximum heads; 0 for any number.
        heads: u32,
        /// Groups of query columns in a CTA; 0 when queries
        /// are streamed.
        groups: u32,
        /// Key tile of a CTA.
        keys: u32,
    }
}

impl IndexerSpec {
    /// Keys of a kernel for any number of heads.
    pub const fn of(step: IndexerStep, x: KvFormat, features: u32, keys: u32) -> Self {
        Self { step, x, features, heads: 0, groups: 0, keys }
    }
}

/// Candidate kernels of a family, with what the
/// scheduler ranks them by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexerConfig {
    /// The scoring kernel.
    pub kernel: KernelId,
    /// Kernel launches of a run.
    pub launches: u32,
    /// Queries whose scores are in the workspace at a time; all
    /// queries when no scores are.
    pub part_queries: usize,
    /// Workspace bytes; 0 when none is needed.
    pub workspace_bytes: usize,
    /// Arithmetic of the inner loop.
    pub math: Math,
    /// Computed heads and features, padding included, divided by the real ones.
    pub padding: f64,
    /// Reached shares of the device's bandwidth and arithmetic rate, per mille.
    pub efficiency: (u32, u32),
}

/// A config with its estimated time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexerLaunch {
    /// The config.
    pub config: IndexerConfig,
    /// Estimated seconds.
    pub estimate: f64,
}

impl CheckedIndexer {
    /// Maximum visible keys of a query: columns of its scores.
    pub fn most_keys(&self) -> usize {
        self.keys.most()
    }

    /// Sequences, and queries of each.
    pub fn sequences(&self) -> (usize, usize) {
        match self.keys {
            IndexerKeys::Rows { .. } => (1, self.queries),
            IndexerKeys::Pages { sequences, each, .. } => (sequences, each),
        }
    }

    /// Page geometry; without pages, all rows are one page.
    pub fn paging(&self) -> Paging {
        self.keys.paging()
    }

    /// Whether keys have scales; queries may have some then.
    pub fn has_scales(&self) -> bool {
        self.format.has_factors()
    }

    /// Keys chosen for each query (top-k); 0 when scores are written.
    pub fn chosen(&self) -> usize {
        match self.result {
            IndexerResult::Scores { .. } => 0,
            IndexerResult::Best { count } => count,
        }
    }

    /// Queries whose scores are kept in the workspace at a
    /// time for top-k: at most `most_bytes` if possible, and
    /// whole sequences for paged keys.
    pub fn part_queries(&self, most_bytes: usize) -> usize {
        let (_, each) = self.sequences();
        let unit = if matches!(self.keys, IndexerKeys::Pages { .. }) { each.max(1) } else { 1 };
        let row = (self.kept_stride() * size_of::<f32>()).max(1);
        let few = (SCORE_BYTES / row).max(self.queries.div_ceil(MOST_PARTS)).min(most_bytes / row);
        few.max(1).next_multiple_of(unit).min(self.queries)
    }

    /// Row stride of scores in the workspace: rows are 16-byte aligned.
    pub fn kept_stride(&self) -> usize {
        self.most_keys().next_multiple_of(4)
    }

    /// Minimum bytes read: queries, weights, and keys with their scales.
    pub fn read_bytes(&self) -> f64 {
        let (queries, heads, features) = (self.queries as f64, self.heads as f64, self.features as f64);
        let width = self.format.bits() as f64 / 8.0;
        let (sequences, _) = self.sequences();
        let keys = sequences as f64 * self.most_keys() as f64;
        let scale = if self.has_scales() { 4.0 } else { 0.0 };
        queries * heads * (features * width + 4.0) + keys * (features * width + scale)
    }

    /// Workspace bytes for the scores of `queries` queries.
    pub fn score_bytes(&self, queries: usize) -> usize {
        WorkspaceLayout::RESERVED + queries * self.kept_stride() * size_of::<f32>()
    }
}

impl Operation for CheckedIndexer {
    type Operand = IndexerOperand;
    type Config = IndexerConfig;
    type Plan = IndexerLaunch;
    const WORKSPACE: Option<IndexerOperand> = Some(IndexerOperand::Workspace);

    fn operands(&self) -> Vec<IndexerOperand> {
        use IndexerOperand as O;
        let paged = matches!(self.keys, IndexerKeys::Pages { .. });
        let ranges = matches!(self.keys, IndexerKeys::Rows { ranges: true, .. });
        let writes_scores = matches!(self.result, IndexerResult::Scores { .. });
        let optional = [
            (true, O::Q),
            (true, O::K),
            (true, O::Weights),
            (self.q_scales, O::QScales),
            (self.has_scales(), O::KScales),
            (ranges, O::Starts),
            (ranges, O::Ends),
            (paged, O::Lengths),
            (paged, O::BlockTable),
            (writes_scores, O::Scores),
            (!writes_scores, O::Indices),
        ];
        optional.into_iter().filter(|(is_given, _)| *is_given).map(|(_, operand)| operand).collect()
    }

    fn traffic(&self) -> f64 {
        let columns = match self.result {
            IndexerResult::Scores { .. } => self.most_keys(),
            IndexerResult::Best { count } => count,
        };
        self.read_bytes() + 4.0 * self.queries as f64 * columns as f64
    }

    fn macs(&self) -> f64 {
        self.queries as f64 * self.heads as f64 * self.features as f64 * self.most_keys() as f64
    }

    fn describe(&self) -> String {
        let Self { queries, heads, features, format, .. } = self;
        let result = match self.result {
            IndexerResult::Scores { .. } => "scores".to_owned(),
            IndexerResult::Best { count } => format!("the best {count}"),
        };
        let keys = self.most_keys();
        format!("{result} of {keys} keys for {queries} queries, {heads} heads of {features} features in {format}")
    }

    fn is_nothing(&self) -> bool {
        let columns = match self.result {
            IndexerResult::Scores { .. } => self.most_keys(),
            IndexerResult::Best { count } => count,
        };
        self.queries == 0 || columns == 0
    }

    fn config(plan: &IndexerLaunch) -> &IndexerConfig {
        &plan.config
    }

    fn estimate(plan: &IndexerLaunch) -> f64 {
        plan.estimate
    }

    fn kernel_id(&self, plan: &IndexerLaunch) -> KernelId {
        plan.config.kernel
    }

    fn math(plan: &IndexerLaunch) -> Option<Math> {
        Some(plan.config.math)
    }

    fn matrix_type(&self) -> Option<DType> {
        match self.format {
            KvFormat::Plain(DType::F32) => None,
            KvFormat::Plain(dtype) => Some(dtype),
            _ => Some(DType::F16),
        }
    }

    fn workspace_bytes(&self, plan: &IndexerLaunch) -> usize {
        plan.config.workspace_bytes
    }

    fn noop_config(&self) -> Result<IndexerConfig, Unsupported> {
        let spec = IndexerSpec::of(IndexerStep::Index, self.format, self.features as u32, 1);
        Ok(IndexerConfig {
            kernel: KernelId::new("noop", None, Spec::Indexer(spec)),
            launches: 1,
            part_queries: self.queries,
            workspace_bytes: 0,
            math: Math::FmaF32,
            padding: 1.0,
            efficiency: (1000, 1000),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(queries: usize, keys: IndexerKeys) -> CheckedIndexer {
        CheckedIndexer {
            queries,
            heads: 64,
            features: 128,
            format: KvFormat::E4M3,
            keys,
            q: HeadRows { token_stride: 8192, head_stride: 128, aligned: true },
            q_scales: false,
            weights_stride: 64,
            k: IndexerRows { page_stride: 0, row_stride: 128, scale_page_stride: 0, aligned: true },
            result: IndexerResult::Best { count: 2048 },
        }
    }

    #[test]
    fn scores_that_are_kept_are_bounded_and_whole_sequences() {
        let rows = |rows| IndexerKeys::Rows { rows, ranges: true };
        assert_eq!(op(2048, rows(1 << 16)).part_queries(usize::MAX), 512);
        assert_eq!(op(10, rows(64)).part_queries(usize::MAX), 10);
        assert_eq!(op(10, rows(0)).part_queries(usize::MAX), 10);
        // Prefer more scores at a time over very many launches.
        assert_eq!(op(1 << 20, rows(1 << 17)).part_queries(usize::MAX), 1 << 14);
        assert_eq!(op(1 << 20, rows(1 << 17)).part_queries(1 << 20), 2);
        let pages = IndexerKeys::Pages { sequences: 700, each: 3, pages: 9, page_size: 64, width: 1024 };
        assert_eq!(op(2100, pages).part_queries(usize::MAX), 513);
    }
}
