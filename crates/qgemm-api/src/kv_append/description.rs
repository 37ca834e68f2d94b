//! [`KvAppend`]: tokens, heads and the cache, and their validation into a [`CheckedKvAppend`].

use qgemm_formats::DType;
use qgemm_hal::{Addressing, CheckedKvAppend, HeadRows, KvFormat, KvRows, Paging};

use super::rotary::Rotary;
use crate::attention::{HeadsOf, Keys, KvStrides, MOST_HEADS, Queries, addressing, check_count, check_head_dims};
use crate::error::Error;
use crate::operand::WIDE_ACCESS;

/// New tokens of sequences, whose queries are turned in place and whose keys and values are written to the cache, described for
/// [`Context::plan_kv_append`].
///
/// `Queries` and `Keys` are those of the attention that follows: lengths count the new keys, too. Token `i` of `q_len` in a sequence with
/// `kv_len` keys gets the key `kv_len − q_len + i`, which is its position, unless [positions](Self::positions) are given.
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
    rotary: Option<Rotary>,
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
    /// Queries of `heads` heads (0 where there are none to turn), keys and values of `kv_heads`, of `head_dim` features in `dtype`, into a
    /// cache in `dtype`: queries `[tokens, heads, head_dim]`, new keys and values `[tokens, kv_heads, head_dim]`, the cache
    /// `[keys, kv_heads, head_dim]`, of pages `[pages, page_size, kv_heads, head_dim]`. Nothing is turned unless a
    /// [rotary embedding](Self::rotary) is stated.
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
            rotary: None,
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

    /// Turns queries and keys.
    pub fn rotary(mut self, rotary: Rotary) -> Self {
        self.rotary = Some(rotary);
        self
    }

    /// A run is given the position of each token ([`KvAppendArgs::positions`](crate::KvAppendArgs::positions)).
    pub fn positions(mut self) -> Self {
        self.positions = true;
        self
    }

    /// Features of a value, where they are not those of a key.
    pub fn v_dim(mut self, features: usize) -> Self {
        self.v_dim = features;
        self
    }

    /// Format of the cache. E4M3 has a factor a head, which a run is given: numbers are divided by it. Q8_0 and Q4_0 have scales of blocks, which are written, too.
    pub fn kv_format(mut self, format: KvFormat) -> Self {
        self.kv = format;
        self
    }

    /// Elements from one token of the queries to the next, and from one head to the next; no two heads of tokens may overlap.
    pub fn q_strides(mut self, token: u64, head: u64) -> Self {
        self.q = Some([token, head]);
        self
    }

    /// Elements from one token of the new keys to the next, and from one head to the next.
    pub fn new_k_strides(mut self, token: u64, head: u64) -> Self {
        self.new_k = Some([token, head]);
        self
    }

    /// Elements from one token of the new values to the next, and from one head to the next.
    pub fn new_v_strides(mut self, token: u64, head: u64) -> Self {
        self.new_v = Some([token, head]);
        self
    }

    /// How the keys of the cache lie; no two heads of keys may overlap.
    pub fn k_strides(mut self, strides: KvStrides) -> Self {
        self.k = Some(strides);
        self
    }

    /// How the values of the cache lie; no two heads of values may overlap.
    pub fn v_strides(mut self, strides: KvStrides) -> Self {
        self.v = Some(strides);
        self
    }

    /// What the addresses of queries, new keys and new values are multiples of, in bytes, at every run. 16 when not given.
    pub fn alignment(mut self, bytes: usize) -> Self {
        self.alignment = bytes;
        self
    }

    /// What the addresses of the cache are multiples of, in bytes, at every run. 16 when not given.
    pub fn kv_alignment(mut self, bytes: usize) -> Self {
        self.kv_alignment = bytes;
        self
    }

    /// The frequencies of the rotary embedding, where it has some.
    pub(super) fn frequencies(&self) -> Option<Vec<u64>> {
        self.rotary.and_then(|rotary| rotary.frequencies())
    }

    /// Validates everything that does not depend on the buffers of a run.
    pub(crate) fn check(&self) -> Result<CheckedKvAppend, Error> {
        let addressing = addressing(self.queries, self.keys)?;
        let &Self { dtype, kv, heads, kv_heads, qk_dim, v_dim, positions, .. } = self;
        check_count("heads", heads, 0, MOST_HEADS)?;
        check_count("heads of keys", kv_heads, 1, MOST_HEADS)?;
        check_head_dims(qk_dim, v_dim, kv)?;
        let Addressing { tokens, .. } = addressing;
        let Paging { pages, page_size, .. } = addressing.paging();
        let of_tokens = |name, heads: usize, strides: Option<[u64; 2]>, columns: usize| {
            let [token, head] = strides.unwrap_or([(heads * columns) as u64, columns as u64]);
            let rows = HeadsOf::of_tokens(name, heads, columns, dtype);
            rows.check([0, token, head], [1, tokens], self.alignment).map(|kv| kv.rows)
        };
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
        let op = CheckedKvAppend {
            addressing,
            heads,
            kv_heads,
            qk_dim,
            v_dim,
            dtype,
            kv,
            q: of_tokens("q", heads, self.q, qk_dim)?,
            new_k: of_tokens("new k", kv_heads, self.new_k, qk_dim)?,
            new_v: of_tokens("new v", kv_heads, self.new_v, v_dim)?,
            k: of_cache("k", self.k, qk_dim)?,
            v: of_cache("v", self.v, v_dim)?,
            rotary: self.rotary.map(|rotary| rotary.check(qk_dim)).transpose()?,
            positions,
        };
        if heads > 0 && !op.q.is_injective(tokens, heads, qk_dim) {
            return Err(overlapping("q", &op.q, qk_dim));
        }
        Ok(op)
    }
}

fn overlapping(operand: &'static str, rows: &HeadRows, columns: usize) -> Error {
    let &HeadRows { token_stride, head_stride, .. } = rows;
    Error::OverlappingHeads { operand, token_stride, head_stride, columns }
}

/// Whether no two heads of a cache share an element: each stride leaves room for all that lies within smaller ones.
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
