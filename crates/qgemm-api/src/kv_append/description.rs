//! KV-append problem: the builder [`KvAppend`] and its validation
//! into a [`CheckedKvAppend`].

use qgemm_formats::DType;
use qgemm_hal::op::kv_append::MOST_APPENDED_DIM;
use qgemm_hal::{Addressing, CheckedKvAppend, HeadNorm, HeadRows, KvAddressing, KvFormat, KvRows, Paging};

use super::rotary::Rotary;
use crate::attention::{HeadsOf, Keys, KvStrides, MOST_HEADS, Queries, addressing, check_count, check_head_dims};
use crate::error::Error;
use crate::norm::check_eps;
use crate::operand::WIDE_ACCESS;

/// Rotary embedding and KV-cache append of new tokens, for
/// [`Context::plan_kv_append`].
///
/// Queries are rotated in place; keys are rotated and written to the cache,
/// with the values. `Queries` and `Keys` are those of the following attention:
/// lengths include the new keys. Token `i` of `q_len` in a sequence with
/// `kv_len` keys becomes key `kv_len − q_len + i`. That index is also its
/// position, unless [positions](Self::positions) are given.
///
/// The form [in place](Self::in_place) rotates heads and appends nothing.
///
/// ```
/// use qgemm_api::{Context, DType, Keys, KvAppend, KvAppendArgs, Queries};
///
/// // Two new tokens of one KV head fill an empty cache.
/// let ctx = Context::open("cpu")?;
/// let (tokens, dim) = (2, 64);
/// let append = KvAppend::new(DType::F32, 0, 1, dim, Queries::each(1, tokens), Keys::each(tokens));
/// let plan = ctx.plan_kv_append(&append)?;
/// let (new_k, new_v) = (ctx.upload(&[1.0f32; 2 * 64])?, ctx.upload(&[2.0f32; 2 * 64])?);
/// let (mut k, mut v) = (ctx.allocate(tokens * dim * 4)?, ctx.allocate(tokens * dim * 4)?);
/// plan.run(&ctx.default_stream(), KvAppendArgs::new(&new_k, &new_v, &mut k, &mut v))?;
/// assert_eq!(ctx.download::<f32>(&v)?, [2.0; 2 * 64]);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
///
/// [`Context::plan_kv_append`]: crate::Context::plan_kv_append
#[derive(Clone, Debug)]
pub struct KvAppend {
    dtype: DType,
    kv: KvFormat,
    heads: usize,
    kv_heads: usize,
    qk_dim: usize,
    v_dim: usize,
    queries: Queries,
    keys: Keys,
    head_norm: Option<HeadNorm>,
    rotary: Option<Rotary>,
    rotate_k: bool,
    rotate_v: bool,
    positions: bool,
    q: Option<[u64; 2]>,
    new_k: Option<[u64; 2]>,
    new_v: Option<[u64; 2]>,
    k: Option<KvStrides>,
    v: Option<KvStrides>,
    alignment: usize,
    kv_alignment: usize,
}

impl KvAppend {
    /// Append for `heads` query heads (0 without rotation of queries) and
    /// `kv_heads` KV heads of `head_dim` features in `dtype`.
    ///
    /// Queries are `[tokens, heads, head_dim]`, new keys and values
    /// `[tokens, kv_heads, head_dim]`. The cache is in `dtype`:
    /// `[keys, kv_heads, head_dim]`, or `[pages, page_size, kv_heads, head_dim]`
    /// with pages. Without a [rotary embedding](Self::rotary) nothing is rotated.
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
            head_norm: None,
            rotary: None,
            rotate_k: false,
            rotate_v: false,
            positions: false,
            q: None,
            new_k: None,
            new_v: None,
            k: None,
            v: None,
            alignment: WIDE_ACCESS,
            kv_alignment: WIDE_ACCESS,
        }
    }

    /// Rotation of `heads` heads of `head_dim` features in place,
    /// without keys and cache.
    ///
    /// Heads are `[tokens, heads, head_dim]`: the queries of
    /// [`KvAppendArgs::in_place`](crate::KvAppendArgs::in_place). `keys`
    /// are those of the attention; they say the positions of tokens.
    /// A [Hadamard rotation](Self::hadamard), an
    /// [inverse rotary embedding](Rotary::inverse), or both undo on
    /// attention's D what was done to values.
    pub fn in_place(dtype: DType, heads: usize, head_dim: usize, queries: Queries, keys: Keys) -> Self {
        Self::new(dtype, heads, 0, head_dim, queries, keys)
    }

    /// Hadamard rotation of the heads [in place](Self::in_place), behind
    /// the rotary embedding, or before an [inverse](Rotary::inverse)
    /// one. It is its own inverse.
    pub fn hadamard(self) -> Self {
        self.rotate_k()
    }

    /// Hadamard rotation of queries and keys, behind the rotary
    /// embedding. Scores do not change.
    ///
    /// A head is cut into blocks of the largest power of two that divides
    /// its features. Each is multiplied by the orthonormal Walsh–Hadamard
    /// matrix (Sylvester's order), in f32, before keys are converted.
    /// Outliers of single features spread over a block, so that
    /// formats of few bits lose less.
    pub fn rotate_k(mut self) -> Self {
        self.rotate_k = true;
        self
    }

    /// Hadamard rotation of values, as of [keys](Self::rotate_k).
    /// Attention's D is then rotated: [`KvAppend::in_place`] with
    /// [`KvAppend::hadamard`] undoes it.
    pub fn rotate_v(mut self) -> Self {
        self.rotate_v = true;
        self
    }

    /// RMS norm of each query and key head (QK-norm), before the rotary embedding:
    /// `x / sqrt(mean x² + eps) · gamma`, in f32.
    ///
    /// A run takes gamma of queries and of keys, `[head_dim]` in type `gamma`
    /// ([`KvAppendArgs::gammas`](crate::KvAppendArgs::gammas)).
    pub fn head_norm(mut self, eps: f32, gamma: DType) -> Self {
        self.head_norm = Some(HeadNorm { eps, gamma });
        self
    }

    /// Rotary embedding of queries and keys.
    pub fn rotary(mut self, rotary: Rotary) -> Self {
        self.rotary = Some(rotary);
        self
    }

    /// Takes the position of each token at every run
    /// ([`KvAppendArgs::positions`](crate::KvAppendArgs::positions)).
    pub fn positions(mut self) -> Self {
        self.positions = true;
        self
    }

    /// Head dimension of V, if it differs from that of K.
    pub fn v_dim(mut self, features: usize) -> Self {
        self.v_dim = features;
        self
    }

    /// Format of the KV cache. E4M3 takes one factor per head, by which values are
    /// divided. Q8_0 and Q4_0 have block scales, which are written, too.
    pub fn kv_format(mut self, format: KvFormat) -> Self {
        self.kv = format;
        self
    }

    /// Token and head strides of the queries, in elements. Heads must not overlap.
    pub fn q_strides(mut self, token: u64, head: u64) -> Self {
        self.q = Some([token, head]);
        self
    }

    /// Token and head strides of the new keys, in elements.
    pub fn new_k_strides(mut self, token: u64, head: u64) -> Self {
        self.new_k = Some([token, head]);
        self
    }

    /// Token and head strides of the new values, in elements.
    pub fn new_v_strides(mut self, token: u64, head: u64) -> Self {
        self.new_v = Some([token, head]);
        self
    }

    /// Strides of the cached keys. Heads must not overlap.
    pub fn k_strides(mut self, strides: KvStrides) -> Self {
        self.k = Some(strides);
        self
    }

    /// Strides of the cached values. Heads must not overlap.
    pub fn v_strides(mut self, strides: KvStrides) -> Self {
        self.v = Some(strides);
        self
    }

    /// Alignment of the addresses of queries, new keys and new values in every run,
    /// in bytes. 16 by default.
    pub fn alignment(mut self, bytes: usize) -> Self {
        self.alignment = bytes;
        self
    }

    /// Alignment of the addresses of the cache in every run,
    /// in bytes. 16 by default.
    pub fn kv_alignment(mut self, bytes: usize) -> Self {
        self.kv_alignment = bytes;
        self
    }

    /// Frequencies of the rotary embedding, if it has some.
    pub(super) fn frequencies(&self) -> Option<Vec<u64>> {
        self.rotary.and_then(|rotary| rotary.frequencies())
    }

    /// Validates everything that is independent of a run's buffers.
    pub(crate) fn check(&self) -> Result<CheckedKvAppend, Error> {
        check_count("heads", self.heads, usize::from(self.kv_heads == 0), MOST_HEADS)?;
        check_count("heads of keys", self.kv_heads, 0, MOST_HEADS)?;
        if let Some(norm) = &self.head_norm {
            check_eps(norm.eps)?;
        }
        let op = if self.kv_heads == 0 { self.check_in_place()? } else { self.check_append()? };
        if op.heads > 0 && !op.q.is_injective(op.addressing.tokens, op.heads, op.qk_dim) {
            return Err(overlapping("q", &op.q, op.qk_dim));
        }
        Ok(op)
    }

    fn check_append(&self) -> Result<CheckedKvAppend, Error> {
        let addressing = addressing(self.queries, self.keys)?;
        let &Self { dtype, kv, heads, kv_heads, qk_dim, v_dim, rotate_k, rotate_v, positions, .. } = self;
        check_head_dims([qk_dim, v_dim], kv.into(), MOST_APPENDED_DIM)?;
        let Paging { pages, page_size, .. } = addressing.paging();
        let of_cache = |name, strides: Option<KvStrides>, columns: usize| {
            let row = (kv_heads * columns) as u64;
            let natural = KvStrides { page: row * page_size as u64, token: row, head: columns as u64 };
            let KvStrides { page, token, head } = strides.unwrap_or(natural);
            let rows = HeadsOf::of_cache(name, kv_heads, columns, kv);
            let rows = rows.check([page, token, head], [pages, page_size], self.kv_alignment)?;
            if !is_injective(&rows, [pages, page_size, kv_heads], columns) {
                return Err(overlapping(name, &rows.rows, columns));
            }
            Ok(rows)
        };
        let tokens = addressing.tokens;
        Ok(CheckedKvAppend {
            addressing,
            heads,
            kv_heads,
            qk_dim,
            v_dim,
            dtype,
            kv,
            q: self.of_tokens("q", [tokens, heads, qk_dim], self.q)?,
            new_k: self.of_tokens("new k", [tokens, kv_heads, qk_dim], self.new_k)?,
            new_v: self.of_tokens("new v", [tokens, kv_heads, v_dim], self.new_v)?,
            k: of_cache("k", self.k, qk_dim)?,
            v: of_cache("v", self.v, v_dim)?,
            head_norm: self.head_norm,
            rotary: self.rotary.map(|rotary| rotary.check(qk_dim)).transpose()?,
            rotate_k,
            rotate_v,
            positions,
        })
    }

    /// Validates the form in place, in which operands of keys and values are absent.
    fn check_in_place(&self) -> Result<CheckedKvAppend, Error> {
        let addressing = without_table(addressing(self.queries, self.keys)?);
        let &Self { dtype, heads, qk_dim, rotate_k, positions, .. } = self;
        let kv = KvFormat::Plain(dtype);
        check_head_dims([qk_dim; 2], kv.into(), MOST_APPENDED_DIM)?;
        let absent = HeadRows { token_stride: 0, head_stride: 0, aligned: true };
        let cache = KvRows { page_stride: 0, rows: absent };
        Ok(CheckedKvAppend {
            addressing,
            heads,
            kv_heads: 0,
            qk_dim,
            v_dim: qk_dim,
            dtype,
            kv,
            q: self.of_tokens("q", [addressing.tokens, heads, qk_dim], self.q)?,
            new_k: absent,
            new_v: absent,
            k: cache,
            v: cache,
            head_norm: self.head_norm,
            rotary: self.rotary.map(|rotary| rotary.check(qk_dim)).transpose()?,
            rotate_k,
            rotate_v: false,
            positions,
        })
    }

    /// Checks the strides of an operand `[tokens, heads, columns]`.
    fn of_tokens(
        &self,
        name: &'static str,
        [tokens, heads, columns]: [usize; 3],
        strides: Option<[u64; 2]>,
    ) -> Result<HeadRows, Error> {
        let [token, head] = strides.unwrap_or([(heads * columns) as u64, columns as u64]);
        let rows = HeadsOf::of_tokens(name, heads, columns, self.dtype);
        rows.check([0, token, head], [1, tokens], self.alignment).map(|kv| kv.rows)
    }
}

/// The sequences without a block table, which only slots of keys need.
fn without_table(addressing: Addressing) -> Addressing {
    match addressing.places {
        KvAddressing::Table { .. } => {
            Addressing { places: KvAddressing::Pages { capacity: addressing.most_keys, lengths: true }, ..addressing }
        }
        _ => addressing,
    }
}

fn overlapping(operand: &'static str, rows: &HeadRows, columns: usize) -> Error {
    let &HeadRows { token_stride, head_stride, .. } = rows;
    Error::OverlappingHeads { operand, token_stride, head_stride, columns }
}

/// Whether no two heads of a cache share an element: each stride exceeds
/// the extent of all smaller ones.
fn is_injective(rows: &KvRows, [pages, page_size, heads]: [usize; 3], columns: usize) -> bool {
    let KvRows { page_stride, rows: HeadRows { token_stride, head_stride, .. } } = *rows;
    let mut levels = [(page_stride, pages), (token_stride, page_size), (head_stride, heads)];
    levels.sort_unstable();
    let mut extent = columns as u128;
    for (stride, count) in levels.into_iter().filter(|(_, count)| *count > 1) {
        if u128::from(stride) < extent {
            return false;
        }
        extent += u128::from(stride) * (count as u128 - 1);
    }
    true
}
