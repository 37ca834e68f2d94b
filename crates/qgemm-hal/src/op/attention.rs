//! `attention`: softmax over the keys that a query sees, and the mean of their values that it weighs. Prefill and decode alike.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use qgemm_formats::formats::{q4_0, q8_0};
use qgemm_formats::{DType, ElementType};

use super::gemm::WorkspaceLayout;
use super::{Operation, operands};
use crate::caps::Math;
use crate::kernel_id::{KernelId, Name, spec};

/// Head dimensions are multiples of this.
pub const HEAD_DIM_STEP: usize = 8;
/// Largest head dimension.
pub const MOST_HEAD_DIM: usize = 256;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvFormat {
    /// Numbers as they are.
    Plain(DType),
    /// E4M3 numbers with one f32 factor a head.
    E4M3,
    /// Signed bytes with an f16 scale for every 32 features, which lie apart.
    Q8_0,
    /// Four bits less 8 with an f16 scale for every 32 features, which lie apart; neighbours share a byte, the first in the lower half.
    Q4_0,
}

/// Features that share a scale, in formats that have scales.
pub const KV_BLOCK: usize = 32;
/// The type of scales.
pub const KV_SCALES: DType = DType::F16;
/// Bytes of a scale.
pub const KV_SCALE_BYTES: usize = KV_SCALES.bytes();

impl KvFormat {
    /// Every format.
    pub const ALL: [KvFormat; 6] = [
        KvFormat::Plain(DType::F32),
        KvFormat::Plain(DType::F16),
        KvFormat::Plain(DType::BF16),
        KvFormat::E4M3,
        KvFormat::Q8_0,
        KvFormat::Q4_0,
    ];

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            KvFormat::Plain(dtype) => dtype.name(),
            KvFormat::E4M3 => "e4m3",
            KvFormat::Q8_0 => q8_0::Q8_0.name,
            KvFormat::Q4_0 => q4_0::Q4_0.name,
        }
    }

    /// The element type of memory that holds such keys or values.
    pub const fn element(self) -> ElementType {
        match self {
            KvFormat::Plain(dtype) => ElementType::Number(dtype),
            KvFormat::Q8_0 => ElementType::Int8,
            KvFormat::E4M3 | KvFormat::Q4_0 => ElementType::Bytes,
        }
    }

    /// Bits of a number, scales aside.
    pub const fn bits(self) -> usize {
        match self {
            KvFormat::Plain(dtype) => 8 * dtype.bytes(),
            KvFormat::E4M3 | KvFormat::Q8_0 => 8,
            KvFormat::Q4_0 => 4,
        }
    }

    /// Bytes of so many numbers: an even number of those that share bytes.
    pub const fn bytes_of(self, numbers: usize) -> usize {
        numbers * self.bits() / 8
    }

    /// What the first number's address is a multiple of.
    pub const fn width(self) -> usize {
        if self.bits() < 8 { 1 } else { self.bits() / 8 }
    }

    /// Whether blocks of [`KV_BLOCK`] features have scales.
    pub const fn has_scales(self) -> bool {
        matches!(self, KvFormat::Q8_0 | KvFormat::Q4_0)
    }

    /// What numbers of features and strides are multiples of.
    pub const fn step(self) -> usize {
        if self.has_scales() { KV_BLOCK } else { 1 }
    }

    /// Bytes of the scales of so many numbers.
    pub const fn scale_bytes_of(self, numbers: usize) -> usize {
        if self.has_scales() { numbers / KV_BLOCK * KV_SCALE_BYTES } else { 0 }
    }

    /// Whether numbers are as they are.
    pub const fn is_plain(self) -> bool {
        matches!(self, KvFormat::Plain(_))
    }

    /// Bytes of a feature on average, scales among them.
    pub fn mean_bytes(self) -> f64 {
        let scales = if self.has_scales() { KV_SCALE_BYTES as f64 / KV_BLOCK as f64 } else { 0.0 };
        self.bits() as f64 / 8.0 + scales
    }

    /// Whether heads have factors.
    pub const fn has_factors(self) -> bool {
        matches!(self, KvFormat::E4M3)
    }

    /// What eight neighbouring numbers begin at a multiple of where kernels load them at once: 16 bytes, or all eight if they are
    /// fewer.
    pub const fn vector_bytes(self) -> usize {
        let eight = self.bits();
        if eight < 16 { eight } else { 16 }
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for KvFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|format| format.name() == text);
        found.ok_or_else(|| format!("`{text}` is no format of keys and values"))
    }
}

/// Where heads of tokens lie: feature `i` of head `h` of token `t` is element `t · token_stride + h · head_stride + i`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadRows {
    /// Elements from one token to the next.
    pub token_stride: u64,
    /// Elements from one head to the next.
    pub head_stride: u64,
    /// Whether every eight features from a multiple of eight on begin where kernels load them at once.
    pub aligned: bool,
}

impl HeadRows {
    /// Whether no two heads of tokens share an element: tokens lie apart, or heads do.
    pub fn is_injective(&self, tokens: usize, heads: usize, columns: usize) -> bool {
        let (tokens, heads, columns) = (tokens as u128, heads as u128, columns as u128);
        let (token, head) = (u128::from(self.token_stride), u128::from(self.head_stride));
        let apart = |outer: u128, outers: u128, inner: u128, inners: u128| {
            (inners <= 1 || inner >= columns) && (outers <= 1 || outer >= (inners.max(1) - 1) * inner + columns)
        };
        apart(token, tokens, head, heads) || apart(head, heads, token, tokens)
    }
}

/// Where heads of keys or values lie: as [`HeadRows`], of the tokens of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvRows {
    /// Elements from one page to the next; of no meaning where there are no pages.
    pub page_stride: u64,
    /// The tokens of a page, or all.
    pub rows: HeadRows,
}

/// Which query tokens each sequence has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QueryLengths {
    /// Each as many.
    Each(usize),
    /// Those from one offset to the next, at most so many.
    Offsets {
        /// Most of one sequence; what a sequence has beyond them is not computed.
        most: usize,
    },
}

/// Which keys each sequence has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvPlaces {
    /// Rows from one offset to the next, of so many rows.
    Offsets {
        /// Rows of all sequences.
        rows: usize,
    },
    /// A page for each sequence.
    Pages {
        /// Rows of a page.
        capacity: usize,
        /// Whether lengths are given; else all pages are full.
        lengths: bool,
    },
    /// Pages of which a table tells those of each sequence; lengths are given.
    Table {
        /// Pages of the cache.
        pages: usize,
        /// Rows of a page.
        page_size: usize,
        /// Pages of a row of the table, which is a sequence.
        width: usize,
    },
}

/// A mask in device memory: a bit for every query and key, set where the query may see the key.
///
/// A row is [`MaskBits::words`] u32, little-endian: key `j` of the sequence is bit `j % 32` of word `j / 32`, bits behind the last key are of
/// no meaning. Rows lie without gaps, a row for each query token of all sequences ([`MaskBits::of_tokens`]), in the order of Q, or one for
/// each query of a sequence, the same for all of them ([`MaskBits::shared`]). All heads have the same rows unless it is
/// [`MaskBits::per_head`]; then all rows of a head follow those of the head before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MaskBits {
    /// Whether all sequences have the same rows.
    pub is_shared: bool,
    /// Whether each head of queries has rows of its own.
    pub is_per_head: bool,
}

impl MaskBits {
    /// Keys of a word.
    pub const WORD_KEYS: usize = 32;

    /// A row for each query token: `[tokens, words]`.
    pub const fn of_tokens() -> Self {
        Self { is_shared: false, is_per_head: false }
    }

    /// A row for each query of a sequence, the same for all sequences: `[most queries of a sequence, words]`.
    pub const fn shared() -> Self {
        Self { is_shared: true, is_per_head: false }
    }

    /// Such rows for each head of queries: `[heads, rows, words]`.
    pub const fn per_head(self) -> Self {
        Self { is_per_head: true, ..self }
    }

    /// Words of a row, for at most so many keys of a sequence.
    pub const fn words(most_keys: usize) -> usize {
        most_keys.div_ceil(Self::WORD_KEYS)
    }

    /// Rows of a head.
    pub fn rows(&self, addressing: &Addressing) -> usize {
        if self.is_shared { addressing.most_queries() } else { addressing.tokens }
    }

    /// Words of all rows; `None` when the count overflows.
    pub fn all_words(&self, addressing: &Addressing, heads: usize) -> Option<usize> {
        let rows = self.rows(addressing).checked_mul(if self.is_per_head { heads } else { 1 })?;
        rows.checked_mul(Self::words(addressing.most_keys))
    }
}

/// Sequences with the tokens and keys of each: what kernels find both by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Addressing {
    /// Sequences; at least 1.
    pub sequences: usize,
    /// Query tokens of all of them; at least 1.
    pub tokens: usize,
    /// How they are shared out.
    pub queries: QueryLengths,
    /// Most keys of a sequence.
    pub most_keys: usize,
    /// Where keys are.
    pub places: KvPlaces,
}

impl Addressing {
    /// Most query tokens of a sequence.
    pub fn most_queries(&self) -> usize {
        match self.queries {
            QueryLengths::Each(count) | QueryLengths::Offsets { most: count } => count,
        }
    }

    /// Pages and rows of each that the keys lie in, and pages of a row of the table: what kernels find keys by.
    pub fn paging(&self) -> Paging {
        match self.places {
            KvPlaces::Offsets { rows } => Paging { pages: 1, page_size: rows, width: 0 },
            KvPlaces::Pages { capacity, .. } => Paging { pages: self.sequences, page_size: capacity, width: 0 },
            KvPlaces::Table { pages, page_size, width } => Paging { pages, page_size, width },
        }
    }
}

/// Softmax attention; validated by the API.
///
/// A sequence has `q_len` queries and `kv_len` keys. Its query `i`, in head `h`, sees the keys `j < kv_len` of head
/// `h / (heads / kv_heads)`; if `causal` only `j ≤ kv_len − q_len + i`, with a window only the last `window` of those up to that
/// position, and with a mask only those of these whose bit is set. With `s_j = scale · (q · k_j)`, or `cap · tanh(s_j / cap)` of it with a soft cap, the result is
/// `Σ exp(s_j) v_j / Σ exp(s_j)`, and the log-sum-exp `ln Σ exp(s_j)`. Where no key is seen, or `s_j = −∞` for all of them, the
/// result is zeros and the log-sum-exp −∞. Keys that are not seen are not read, or play no part whatever they hold.
///
/// Lengths beyond [`CheckedAttention::most_keys`] are taken for that; offsets and page numbers that lead out of an operand stand for keys
/// or queries that are not there.
#[derive(Clone, Debug, PartialEq)]
pub struct CheckedAttention {
    /// Sequences; at least 1.
    pub sequences: usize,
    /// Query tokens of all of them; at least 1.
    pub tokens: usize,
    /// How they are shared out.
    pub queries: QueryLengths,
    /// Most keys of a sequence.
    pub most_keys: usize,
    /// Where keys are.
    pub places: KvPlaces,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; they divide the heads.
    pub kv_heads: usize,
    /// Features of a query and a key.
    pub qk_dim: usize,
    /// Features of a value.
    pub v_dim: usize,
    /// Element type of Q and D.
    pub dtype: DType,
    /// Format of K and V.
    pub kv: KvFormat,
    /// Q.
    pub q: HeadRows,
    /// K.
    pub k: KvRows,
    /// V.
    pub v: KvRows,
    /// D.
    pub d: HeadRows,
    /// Whether a query sees no later keys.
    pub causal: bool,
    /// How many keys a query sees at most, counted from its own position back.
    pub window: Option<usize>,
    /// Which of these keys a query sees, where bits say it.
    pub mask: Option<MaskBits>,
    /// Factor of products.
    pub scale: f32,
    /// What products are bounded by.
    pub soft_cap: Option<f32>,
    /// Whether the log-sum-exp is written: f32, tokens × heads.
    pub lse: bool,
    /// Whether the bits of a sequence may not depend on the others.
    pub batch_invariant: bool,
}

operands! {
    /// What `attention` reads and writes.
    pub enum AttentionOperand {
        /// Queries.
        Q: "the queries" Read,
        /// Keys.
        K: "the keys" Read,
        /// Values.
        V: "the values" Read,
        /// What each head of keys is multiplied with: f32.
        KFactors: "the factors of the keys" Read,
        /// What each head of values is multiplied with: f32.
        VFactors: "the factors of the values" Read,
        /// What each block of keys is multiplied with: f16.
        KScales: "the scales of the keys" Read,
        /// What each block of values is multiplied with: f16.
        VScales: "the scales of the values" Read,
        /// Where the query tokens of each sequence begin, and where the last end: u32.
        QOffsets: "the offsets of the queries" Read,
        /// Where the rows of keys of each sequence begin, and where the last end: u32.
        KvOffsets: "the offsets of the keys" Read,
        /// How many keys each sequence has: u32.
        KvLengths: "the lengths" Read,
        /// The pages of each sequence: u32.
        BlockTable: "the block table" Read,
        /// Which keys each query sees, a bit each: u32.
        Mask: "the mask" Read,
        /// The results.
        D: "d" Write,
        /// Log-sum-exp of each token and head: f32.
        Lse: "the log-sum-exp" Write,
        /// Counters, and partial results of parts of the keys.
        Workspace: "the workspace" Accumulate,
    }
}

spec! {
    /// What tells the kernels of `attention` apart.
    pub struct AttentionSpec {
        /// What the kernel does: `attend` or `combine`.
        step: Name,
        /// Format of keys and values.
        kv: KvFormat,
        /// Most features of queries and keys.
        qk: u32,
        /// Most features of values.
        v: u32,
        /// Queries, of one head or of all that share keys, of a CTA.
        rows: u32,
        /// Keys that are worked on together.
        keys: u32,
    }
}

/// The kernels of a family for one operation, as the scheduler sees them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionConfig {
    /// The kernel that attends.
    pub kernel: KernelId,
    /// Kernels that a run launches.
    pub launches: u32,
    /// Parts that the keys of a sequence are cut into at most.
    pub parts: u32,
    /// Keys of a part.
    pub part_keys: u32,
    /// Bytes of workspace; 0 where nothing is kept in it.
    pub workspace_bytes: usize,
    /// Arithmetic of the inner loop.
    pub math: Math,
    /// Rows of which one has a query: a tile that is not full takes as long as one that is.
    pub padding: f64,
    /// Shares of the device's bandwidth and of its rate that it reaches, per mille.
    pub efficiency: (u32, u32),
}

/// A configuration with what the scheduler expects of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionPlan {
    /// The configuration.
    pub config: AttentionConfig,
    /// Seconds that it is expected to take.
    pub estimate: f64,
}

impl CheckedAttention {
    /// Sequences with the tokens and keys of each.
    pub fn addressing(&self) -> Addressing {
        let &Self { sequences, tokens, queries, most_keys, places, .. } = self;
        Addressing { sequences, tokens, queries, most_keys, places }
    }

    /// Most query tokens of a sequence.
    pub fn most_queries(&self) -> usize {
        self.addressing().most_queries()
    }

    /// Heads that share keys and values.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Pages and rows of each that the keys lie in, and pages of a row of the table: what kernels find keys by.
    pub fn paging(&self) -> Paging {
        self.addressing().paging()
    }

    /// Words of the mask; 0 where there is none. The API found that their bytes fit the address space.
    pub fn mask_words(&self) -> usize {
        let words = |mask: MaskBits| mask.all_words(&self.addressing(), self.heads).unwrap_or(usize::MAX);
        self.mask.map_or(0, words)
    }

    /// Keys that a query sees on average, where all sequences are as long as they may be and all bits of a mask are set.
    fn keys_seen(&self) -> f64 {
        let (keys, queries) = (self.most_keys as f64, self.most_queries() as f64);
        let seen = if self.causal { (keys - queries.min(keys) / 2.0).max(keys / 2.0) } else { keys };
        self.window.map_or(seen, |window| seen.min(window as f64))
    }

    /// Bytes of workspace that hold counters, and `parts` partial results of every query of every head.
    pub fn partial_bytes(&self, parts: usize) -> usize {
        self.partial_bytes_of(parts, self.v_dim)
    }

    /// The same, where `v_dim` features of values have room.
    pub fn partial_bytes_of(&self, parts: usize, v_dim: usize) -> usize {
        WorkspaceLayout::RESERVED + self.tokens * self.heads * parts * (v_dim + 4) * size_of::<f32>()
    }
}

/// How rows of keys lie in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Paging {
    /// Pages.
    pub pages: usize,
    /// Rows of a page.
    pub page_size: usize,
    /// Pages of a row of the table; 0 where there is no table.
    pub width: usize,
}

/// Descriptions are keys of plans: factors are finite, and are told apart by their bits.
impl Eq for CheckedAttention {}

impl Hash for CheckedAttention {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.sequences, self.tokens, self.queries, self.most_keys, self.places).hash(state);
        (self.heads, self.kv_heads, self.qk_dim, self.v_dim, self.dtype, self.kv).hash(state);
        (self.q, self.k, self.v, self.d, self.causal, self.window, self.mask).hash(state);
        (self.scale.to_bits(), self.soft_cap.map(f32::to_bits), self.lse, self.batch_invariant).hash(state);
    }
}

impl Operation for CheckedAttention {
    const NAME: &'static str = "attention";
    type Operand = AttentionOperand;
    type Config = AttentionConfig;
    type Plan = AttentionPlan;

    fn operands(&self) -> Vec<AttentionOperand> {
        use AttentionOperand as O;
        let factors = self.kv.has_factors();
        let has_table = matches!(self.places, KvPlaces::Table { .. });
        let optional = [
            (true, O::Q),
            (true, O::K),
            (true, O::V),
            (factors, O::KFactors),
            (factors, O::VFactors),
            (self.kv.has_scales(), O::KScales),
            (self.kv.has_scales(), O::VScales),
            (matches!(self.queries, QueryLengths::Offsets { .. }), O::QOffsets),
            (matches!(self.places, KvPlaces::Offsets { .. }), O::KvOffsets),
            (has_table || matches!(self.places, KvPlaces::Pages { lengths: true, .. }), O::KvLengths),
            (has_table, O::BlockTable),
            (self.mask.is_some(), O::Mask),
            (true, O::D),
            (self.lse, O::Lse),
        ];
        optional.into_iter().filter(|(is_given, _)| *is_given).map(|(_, operand)| operand).collect()
    }

    fn traffic(&self) -> f64 {
        let rows = (self.tokens * self.heads) as f64;
        let dims = (self.qk_dim + self.v_dim) as f64;
        // A window is read by the queries of a sequence together.
        let keys = match self.window {
            Some(window) => (window as f64 + self.most_queries() as f64).min(self.most_keys as f64),
            None => self.most_keys as f64,
        };
        let keys = match self.places {
            KvPlaces::Offsets { rows } => (rows as f64).min(keys * self.sequences as f64),
            _ => keys * self.sequences as f64,
        };
        let kv = keys * self.kv_heads as f64 * dims * self.kv.mean_bytes();
        let lse = if self.lse { rows * 4.0 } else { 0.0 };
        rows * dims * self.dtype.bytes() as f64 + kv + lse + self.mask_words() as f64 * 4.0
    }

    fn macs(&self) -> f64 {
        (self.tokens * self.heads) as f64 * self.keys_seen() * (self.qk_dim + self.v_dim) as f64
    }
}
