//! Indexer problem: the builder [`Indexer`] and its validation
//! into a [`CheckedIndexer`].

use qgemm_hal::op::indexer::{FEATURE_STEP, FORMATS, MOST_CHOSEN, MOST_FEATURES};
use qgemm_hal::{CheckedIndexer, HeadRows, IndexerKeys, IndexerResult, IndexerRows, KvFormat, KvRows, Paging};

use crate::attention::{HeadsOf, MOST_HEADS, check_count};
use crate::error::Error;
use crate::operand::WIDE_ACCESS;

/// Limit of queries, keys, pages and rows per page. Kernels add two of them in 32 bits.
const MOST: usize = i32::MAX as usize;

/// Sparse-attention indexer of DeepSeek-V3.2: scores of keys, or the top-k keys, per
/// query; for [`Context::plan_indexer`].
///
/// The score of key `n` for query `m` is `k_scale[n] · Σ_h weight[m, h] · q_scale[m,
/// h] · ReLU(q[m, h] · k[n])`, in f32. E4M3 has the scales. If the weights include
/// the query scales, none are given. ReLU keeps NaN.
///
/// ```
/// use qgemm_api::half::f16;
/// use qgemm_api::{Context, DType, Indexer, IndexerArgs, KvFormat};
///
/// // The best of two keys for one query of one head with 16 features.
/// let ctx = Context::open("cpu")?;
/// let plan = ctx.plan_indexer(&Indexer::new(KvFormat::Plain(DType::F16), 1, 1, 16, 2).best(1))?;
/// let mut workspace = ctx.workspace(plan.workspace_bytes())?;
/// let (q, weights) = (ctx.upload(&[f16::ONE; 16])?, ctx.upload(&[1.0f32])?);
/// let k = ctx.upload(&[[f16::ONE; 16], [f16::from_f32(2.0); 16]].concat())?;
/// let mut best = ctx.allocate(4)?;
/// let mut args = IndexerArgs::new(&q, &k, &weights, &mut best);
/// args.workspace = Some(&mut workspace);
/// plan.run(&ctx.default_stream(), args)?;
/// assert_eq!(ctx.download::<u32>(&best)?, [1]);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
///
/// [`Context::plan_indexer`]: crate::Context::plan_indexer
#[derive(Clone, Debug)]
pub struct Indexer {
    format: KvFormat,
    queries: usize,
    heads: usize,
    features: usize,
    keys: IndexerKeys,
    q_scales: bool,
    best: Option<usize>,
    q: Option<[u64; 2]>,
    weights_stride: Option<u64>,
    k_row: Option<u64>,
    k_page: Option<u64>,
    scale_page: Option<u64>,
    scores_stride: Option<u64>,
    alignment: usize,
}

impl Indexer {
    /// Formats of queries and keys.
    pub const FORMATS: [KvFormat; 3] = FORMATS;
    /// Maximum k of top-k.
    pub const MOST_CHOSEN: usize = MOST_CHOSEN;

    /// Indexer over `queries` queries `[queries, heads, features]` and `keys` shared
    /// keys `[keys, features]`.
    ///
    /// Both are in `format`: E4M3, f16 or bf16. Every key is visible to every query, unless
    /// a [range](Self::ranges) restricts it.
    pub fn new(format: KvFormat, queries: usize, heads: usize, features: usize, keys: usize) -> Self {
        Self {
            format,
            queries,
            heads,
            features,
            keys: IndexerKeys::Rows { rows: keys, ranges: false },
            q_scales: false,
            best: None,
            q: None,
            weights_stride: None,
            k_row: None,
            k_page: None,
            scale_page: None,
            scores_stride: None,
            alignment: WIDE_ACCESS,
        }
    }

    /// Visible key range per query: from `starts[m]` to before
    /// `ends[m]`, u32 in device memory.
    ///
    /// See [`IndexerArgs::starts`](crate::IndexerArgs::starts) and
    /// [`IndexerArgs::ends`](crate::IndexerArgs::ends). Other keys have a score of −∞ and
    /// are never selected; their contents do not matter. Unused with [pages](Self::paged).
    pub fn ranges(mut self) -> Self {
        if let IndexerKeys::Rows { ranges, .. } = &mut self.keys {
            *ranges = true;
        }
        self
    }

    /// Paged keys: `pages` pages of `page_size`, `[pages, page_size, features]`.
    /// Each of `sequences` sequences has an equal share of queries.
    ///
    /// A run takes a block table of `width` u32 per sequence
    /// ([`IndexerArgs::block_table`](crate::IndexerArgs::block_table)) and the number
    /// of keys per sequence ([`IndexerArgs::lengths`](crate::IndexerArgs::lengths)), both
    /// in device memory. Keys `j ≤ length − q_len + i` are visible to query `i` of `q_len`.
    /// Keys of invalid page numbers are masked.
    pub fn paged(mut self, sequences: usize, pages: usize, page_size: usize, width: usize) -> Self {
        let each = self.queries.checked_div(sequences).unwrap_or(0);
        self.keys = IndexerKeys::Pages { sequences, each, pages, page_size, width };
        self
    }

    /// Query scales per head, f32 `[queries, heads]`
    /// ([`IndexerArgs::q_scales`](crate::IndexerArgs::q_scales)).
    pub fn q_scales(mut self) -> Self {
        self.q_scales = true;
        self
    }

    /// Top-k instead of scores: the `count` keys with the highest scores per
    /// query, i32 `[queries, count]`.
    ///
    /// Result and order are exactly those of sorting the scores: highest first, equal
    /// scores (also ±0) by index, NaN last. Missing entries are −1. A key is its row or,
    /// with [pages](Self::paged), its position in the sequence.
    pub fn best(mut self, count: usize) -> Self {
        self.best = Some(count);
        self
    }

    /// Query and head strides of Q, in elements.
    pub fn q_strides(mut self, query: u64, head: u64) -> Self {
        self.q = Some([query, head]);
        self
    }

    /// Query stride of the weights, in elements.
    pub fn weights_stride(mut self, query: u64) -> Self {
        self.weights_stride = Some(query);
        self
    }

    /// Key stride in elements.
    pub fn k_stride(mut self, key: u64) -> Self {
        self.k_row = Some(key);
        self
    }

    /// Page strides: elements of keys, and scales.
    ///
    /// vLLM's indexer cache stores the scales of a page after its keys. Its page stride is
    /// `page_size · (features + 4)` E4M3 elements, and a quarter of that in scales.
    pub fn page_strides(mut self, elements: u64, scales: u64) -> Self {
        (self.k_page, self.scale_page) = (Some(elements), Some(scales));
        self
    }

    /// Query stride of the scores, in elements.
    pub fn scores_stride(mut self, query: u64) -> Self {
        self.scores_stride = Some(query);
        self
    }

    /// Alignment of the addresses of queries and keys in every run,
    /// in bytes. 16 by default.
    pub fn alignment(mut self, bytes: usize) -> Self {
        self.alignment = bytes;
        self
    }

    /// Validates everything that is independent of a run's buffers.
    pub(crate) fn check(&self) -> Result<CheckedIndexer, Error> {
        let &Self { format, queries, heads, features, keys, .. } = self;
        if !FORMATS.contains(&format) {
            return Err(Error::IndexerFormat { got: format });
        }
        check_count("queries", queries, 0, MOST)?;
        check_count("heads", heads, 1, MOST_HEADS)?;
        if features == 0 || features > MOST_FEATURES || !features.is_multiple_of(FEATURE_STEP) {
            let name = "features of a query";
            return Err(Error::HeadDim { name, step: FEATURE_STEP, most: MOST_FEATURES, got: features });
        }
        if let IndexerKeys::Pages { sequences, each, pages, page_size, width } = keys {
            if sequences.checked_mul(each) != Some(queries) {
                return Err(Error::QueriesNotShared { queries, sequences });
            }
            check_count("pages", pages, 0, MOST)?;
            check_count("rows of a page", page_size, 1, MOST)?;
            check_count("pages of a sequence", width, 0, MOST)?;
            check_count("entries of the block table", sequences.saturating_mul(width), 0, MOST)?;
        }
        let most_keys = keys.most();
        check_count("keys", most_keys, 0, MOST)?;
        let stride = |operand, given: Option<u64>, columns: usize| {
            let (got, expected) = (given.unwrap_or(columns as u64), columns as u64);
            if got < expected { Err(Error::StrideTooSmall { operand, expected, got }) } else { Ok(got) }
        };
        let [q_token, q_head] = self.q.unwrap_or([(heads * features) as u64, features as u64]);
        let q: HeadRows = self.rows("q", heads).check([0, q_token, q_head], [1, queries], self.alignment)?.rows;
        let op = CheckedIndexer {
            queries,
            heads,
            features,
            format,
            keys,
            q,
            q_scales: self.q_scales,
            weights_stride: stride("weights", self.weights_stride, heads)?,
            k: self.k_rows(keys)?,
            result: match self.best {
                Some(count) => IndexerResult::Best { count },
                None => IndexerResult::Scores { row_stride: stride("scores", self.scores_stride, most_keys)? },
            },
        };
        check_count("keys to choose", op.chosen(), 0, MOST_CHOSEN)?;
        let words = [("weights", op.weights_stride), ("scores", self.scores_stride.unwrap_or(most_keys as u64))];
        for (operand, row_stride) in words {
            let bytes = row_stride.checked_mul(queries as u64).and_then(|words| words.checked_mul(4));
            if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
                return Err(Error::ExtentOverflow { operand, rows: queries as u64, row_stride });
            }
        }
        Ok(op)
    }

    fn rows(&self, name: &'static str, heads: usize) -> HeadsOf {
        HeadsOf { name, heads, columns: self.features, format: self.format, vector: WIDE_ACCESS }
    }

    fn k_rows(&self, keys: IndexerKeys) -> Result<IndexerRows, Error> {
        let Paging { pages, page_size, .. } = keys.paging();
        let row = self.k_row.unwrap_or(self.features as u64);
        let page = self.k_page.unwrap_or(row.saturating_mul(page_size as u64));
        let KvRows { page_stride, rows } =
            self.rows("k", 1).check([page, row, 0], [pages, page_size], self.alignment)?;
        let scales = self.scale_page.unwrap_or(page_size as u64);
        let words = scales.checked_mul(pages as u64).and_then(|words| words.checked_add(page_size as u64));
        if words.and_then(|words| words.checked_mul(4)).is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(Error::ExtentOverflow { operand: "k scales", rows: pages as u64, row_stride: scales });
        }
        Ok(IndexerRows {
            page_stride,
            row_stride: rows.token_stride,
            scale_page_stride: if pages > 1 { scales } else { 0 },
            aligned: rows.aligned,
        })
    }
}

/// Names of the formats, for errors.
pub(crate) fn format_names() -> String {
    FORMATS.map(|format: KvFormat| format.to_string()).join(", ")
}

#[cfg(test)]
mod tests {
    use qgemm_formats::DType;

    use super::*;

    fn e4m3() -> Indexer {
        Indexer::new(KvFormat::E4M3, 6, 64, 128, 100)
    }

    #[test]
    fn what_cannot_be_is_refused_with_what_was_expected() {
        let text = |indexer: Indexer| indexer.check().expect_err("not valid").to_string();
        let f32 = Indexer::new(KvFormat::Plain(DType::F32), 1, 1, 16, 1);
        assert!(text(f32).contains("expected one of e4m3, f16, bf16"));
        assert!(text(Indexer::new(KvFormat::E4M3, 1, 1, 24, 1)).contains("multiple of 16 from 16 to 256"));
        assert!(text(e4m3().best(2049)).contains("keys to choose = 2049"));
        assert!(text(e4m3().paged(4, 9, 64, 2)).contains("6 queries"));
        assert!(text(e4m3().paged(2, 9, 1 << 20, 1 << 20)).contains("keys = "));
        assert!(text(e4m3().weights_stride(63)).contains("weights"));
        assert!(text(e4m3().scores_stride(99)).contains("scores"));
        assert!(text(e4m3().page_strides(u64::MAX, u64::MAX).paged(2, 9, 64, 2)).contains("k"));
    }

    #[test]
    fn a_page_may_hold_its_scales_behind_its_keys() {
        let vllm = e4m3().paged(2, 9, 64, 2).page_strides(64 * 132, 64 * 33).check().expect("it is valid");
        let IndexerRows { page_stride, row_stride, scale_page_stride, aligned } = vllm.k;
        assert_eq!((page_stride, row_stride, scale_page_stride, aligned), (8448, 128, 2112, true));
        assert_eq!((vllm.most_keys(), vllm.sequences()), (128, (2, 3)));
    }
}
