//! [`Attention`]: heads, queries and keys, and their validation into a [`CheckedAttention`].

use qgemm_formats::DType;
use qgemm_hal::op::attention::{HEAD_DIM_STEP, MOST_HEAD_DIM};
use qgemm_hal::{Addressing, CheckedAttention, HeadRows, KvFormat, KvPlaces, KvRows, MaskBits, Paging, QueryLengths};
use qgemm_sched::Preferences;

use crate::error::Error;
use crate::operand::WIDE_ACCESS;

/// Most sequences, tokens, keys, pages and rows of one: kernels add two of them in 32 bits.
const MOST: usize = i32::MAX as usize;
/// Most heads.
pub(crate) const MOST_HEADS: usize = 1 << 16;

/// Which query tokens each sequence has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queries {
    sequences: usize,
    tokens: usize,
    lengths: QueryLengths,
}

impl Queries {
    /// `count` of each of `sequences` sequences, one sequence after another.
    pub fn each(sequences: usize, count: usize) -> Self {
        Self { sequences, tokens: sequences.saturating_mul(count), lengths: QueryLengths::Each(count) }
    }

    /// Those from one offset to the next, of `tokens` query tokens: a run is given `sequences + 1` ascending u32 on the device
    /// ([`AttentionArgs::q_offsets`](crate::AttentionArgs::q_offsets)). `most` is a bound for the tokens of one sequence; what one has
    /// beyond it is not computed. Tokens of no sequence are not written.
    pub fn offsets(sequences: usize, tokens: usize, most: usize) -> Self {
        Self { sequences, tokens, lengths: QueryLengths::Offsets { most } }
    }
}

/// Which keys and values each sequence has, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keys {
    most: usize,
    places: KvPlaces,
}

impl Keys {
    /// `count` of each sequence, one sequence after another.
    pub fn each(count: usize) -> Self {
        Self { most: count, places: KvPlaces::Pages { capacity: count, lengths: false } }
    }

    /// Room for `capacity` keys of each sequence, one sequence after another; a run is given how many there are
    /// ([`AttentionArgs::kv_lengths`](crate::AttentionArgs::kv_lengths)), a u32 a sequence on the device.
    pub fn lengths(capacity: usize) -> Self {
        Self { most: capacity, places: KvPlaces::Pages { capacity, lengths: true } }
    }

    /// Rows from one offset to the next, of `rows` rows: a run is given ascending u32 on the device, one more than sequences
    /// ([`AttentionArgs::kv_offsets`](crate::AttentionArgs::kv_offsets)). `most` is a bound for the keys of one sequence.
    pub fn offsets(rows: usize, most: usize) -> Self {
        Self { most, places: KvPlaces::Offsets { rows } }
    }

    /// Pages of `page_size` keys of a cache of `pages`; a run is given `width` u32 a sequence, the numbers of its pages in order
    /// ([`AttentionArgs::block_table`](crate::AttentionArgs::block_table)), and how many keys there are
    /// ([`AttentionArgs::kv_lengths`](crate::AttentionArgs::kv_lengths)), both on the device. Keys of pages that are none are not seen.
    pub fn paged(pages: usize, page_size: usize, width: usize) -> Self {
        Self { most: width.saturating_mul(page_size), places: KvPlaces::Table { pages, page_size, width } }
    }

    /// A bound for the keys of one sequence, below what there is room for: what one has beyond it is left out.
    pub fn most(self, keys: usize) -> Self {
        Self { most: self.most.min(keys), ..self }
    }
}

/// Strides of keys or values, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvStrides {
    /// From one page, or sequence, to the next; of no meaning where keys lie at offsets.
    pub page: u64,
    /// From one token to the next.
    pub token: u64,
    /// From one head to the next.
    pub head: u64,
}

/// Attention of query tokens to the keys of their sequences, described for [`Context::plan_attention`].
///
/// Query `i` of `q_len` in a sequence with `kv_len` keys sees keys `j < kv_len`; with [`causal`](Self::causal) only
/// `j ≤ kv_len − q_len + i`, so that the last query sees all; with a [`mask`](Self::mask) only those of them whose bit is set. The result is `Σ exp(s_j) v_j / Σ exp(s_j)` with
/// `s_j = scale · (q · k_j)`, in f32. A query that sees no key, or none whose `s_j` is above −∞, gets zeros. Heads of queries share heads
/// of keys in order: head `h` uses `h / (heads / kv_heads)`.
///
/// [`Context::plan_attention`]: crate::Context::plan_attention
#[derive(Clone, Debug)]
pub struct Attention {
    dtype: DType,
    kv: KvFormat,
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
    scale: Option<f32>,
    soft_cap: Option<f32>,
    lse: bool,
    batch_invariant: bool,
    family: Option<String>,
}

impl Attention {
    /// `heads` heads of `head_dim` features in `dtype`, whose keys and values have `kv_heads`, in `dtype` as well: Q and D
    /// `[tokens, heads, head_dim]`, K and V `[keys, kv_heads, head_dim]`, of pages `[pages, page_size, kv_heads, head_dim]`. Not
    /// causal, with a scale of `1 / √head_dim`.
    pub fn new(dtype: DType, heads: usize, kv_heads: usize, head_dim: usize, queries: Queries, keys: Keys) -> Self {
        Self {
            dtype,
            kv: KvFormat::Plain(dtype),
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
            scale: None,
            soft_cap: None,
            lse: false,
            batch_invariant: false,
            family: None,
        }
    }

    /// Features of a value and of a result, where they are not those of a query.
    pub fn v_dim(mut self, features: usize) -> Self {
        self.v_dim = features;
        self
    }

    /// How keys and values are stored; E4M3 has a factor a head, Q8_0 and Q4_0 have scales of blocks, which a run is given.
    pub fn kv_format(mut self, format: KvFormat) -> Self {
        self.kv = format;
        self
    }

    /// Elements from one token of Q to the next, and from one head to the next.
    pub fn q_strides(mut self, token: u64, head: u64) -> Self {
        self.q = Some([token, head]);
        self
    }

    /// How the keys lie.
    pub fn k_strides(mut self, strides: KvStrides) -> Self {
        self.k = Some(strides);
        self
    }

    /// How the values lie.
    pub fn v_strides(mut self, strides: KvStrides) -> Self {
        self.v = Some(strides);
        self
    }

    /// Elements from one token of D to the next, and from one head to the next; no two heads of tokens may overlap.
    pub fn d_strides(mut self, token: u64, head: u64) -> Self {
        self.d = Some([token, head]);
        self
    }

    /// What the addresses of Q and D are multiples of, in bytes, at every run. 16 when not given.
    pub fn alignment(mut self, bytes: usize) -> Self {
        self.alignment = bytes;
        self
    }

    /// What the addresses of K and V are multiples of, in bytes, at every run. 16 when not given.
    pub fn kv_alignment(mut self, bytes: usize) -> Self {
        self.kv_alignment = bytes;
        self
    }

    /// A query sees no later keys: the last query of a sequence stands where its last key does.
    pub fn causal(mut self) -> Self {
        self.causal = true;
        self
    }

    /// A query sees at most the last `keys` keys up to its own position.
    pub fn window(mut self, keys: usize) -> Self {
        self.window = Some(keys);
        self
    }

    /// A query sees, of the keys that it would see otherwise, those whose bit is set in a mask on the device, which a run is given
    /// ([`AttentionArgs::mask`](crate::AttentionArgs::mask)): trees of guessed tokens, prefixes, documents in one sequence. A row of the mask
    /// is `⌈keys / 32⌉` little-endian u32, where `keys` is the bound for the keys of one sequence ([`Keys`]); key `j` of the sequence is bit
    /// `j % 32` of word `j / 32`. [`MaskBits`] says which rows there are. Keys that no query of a tile sees are skipped: neither read nor
    /// multiplied.
    ///
    /// Two tokens and two guesses for the third, of which each sees the first two and itself:
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

    /// Factor of products, in place of `1 / √head_dim`.
    pub fn scale(mut self, factor: f32) -> Self {
        self.scale = Some(factor);
        self
    }

    /// Bounds what the exponential is taken of: `cap · tanh(s / cap)`.
    pub fn soft_cap(mut self, cap: f32) -> Self {
        self.soft_cap = Some(cap);
        self
    }

    /// Also writes `ln Σ exp(s_j)`, f32 `[tokens, heads]`; −∞ where no key is seen.
    pub fn log_sum_exp(mut self) -> Self {
        self.lse = true;
        self
    }

    /// The bits of a sequence's results depend on neither the number nor the lengths of the others, among plans with the same bounds
    /// for queries and keys: keys are cut into parts of a fixed length.
    pub fn batch_invariant(mut self) -> Self {
        self.batch_invariant = true;
        self
    }

    /// Restricts the plan to one kernel family, such as `attention_simt`: for tests and benchmarks.
    pub fn family(mut self, name: impl Into<String>) -> Self {
        self.family = Some(name.into());
        self
    }

    /// What candidates are restricted to.
    pub(crate) fn preferences(&self) -> Preferences {
        Preferences { family: self.family.clone(), ..Preferences::default() }
    }

    /// Validates everything that does not depend on the buffers of a run.
    pub(crate) fn check(&self) -> Result<CheckedAttention, Error> {
        let addressing = addressing(self.queries, self.keys)?;
        let Addressing { sequences, tokens, queries, most_keys, places } = addressing;
        let Paging { pages, page_size: rows, .. } = addressing.paging();
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        for (name, got) in [("heads", heads), ("heads of keys", kv_heads)] {
            check_count(name, got, 1, MOST_HEADS)?;
        }
        if !heads.is_multiple_of(kv_heads) {
            return Err(Error::HeadsNotShared { heads, kv_heads });
        }
        check_head_dims(self.qk_dim, self.v_dim, self.kv)?;
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
        let of_keys = |name, strides: Option<KvStrides>, columns: usize| {
            let row = (kv_heads * columns) as u64;
            let natural = KvStrides { page: row * rows as u64, token: row, head: columns as u64 };
            let KvStrides { page, token, head } = strides.unwrap_or(natural);
            HeadsOf::of_cache(name, kv_heads, columns, self.kv).check(
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
            heads,
            kv_heads,
            qk_dim: self.qk_dim,
            v_dim: self.v_dim,
            dtype: self.dtype,
            kv: self.kv,
            q: of_tokens("q", self.q, self.qk_dim)?,
            k: of_keys("k", self.k, self.qk_dim)?,
            v: of_keys("v", self.v, self.v_dim)?,
            d: of_tokens("d", self.d, self.v_dim)?,
            causal: self.causal,
            window: self.window,
            mask: self.mask,
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

/// Sequences with their tokens and keys, as many as kernels count.
pub(crate) fn addressing(queries: Queries, keys: Keys) -> Result<Addressing, Error> {
    let Queries { sequences, tokens, lengths: queries } = queries;
    let Keys { most: most_keys, places } = keys;
    let addressing = Addressing { sequences, tokens, queries, most_keys, places };
    let Paging { pages, page_size, width } = addressing.paging();
    let has_table = matches!(places, KvPlaces::Table { .. });
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

/// That kernels have heads of so many features.
pub(crate) fn check_head_dims(qk_dim: usize, v_dim: usize, kv: KvFormat) -> Result<(), Error> {
    let step = kv.step().max(HEAD_DIM_STEP);
    for (name, got) in [("features of a query", qk_dim), ("features of a value", v_dim)] {
        if got == 0 || got > MOST_HEAD_DIM || !got.is_multiple_of(step) {
            return Err(Error::HeadDim { name, step, most: MOST_HEAD_DIM, got });
        }
    }
    Ok(())
}

/// Heads of an operand.
pub(crate) struct HeadsOf {
    pub name: &'static str,
    pub heads: usize,
    pub columns: usize,
    /// How an element is stored.
    pub format: KvFormat,
    /// Bytes that kernels load at once.
    pub vector: usize,
}

impl HeadsOf {
    /// Of Q, D, new keys or new values.
    pub fn of_tokens(name: &'static str, heads: usize, columns: usize, dtype: DType) -> Self {
        Self { name, heads, columns, format: KvFormat::Plain(dtype), vector: WIDE_ACCESS }
    }

    /// Of cached keys or values.
    pub fn of_cache(name: &'static str, heads: usize, columns: usize, format: KvFormat) -> Self {
        Self { name, heads, columns, format, vector: format.vector_bytes() }
    }

    /// Rows with these strides of pages, tokens and heads, of so many pages and rows of each.
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
        // The stride of what there is one of plays no part.
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

/// Bytes from the first to the last element of so many pages, rows and heads; `None` when the count overflows.
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
