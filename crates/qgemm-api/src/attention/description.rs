//! Attention problem: the builder [`Attention`] and its validation
//! into a [`CheckedAttention`].

use qgemm_formats::DType;
use qgemm_hal::op::attention::{HEAD_DIM_STEP, MOST_HEAD_DIM};
use qgemm_hal::{
    Addressing, CheckedAttention, HeadRows, KvAddressing, KvFormat, KvFormats, KvRows, MaskBits, Paging, QueryLengths,
};
use qgemm_sched::Preferences;

use crate::error::Error;
use crate::operand::WIDE_ACCESS;

/// Limit of sequences, tokens, keys, pages and rows per page. Kernels
/// add two of them in 32 bits.
const MOST: usize = i32::MAX as usize;
/// Limit of heads.
pub(crate) const MOST_HEADS: usize = 1 << 16;

/// Query tokens of each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queries {
    sequences: usize,
    tokens: usize,
    lengths: QueryLengths,
}

impl Queries {
    /// `count` query tokens for each of `sequences` sequences, contiguous.
    pub fn each(sequences: usize, count: usize) -> Self {
        Self { sequences, tokens: sequences.saturating_mul(count), lengths: QueryLengths::Each(count) }
    }

    /// Ragged query tokens, by ascending offsets (cu_seqlens) in device memory.
    ///
    /// A run takes `sequences + 1` u32
    /// ([`AttentionArgs::q_offsets`](crate::AttentionArgs::q_offsets)). `most` bounds the
    /// tokens of one sequence; later tokens of a sequence are not computed. Tokens outside
    /// all sequences are not written.
    pub fn offsets(sequences: usize, tokens: usize, most: usize) -> Self {
        Self { sequences, tokens, lengths: QueryLengths::Offsets { most } }
    }

    /// Sequences, tokens and lengths.
    pub(crate) fn parts(self) -> (usize, usize, QueryLengths) {
        (self.sequences, self.tokens, self.lengths)
    }
}

/// Keys and values of each sequence: their number and addressing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keys {
    most: usize,
    places: KvAddressing,
    keys_ready: bool,
}

impl Keys {
    /// `count` keys per sequence, contiguous.
    pub fn each(count: usize) -> Self {
        Self::of(count, KvAddressing::Pages { capacity: count, lengths: false })
    }

    /// Padded keys: room for `capacity` per sequence, contiguous.
    ///
    /// A run takes the number of keys per sequence, u32
    /// ([`AttentionArgs::kv_lengths`](crate::AttentionArgs::kv_lengths)).
    pub fn lengths(capacity: usize) -> Self {
        Self::of(capacity, KvAddressing::Pages { capacity, lengths: true })
    }

    /// Ragged keys, by ascending offsets (cu_seqlens) into `rows` rows in device memory.
    ///
    /// A run takes `sequences + 1` u32
    /// ([`AttentionArgs::kv_offsets`](crate::AttentionArgs::kv_offsets)). `most` bounds
    /// the keys of one sequence.
    pub fn offsets(rows: usize, most: usize) -> Self {
        Self::of(most, KvAddressing::Offsets { rows })
    }

    /// Paged KV cache of `pages` pages with `page_size` keys each.
    ///
    /// A run takes a block table of `width` u32 per sequence
    /// ([`AttentionArgs::block_table`](crate::AttentionArgs::block_table))
    /// and the number of keys per sequence
    /// ([`AttentionArgs::kv_lengths`](crate::AttentionArgs::kv_lengths)), both in device
    /// memory. Keys of invalid page numbers are masked.
    pub fn paged(pages: usize, page_size: usize, width: usize) -> Self {
        Self::of(width.saturating_mul(page_size), KvAddressing::Table { pages, page_size, width })
    }

    /// Bound for the keys of one sequence, below its capacity. Later keys are ignored.
    pub fn most(self, keys: usize) -> Self {
        Self { most: self.most.min(keys), ..self }
    }

    /// Promises that offsets, lengths, the block table, positions, and the keys and values of
    /// earlier tokens are ready before the launch: uploaded, or written in an earlier step. Other
    /// launches of this step write only queries, and keys and values of this step's tokens.
    ///
    /// Kernels then read them while the launch ahead still runs (programmatic dependent
    /// launch, from Hopper on). The result is the same.
    pub fn ready(self) -> Self {
        Self { keys_ready: true, ..self }
    }

    fn of(most: usize, places: KvAddressing) -> Self {
        Self { most, places, keys_ready: false }
    }
}

/// Strides of K or V, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvStrides {
    /// Page stride, or sequence stride without pages. Unused with offsets.
    pub page: u64,
    /// Token stride.
    pub token: u64,
    /// Head stride.
    pub head: u64,
}

/// Attention of query tokens to the keys of their sequences, for
/// [`Context::plan_attention`].
///
/// The result is `Σ exp(s_j) v_j / Σ exp(s_j)` with `s_j = scale · (q · k_j)`, in f32.
/// Query `i` of `q_len` attends to the keys `j < kv_len`. With [`causal`](Self::causal)
/// only `j ≤ kv_len − q_len + i` are visible: the last query attends to all keys.
/// A [`mask`](Self::mask) further restricts them. A query without visible keys, or
/// whose scores are all −∞, gets zeros. Grouped-query attention: query head `h` uses KV
/// head `h / (heads / kv_heads)`.
///
/// ```
/// use qgemm_api::{Attention, AttentionArgs, Context, DType, Keys, Queries};
///
/// // One query token of two heads attends to three keys of one KV head.
/// let ctx = Context::open("cpu")?;
/// let (heads, kv_heads, dim, keys) = (2, 1, 64, 3);
/// let attention = Attention::new(DType::F32, heads, kv_heads, dim, Queries::each(1, 1), Keys::each(keys));
/// let plan = ctx.plan_attention(&attention)?;
/// let mut workspace = ctx.workspace(plan.workspace_bytes())?;
/// let q = ctx.upload(&vec![0.1f32; heads * dim])?;
/// let k = ctx.upload(&vec![0.1f32; keys * kv_heads * dim])?;
/// let v = ctx.upload(&vec![2.0f32; keys * kv_heads * dim])?;
/// let mut d = ctx.allocate(heads * dim * 4)?;
/// let mut args = AttentionArgs::new(&q, &k, &v, &mut d);
/// args.workspace = Some(&mut workspace);
/// plan.run(&ctx.default_stream(), args)?;
/// assert!(ctx.download::<f32>(&d)?.iter().all(|mean| (mean - 2.0).abs() < 1e-5));
/// # Ok::<(), qgemm_api::Error>(())
/// ```
///
/// [`Context::plan_attention`]: crate::Context::plan_attention
#[derive(Clone, Debug)]
pub struct Attention {
    dtype: DType,
    kv: KvFormats,
    heads: usize,
    kv_heads: usize,
    qk_dim: usize,
    v_dim: usize,
    queries: Queries,
    keys: Keys,
    q: Option<[u64; 2]>,
    k: Option<KvStrides>,
    v: Option<KvStrides>,
    d: Option<[u64; 2]>,
    alignment: usize,
    kv_alignment: usize,
    causal: bool,
    window: Option<usize>,
    mask: Option<MaskBits>,
    sinks: bool,
    gated: bool,
    gate: Option<[u64; 2]>,
    scale: Option<f32>,
    soft_cap: Option<f32>,
    lse: bool,
    batch_invariant: bool,
    family: Option<String>,
}

impl Attention {
    /// Attention of `heads` query heads and `kv_heads` KV heads of `head_dim`
    /// features, all in `dtype`.
    ///
    /// Q and D are `[tokens, heads, head_dim]`, K and V `[keys, kv_heads, head_dim]`.
    /// A paged cache is `[pages, page_size, kv_heads, head_dim]`. Defaults:
    /// not causal, scale `1 / √head_dim`.
    pub fn new(dtype: DType, heads: usize, kv_heads: usize, head_dim: usize, queries: Queries, keys: Keys) -> Self {
        Self {
            dtype,
            kv: KvFormat::Plain(dtype).into(),
            heads,
            kv_heads,
            qk_dim: head_dim,
            v_dim: head_dim,
            queries,
            keys,
            q: None,
            k: None,
            v: None,
            d: None,
            alignment: WIDE_ACCESS,
            kv_alignment: WIDE_ACCESS,
            causal: false,
            window: None,
            mask: None,
            sinks: false,
            gated: false,
            gate: None,
            scale: None,
            soft_cap: None,
            lse: false,
            batch_invariant: false,
            family: None,
        }
    }

    /// Head dimension of V and D, if it differs from that of Q and K.
    pub fn v_dim(mut self, features: usize) -> Self {
        self.v_dim = features;
        self
    }

    /// Format of the KV cache. E4M3 has one factor per head. Q8_0 and Q4_0 have block
    /// scales. A run takes the factors or scales.
    pub fn kv_format(self, format: KvFormat) -> Self {
        self.kv_formats(format, format)
    }

    /// Formats of keys and of values. A run takes the factors or scales of each that has
    /// some.
    ///
    /// On CUDA, kernels that multiply codes take keys and values in one format. Others are
    /// dequantized in front, or multiplied by FMA; a plan's
    /// [record](crate::Context::explain_attention) says which.
    pub fn kv_formats(mut self, keys: KvFormat, values: KvFormat) -> Self {
        self.kv = KvFormats { k: keys, v: values };
        self
    }

    /// Token and head strides of Q, in elements.
    pub fn q_strides(mut self, token: u64, head: u64) -> Self {
        self.q = Some([token, head]);
        self
    }

    /// Strides of K.
    pub fn k_strides(mut self, strides: KvStrides) -> Self {
        self.k = Some(strides);
        self
    }

    /// Strides of V.
    pub fn v_strides(mut self, strides: KvStrides) -> Self {
        self.v = Some(strides);
        self
    }

    /// Token and head strides of D, in elements. Heads must not overlap.
    pub fn d_strides(mut self, token: u64, head: u64) -> Self {
        self.d = Some([token, head]);
        self
    }

    /// Alignment of the addresses of Q, D and the gate in every run, in bytes. 16 by default.
    pub fn alignment(mut self, bytes: usize) -> Self {
        self.alignment = bytes;
        self
    }

    /// Alignment of the addresses of K and V in every run, in bytes. 16 by default.
    pub fn kv_alignment(mut self, bytes: usize) -> Self {
        self.kv_alignment = bytes;
        self
    }

    /// Causal mask, aligned so that the last query of a sequence attends to its last key.
    pub fn causal(mut self) -> Self {
        self.causal = true;
        self
    }

    /// Sliding window: a query attends to at most the last `keys`
    /// keys up to its own position.
    pub fn window(mut self, keys: usize) -> Self {
        self.window = Some(keys);
        self
    }

    /// Bit mask: restricts the visible keys further by bits in device memory
    /// ([`AttentionArgs::mask`](crate::AttentionArgs::mask)).
    ///
    /// Uses: speculative token trees, prefixes, packed documents. A mask row has
    /// `⌈keys / 32⌉` little-endian u32, where `keys` is the bound for the keys of one
    /// sequence ([`Keys`]). Key `j` of the sequence is bit `j % 32` of word `j / 32`.
    /// [`MaskBits`] selects the rows. Keys that are masked for a whole query tile are
    /// skipped: neither read nor multiplied.
    ///
    /// Example: two tokens and two guesses for the third. Each guess attends
    /// to the tokens and itself.
    ///
    /// ```
    /// use qgemm_api::{Attention, AttentionArgs, Context, DType, Keys, MaskBits, Queries};
    /// let ctx = Context::open("cpu")?;
    /// let (heads, dim, queries, keys) = (1, 8, 2, 4);
    /// let attention = Attention::new(DType::F32, heads, heads, dim, Queries::each(1, queries), Keys::each(keys))
    ///     .mask(MaskBits::of_tokens());
    /// let plan = ctx.plan_attention(&attention)?;
    /// let q = ctx.upload(&vec![0f32; queries * dim])?;
    /// let k = ctx.upload(&vec![1f32; keys * dim])?;
    /// let values: Vec<f32> = (0..keys).flat_map(|key| vec![key as f32; dim]).collect();
    /// let v = ctx.upload(&values)?;
    /// // A word a query: bit 0 is the first key.
    /// let mask = ctx.upload(&[0b0111u32, 0b1011])?;
    /// let mut d = ctx.allocate(4 * queries * dim)?;
    /// let mut args = AttentionArgs::new(&q, &k, &v, &mut d);
    /// args.mask = Some((&mask).into());
    /// plan.run(&ctx.default_stream(), args)?;
    /// let means: Vec<f32> = ctx.download(&d)?;
    /// assert_eq!((means[0], means[dim]), (1.0, 4.0 / 3.0));
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    pub fn mask(mut self, bits: MaskBits) -> Self {
        self.mask = Some(bits);
        self
    }

    /// Softmax scale, instead of `1 / √head_dim`.
    pub fn scale(mut self, factor: f32) -> Self {
        self.scale = Some(factor);
        self
    }

    /// Logit soft-capping: `cap · tanh(s / cap)`.
    pub fn soft_cap(mut self, cap: f32) -> Self {
        self.soft_cap = Some(cap);
        self
    }

    /// Also writes the log-sum-exp `ln Σ exp(s_j)`, f32
    /// `[tokens, heads]`. −∞ without visible keys.
    pub fn log_sum_exp(mut self) -> Self {
        self.lse = true;
        self
    }

    /// Attention sinks: each query head has a logit that joins the softmax
    /// denominator, as if it were the score of a key whose value is zero.
    ///
    /// A run takes them ([`AttentionArgs::sinks`](crate::AttentionArgs::sinks)). They are
    /// neither scaled nor capped. The log-sum-exp includes them. A query without
    /// visible keys gets zeros.
    pub fn sinks(mut self) -> Self {
        self.sinks = true;
        self
    }

    /// Output gate: `D = sigmoid(G) · (Σ exp(s_j) v_j / Σ exp(s_j))`, in f32 before the one
    /// rounding.
    ///
    /// G has the shape and type of D. A run takes it
    /// ([`AttentionArgs::gate`](crate::AttentionArgs::gate)). The log-sum-exp stays as it
    /// is. A NaN in G makes its result NaN.
    pub fn gated(mut self) -> Self {
        self.gated = true;
        self
    }

    /// Token and head strides of the output gate, in elements. `[tokens, heads, v_dim]` by
    /// default.
    pub fn gate_strides(mut self, token: u64, head: u64) -> Self {
        self.gate = Some([token, head]);
        self
    }

    /// Batch-invariant results: the bits of a sequence depend neither on the number nor on
    /// the lengths of other sequences.
    ///
    /// This holds among plans with equal bounds for queries and keys. Split-KV then uses
    /// splits of a fixed length.
    pub fn batch_invariant(mut self) -> Self {
        self.batch_invariant = true;
        self
    }

    /// Restricts the plan to one kernel family, such as `attention_simt`,
    /// for tests and benchmarks.
    pub fn family(mut self, name: impl Into<String>) -> Self {
        self.family = Some(name.into());
        self
    }

    /// Restrictions on the candidates.
    pub(crate) fn preferences(&self) -> Preferences {
        Preferences { family: self.family.clone(), ..Preferences::default() }
    }

    /// Validates everything that is independent of a run's buffers.
    pub(crate) fn check(&self) -> Result<CheckedAttention, Error> {
        let addressing = addressing(self.queries, self.keys)?;
        let Addressing { sequences, tokens, queries, most_keys, places, keys_ready } = addressing;
        let Paging { pages, page_size: rows, .. } = addressing.paging();
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        for (name, got) in [("heads", heads), ("heads of keys", kv_heads)] {
            check_count(name, got, 1, MOST_HEADS)?;
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(Error::HeadsNotShared { heads, kv_heads });
        }
        check_head_dims([self.qk_dim, self.v_dim], self.kv, MOST_HEAD_DIM)?;
        let scale = self.scale.unwrap_or(1.0 / (self.qk_dim as f32).sqrt());
        for (name, got) in [("scale", scale), ("soft cap", self.soft_cap.unwrap_or(1.0))] {
            if !got.is_finite() {
                return Err(Error::NonFiniteScalar { name, got });
            }
        }
        if let Some(got) = self.soft_cap.filter(|cap| *cap <= 0.0) {
            return Err(Error::NotPositive { name: "soft cap", got });
        }
        let of_tokens = |name, strides: Option<[u64; 2]>, columns| {
            let [token, head] = strides.unwrap_or([(heads * columns) as u64, columns as u64]);
            let rows = HeadsOf::of_tokens(name, heads, columns, self.dtype);
            rows.check([0, token, head], [1, tokens], self.alignment).map(|kv| kv.rows)
        };
        let of_keys = |name, strides: Option<KvStrides>, columns: usize, format| {
            let row = (kv_heads * columns) as u64;
            let natural = KvStrides { page: row * rows as u64, token: row, head: columns as u64 };
            let KvStrides { page, token, head } = strides.unwrap_or(natural);
            HeadsOf::of_cache(name, kv_heads, columns, format).check(
                [page, token, head],
                [pages, rows],
                self.kv_alignment,
            )
        };
        let op = CheckedAttention {
            sequences,
            tokens,
            queries,
            most_keys,
            places,
            keys_ready,
            heads,
            kv_heads,
            qk_dim: self.qk_dim,
            v_dim: self.v_dim,
            dtype: self.dtype,
            kv: self.kv,
            q: of_tokens("q", self.q, self.qk_dim)?,
            k: of_keys("k", self.k, self.qk_dim, self.kv.k)?,
            v: of_keys("v", self.v, self.v_dim, self.kv.v)?,
            d: of_tokens("d", self.d, self.v_dim)?,
            causal: self.causal,
            window: self.window,
            mask: self.mask,
            sinks: self.sinks,
            gate: if self.gated { Some(of_tokens("gate", self.gate, self.v_dim)?) } else { None },
            scale,
            soft_cap: self.soft_cap,
            lse: self.lse,
            batch_invariant: self.batch_invariant,
        };
        let words = self.mask.map_or(Some(0), |mask| mask.all_words(&addressing, heads));
        if words.and_then(|words| words.checked_mul(4)).is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            let row_stride = MaskBits::words(most_keys) as u64;
            return Err(Error::ExtentOverflow { operand: "mask", rows: tokens as u64, row_stride });
        }
        if !op.d.is_injective(tokens, heads, self.v_dim) {
            let HeadRows { token_stride, head_stride, .. } = op.d;
            return Err(Error::OverlappingHeads { operand: "d", token_stride, head_stride, columns: self.v_dim });
        }
        Ok(op)
    }
}

/// Checks sequences, tokens and keys against the limits of kernels.
pub(crate) fn addressing(queries: Queries, keys: Keys) -> Result<Addressing, Error> {
    let Queries { sequences, tokens, lengths: queries } = queries;
    let Keys { most: most_keys, places, keys_ready } = keys;
    let addressing = Addressing { sequences, tokens, queries, most_keys, places, keys_ready };
    let Paging { pages, page_size, width } = addressing.paging();
    let has_table = matches!(places, KvAddressing::Table { .. });
    let sizes = [
        ("sequences", sequences, 0),
        ("tokens", tokens, 0),
        ("queries of a sequence", addressing.most_queries(), 0),
        ("keys of a sequence", most_keys, 0),
        ("pages", pages, 0),
        ("rows of a page", page_size, usize::from(has_table)),
        ("pages of a sequence", width, 0),
    ];
    sizes.into_iter().try_for_each(|(name, got, least)| check_count(name, got, least, MOST))?;
    Ok(addressing)
}

pub(crate) fn check_count(name: &'static str, got: usize, least: usize, most: usize) -> Result<(), Error> {
    if (least..=most).contains(&got) { Ok(()) } else { Err(Error::OutOfRange { name, least, most, got }) }
}

/// Checks the head dimensions of keys and values against those of
/// kernels.
pub(crate) fn check_head_dims([qk_dim, v_dim]: [usize; 2], kv: KvFormats, most: usize) -> Result<(), Error> {
    for (name, got, format) in [("features of a query", qk_dim, kv.k), ("features of a value", v_dim, kv.v)] {
        let step = format.step().max(HEAD_DIM_STEP);
        if got == 0 || got > most || !got.is_multiple_of(step) {
            return Err(Error::HeadDim { name, step, most, got });
        }
    }
    Ok(())
}

/// Heads of an operand.
pub(crate) struct HeadsOf {
    pub name: &'static str,
    pub heads: usize,
    pub columns: usize,
    /// Element format.
    pub format: KvFormat,
    /// Bytes per vector load.
    pub vector: usize,
}

impl HeadsOf {
    /// Heads of Q, D, new keys or new values.
    pub fn of_tokens(name: &'static str, heads: usize, columns: usize, dtype: DType) -> Self {
        Self { name, heads, columns, format: KvFormat::Plain(dtype), vector: WIDE_ACCESS }
    }

    /// Heads of cached keys or values.
    pub fn of_cache(name: &'static str, heads: usize, columns: usize, format: KvFormat) -> Self {
        Self { name, heads, columns, format, vector: format.vector_bytes() }
    }

    /// Checks strides of pages, tokens and heads against their counts.
    pub fn check(
        &self,
        [page, token, head]: [u64; 3],
        [pages, rows]: [usize; 2],
        alignment: usize,
    ) -> Result<KvRows, Error> {
        let &HeadsOf { name: operand, heads, columns, format, vector } = self;
        let width = format.width();
        if !alignment.is_power_of_two() || alignment < width {
            return Err(Error::Misaligned { operand, expected: width, got: alignment });
        }
        let bytes = extent_bytes([page, token, head], [pages, rows, heads], columns, format);
        if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(Error::ExtentOverflow { operand, rows: rows as u64, row_stride: token });
        }
        // The stride of a single item is irrelevant.
        let strides = [(page, pages), (token, rows), (head, heads)];
        let strides = strides.map(|(stride, count)| if count > 1 { stride } else { 0 });
        let step = format.step() as u64;
        if let Some(got) = strides.into_iter().find(|stride| !stride.is_multiple_of(step)) {
            return Err(Error::StrideInBlock { operand, step, got });
        }
        let bits = format.bits() as u64;
        let whole = |stride: u64| stride.checked_mul(bits).is_some_and(|bits| bits.is_multiple_of(8 * vector as u64));
        let aligned = alignment >= vector && strides.into_iter().all(whole);
        let [page_stride, token_stride, head_stride] = strides;
        Ok(KvRows { page_stride, rows: HeadRows { token_stride, head_stride, aligned } })
    }
}

/// Extent in bytes from the first to the last element. `None` on overflow.
pub(crate) fn extent_bytes(strides: [u64; 3], counts: [usize; 3], columns: usize, format: KvFormat) -> Option<u64> {
    if counts.contains(&0) {
        return Some(0);
    }
    let last = strides
        .iter()
        .zip(counts)
        .try_fold(0u64, |sum, (stride, count)| sum.checked_add(stride.checked_mul(count as u64 - 1)?))?;
    last.checked_add(columns as u64)?.checked_mul(format.bits() as u64).map(|bits| bits / 8)
}
