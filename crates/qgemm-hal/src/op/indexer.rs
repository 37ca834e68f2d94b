//! `indexer`: how well keys match queries of several heads, weighed and added up, and which keys match best: the sparse indexer of DeepSeek.

use qgemm_formats::DType;

use super::attention::{HeadRows, KvFormat, Paging};
use super::gemm::WorkspaceLayout;
use super::{Operation, operands};
use crate::caps::Math;
use crate::kernel_id::{KernelId, Name, spec};

/// Numbers of features are multiples of this.
pub const FEATURE_STEP: usize = 16;
/// Most features of a query's head and a key.
pub const MOST_FEATURES: usize = 256;
/// Most keys that are chosen for a query.
pub const MOST_CHOSEN: usize = 2048;
/// Formats of queries and keys.
pub const FORMATS: [KvFormat; 3] = [KvFormat::E4M3, KvFormat::Plain(DType::F16), KvFormat::Plain(DType::BF16)];

/// Bytes of scores that are kept at a time where keys are chosen: of so many queries that each multiprocessor has several to choose for.
const SCORE_BYTES: usize = 128 << 20;
/// Most parts that queries are cut into, to keep fewer scores: each is two launches.
const MOST_PARTS: usize = 64;

/// Which keys each query sees, and where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum IndexerKeys {
    /// Rows that all queries share.
    Rows {
        /// Their number.
        rows: usize,
        /// Whether each query has a first row and an end; else it sees all.
        ranges: bool,
    },
    /// Sequences of equally many queries, whose keys lie in pages that a table names; lengths are given. Query `i` of `each` sees the keys
    /// `j ≤ length − each + i`.
    Pages {
        /// Sequences.
        sequences: usize,
        /// Queries of each.
        each: usize,
        /// Pages of the cache.
        pages: usize,
        /// Rows of a page.
        page_size: usize,
        /// Pages of a row of the table, which is a sequence.
        width: usize,
    },
}

impl IndexerKeys {
    /// Most keys that a query sees.
    pub const fn most(self) -> usize {
        match self {
            IndexerKeys::Rows { rows, .. } => rows,
            IndexerKeys::Pages { page_size, width, .. } => page_size.saturating_mul(width),
        }
    }

    /// Pages and rows of each that the keys lie in, and pages of a row of the table; rows without pages are one.
    pub const fn paging(self) -> Paging {
        match self {
            IndexerKeys::Rows { rows, .. } => Paging { pages: 1, page_size: rows, width: 0 },
            IndexerKeys::Pages { pages, page_size, width, .. } => Paging { pages, page_size, width },
        }
    }
}

/// Where keys lie: feature `i` of row `r` of page `p` is element `p · page_stride + r · row_stride + i`, its scale element
/// `p · scale_page_stride + r` of the scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IndexerRows {
    /// Elements from one page to the next; of no meaning where there are no pages.
    pub page_stride: u64,
    /// Elements from one row to the next.
    pub row_stride: u64,
    /// Scales from one page to the next; of no meaning where there are no pages.
    pub scale_page_stride: u64,
    /// Whether rows begin at multiples of 16 bytes.
    pub aligned: bool,
}

/// What is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IndexerResult {
    /// The score of every key: f32, queries × [`CheckedIndexer::most_keys`].
    Scores {
        /// Elements from one query to the next.
        row_stride: u64,
    },
    /// Which keys have the highest scores: i32, queries × `count`.
    Best {
        /// Keys of a query.
        count: usize,
    },
}

/// Scores of keys, or the best of them; validated by the API.
///
/// The score of key `n` for query `m` is `k_scale[n] · Σ_h weight[m, h] · q_scale[m, h] · ReLU(q[m, h] · k[n])`, with the scales of E4M3; NaN
/// stays NaN. A key that a query does not see has a score of −∞. Those chosen are as if sorted by score, highest first, equal ones (both
/// zeros are) by index, NaN last; where a query sees fewer, −1 follows. A key of rows is named by its row, one of pages by its place in the
/// sequence; pages that are none have no keys. Ranges and lengths that lead beyond the keys end with them.
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
    /// Queries: `token_stride` from one to the next.
    pub q: HeadRows,
    /// Whether each head of a query has a scale: f32, queries × heads.
    pub q_scales: bool,
    /// Weights from one query to the next: f32.
    pub weights_stride: u64,
    /// Rows of keys.
    pub k: IndexerRows,
    /// Scores or the best keys.
    pub result: IndexerResult,
}

operands! {
    /// What `indexer` reads and writes.
    pub enum IndexerOperand {
        /// Queries.
        Q: "the queries" Read,
        /// Keys.
        K: "the keys" Read,
        /// What each head of a query is weighed with: f32.
        Weights: "the weights" Read,
        /// What each head of a query is multiplied with: f32.
        QScales: "the scales of the queries" Read,
        /// What each key is multiplied with: f32.
        KScales: "the scales of the keys" Read,
        /// First row that each query sees: u32.
        Starts: "the starts" Read,
        /// Where the rows that each query sees end: u32.
        Ends: "the ends" Read,
        /// How many keys each sequence has: u32.
        Lengths: "the lengths" Read,
        /// The pages of each sequence: u32.
        BlockTable: "the block table" Read,
        /// Scores: f32.
        Scores: "the scores" Write,
        /// Keys with the highest scores: i32.
        Indices: "the indices" Write,
        /// Scores of some queries.
        Workspace: "the workspace" Accumulate,
    }
}

spec! {
    /// What tells the kernels of `indexer` apart.
    pub struct IndexerSpec {
        /// What the kernel does: `score`, `choose` or both, `index`.
        step: Name,
        /// Format of queries and keys.
        x: KvFormat,
        /// Most features.
        features: u32,
        /// Keys of a CTA.
        keys: u32,
    }
}

/// The kernels of a family for one operation, as the scheduler sees them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexerConfig {
    /// The kernel that scores.
    pub kernel: KernelId,
    /// Kernels that a run launches.
    pub launches: u32,
    /// Queries whose scores are in the workspace at a time; all where there are none in it.
    pub part_queries: usize,
    /// Bytes of workspace; 0 where nothing is kept in it.
    pub workspace_bytes: usize,
    /// Arithmetic of the inner loop.
    pub math: Math,
    /// Heads and features with those that are computed for nothing, as a factor.
    pub padding: f64,
    /// Shares of the device's bandwidth and of its rate that it reaches, per mille.
    pub efficiency: (u32, u32),
}

/// A configuration with what the scheduler expects of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexerLaunch {
    /// The configuration.
    pub config: IndexerConfig,
    /// Seconds that it is expected to take.
    pub estimate: f64,
}

impl CheckedIndexer {
    /// Keys that a query sees at most: columns of its scores.
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

    /// Pages and rows of each that the keys lie in, and pages of a row of the table; rows without pages are one.
    pub fn paging(&self) -> Paging {
        self.keys.paging()
    }

    /// Whether queries and keys have scales: keys always then.
    pub fn has_scales(&self) -> bool {
        self.format.has_factors()
    }

    /// How many keys are chosen; 0 where scores are written.
    pub fn chosen(&self) -> usize {
        match self.result {
            IndexerResult::Scores { .. } => 0,
            IndexerResult::Best { count } => count,
        }
    }

    /// Queries whose scores are kept at a time where keys are chosen from scores in the workspace, of which there are at most `most_bytes`
    /// where that is possible: whole sequences, where there are several.
    pub fn part_queries(&self, most_bytes: usize) -> usize {
        let (_, each) = self.sequences();
        let unit = if matches!(self.keys, IndexerKeys::Pages { .. }) { each.max(1) } else { 1 };
        let row = (self.kept_stride() * size_of::<f32>()).max(1);
        let few = (SCORE_BYTES / row).max(self.queries.div_ceil(MOST_PARTS)).min(most_bytes / row);
        few.max(1).next_multiple_of(unit).min(self.queries)
    }

    /// Scores from one query to the next where they are kept in the workspace: rows begin at multiples of 16 bytes.
    pub fn kept_stride(&self) -> usize {
        self.most_keys().next_multiple_of(4)
    }

    /// Bytes that must be read: queries, weights, and keys with their scales.
    pub fn read_bytes(&self) -> f64 {
        let (queries, heads, features) = (self.queries as f64, self.heads as f64, self.features as f64);
        let width = self.format.bits() as f64 / 8.0;
        let (sequences, _) = self.sequences();
        let keys = sequences as f64 * self.most_keys() as f64;
        let scale = if self.has_scales() { 4.0 } else { 0.0 };
        queries * heads * (features * width + 4.0) + keys * (features * width + scale)
    }

    /// Bytes of workspace that hold the scores of so many queries.
    pub fn score_bytes(&self, queries: usize) -> usize {
        WorkspaceLayout::RESERVED + queries * self.kept_stride() * size_of::<f32>()
    }
}

impl Operation for CheckedIndexer {
    const NAME: &'static str = "indexer";
    type Operand = IndexerOperand;
    type Config = IndexerConfig;
    type Plan = IndexerLaunch;

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
        // Rather more scores than very many launches.
        assert_eq!(op(1 << 20, rows(1 << 17)).part_queries(usize::MAX), 1 << 14);
        assert_eq!(op(1 << 20, rows(1 << 17)).part_queries(1 << 20), 2);
        let pages = IndexerKeys::Pages { sequences: 700, each: 3, pages: 9, page_size: 64, width: 1024 };
        assert_eq!(op(2100, pages).part_queries(usize::MAX), 513);
    }
}
