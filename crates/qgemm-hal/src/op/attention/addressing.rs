//! Addressing of queries, keys and values: layouts of rows, lengths of sequences, pages and mask rows.

/// Layout of heads: feature `i` of head `h` of token `t`
/// is element `t · token_stride + h · head_stride + i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadRows {
    /// Token stride in elements.
    pub token_stride: u64,
    /// Head stride in elements.
    pub head_stride: u64,
    /// Whether kernels may use vector loads: each group of
    /// eight features is aligned.
    pub aligned: bool,
}

impl HeadRows {
    /// Whether no two (token, head) rows overlap.
    pub fn is_injective(&self, tokens: usize, heads: usize, columns: usize) -> bool {
        let (tokens, heads, columns) = (tokens as u128, heads as u128, columns as u128);
        let (token, head) = (u128::from(self.token_stride), u128::from(self.head_stride));
        let apart = |outer: u128, outers: u128, inner: u128, inners: u128| {
            (inners <= 1 || inner >= columns) && (outers <= 1 || outer >= (inners.max(1) - 1) * inner + columns)
        };
        apart(token, tokens, head, heads) || apart(head, heads, token, tokens)
    }
}

/// Layout of keys or values: [`HeadRows`] for
/// the tokens of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvRows {
    /// Page stride in elements; unused without pages.
    pub page_stride: u64,
    /// Layout of the tokens of a page, or of all
    /// tokens without pages.
    pub rows: HeadRows,
}

/// Query tokens of each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QueryLengths {
    /// Equal number for each sequence.
    Each(usize),
    /// Ranges between consecutive offsets.
    Offsets {
        /// Maximum queries of a sequence. Further queries are not computed.
        most: usize,
    },
}

/// Addressing of keys of each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvAddressing {
    /// Ranges between consecutive offsets.
    Offsets {
        /// Total rows.
        rows: usize,
    },
    /// One page for each sequence.
    Pages {
        /// Rows of a page.
        capacity: usize,
        /// Whether lengths are given; otherwise all pages are full.
        lengths: bool,
    },
    /// Pages of a paged KV cache, found through a block
    /// table. Lengths are given.
    Table {
        /// Pages of the cache.
        pages: usize,
        /// Rows of a page.
        page_size: usize,
        /// Columns of the block table: maximum pages of a sequence.
        width: usize,
    },
}

/// Bit mask in device memory: a set bit means that the
/// query attends to the key.
///
/// A row is [`MaskBits::words`] little-endian u32. Key
/// `j` is bit `j % 32` of word `j / 32`;
/// bits after the last key are ignored. Rows are
/// contiguous, in one of two forms:
///
/// - [`MaskBits::of_tokens`]: one row for each query token of all
///   sequences, in the order of Q;
/// - [`MaskBits::shared`]: one row for each query of a
///   sequence, shared by all sequences.
///
/// All heads share the rows unless [`MaskBits::per_head`], which stores the
/// rows of one head after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MaskBits {
    /// Whether all sequences share the rows.
    pub is_shared: bool,
    /// Whether each query head has separate rows.
    pub is_per_head: bool,
}

impl MaskBits {
    /// Keys in a word.
    pub const WORD_KEYS: usize = 32;

    /// One row for each query token: `[tokens][words]`.
    pub const fn of_tokens() -> Self {
        Self { is_shared: false, is_per_head: false }
    }

    /// One row for each query of a sequence, shared by all
    /// sequences: `[max queries][words]`.
    pub const fn shared() -> Self {
        Self { is_shared: true, is_per_head: false }
    }

    /// Separate rows for each query head: `[heads][rows][words]`.
    pub const fn per_head(self) -> Self {
        Self { is_per_head: true, ..self }
    }

    /// Words of a row for at most `most_keys` keys.
    pub const fn words(most_keys: usize) -> usize {
        most_keys.div_ceil(Self::WORD_KEYS)
    }

    /// Rows of one head.
    pub fn rows(&self, addressing: &Addressing) -> usize {
        if self.is_shared { addressing.most_queries() } else { addressing.tokens }
    }

    /// Total words; `None` when the count overflows.
    pub fn all_words(&self, addressing: &Addressing, heads: usize) -> Option<usize> {
        let rows = self.rows(addressing).checked_mul(if self.is_per_head { heads } else { 1 })?;
        rows.checked_mul(Self::words(addressing.most_keys))
    }
}

/// Sequence layout: the queries and keys of each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Addressing {
    /// Sequences; at least 1.
    pub sequences: usize,
    /// Query tokens of all sequences; at least 1.
    pub tokens: usize,
    /// Query tokens of each sequence.
    pub queries: QueryLengths,
    /// Maximum keys of a sequence.
    pub most_keys: usize,
    /// Addressing of keys.
    pub places: KvAddressing,
    /// Whether indices and the keys of earlier tokens were written
    /// before the launch ahead began. Kernels may read them while
    /// it still runs.
    pub keys_ready: bool,
}

impl Addressing {
    /// Maximum query tokens of a sequence.
    pub fn most_queries(&self) -> usize {
        match self.queries {
            QueryLengths::Each(count) | QueryLengths::Offsets { most: count } => count,
        }
    }

    /// Page geometry for finding keys.
    pub fn paging(&self) -> Paging {
        match self.places {
            KvAddressing::Offsets { rows } => Paging { pages: 1, page_size: rows, width: 0 },
            KvAddressing::Pages { capacity, .. } => Paging { pages: self.sequences, page_size: capacity, width: 0 },
            KvAddressing::Table { pages, page_size, width } => Paging { pages, page_size, width },
        }
    }
}

/// Page geometry of the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paging {
    /// Pages.
    pub pages: usize,
    /// Rows of a page.
    pub page_size: usize,
    /// Columns of the block table; 0 without a table.
    pub width: usize,
}
