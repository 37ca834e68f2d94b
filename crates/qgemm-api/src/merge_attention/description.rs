//! Merge problem: the builder [`MergeAttention`] and its validation
//! into a [`CheckedMergeAttention`].

use qgemm_formats::DType;
use qgemm_hal::op::attention::HEAD_DIM_STEP;
use qgemm_hal::op::merge_attention::{MOST_DIM, MOST_PARTS};
use qgemm_hal::{CheckedMergeAttention, HeadRows, KvRows};

use crate::attention::{HeadsOf, MOST_HEADS, check_count};
use crate::error::Error;
use crate::operand::WIDE_ACCESS;

/// Most tokens.
const MOST_TOKENS: usize = i32::MAX as usize;

/// Merge of partial attention results by their log-sum-exp, for
/// [`Context::plan_merge_attention`]: cascade attention (a shared prefix
/// and suffixes), context parallelism, keys in several caches. It is
/// FlashInfer's `merge_states`.
///
/// ```text
/// m   = max over p of lse_p          w_p = exp(lse_p − m)
/// D   = Σ w_p D_p / Σ w_p            lse = m + ln Σ w_p
/// ```
///
/// The parts are what [`Attention`](crate::Attention) with
/// [`log_sum_exp`](crate::Attention::log_sum_exp) writes for disjoint
/// sets of keys: the merge is attention to all keys.
///
/// Arithmetic is f32, in the order of the parts, rounded once. A part
/// whose weight rounds to 0, as with a log-sum-exp of −∞, is not used,
/// even if it is NaN. Without any weight, D is 0 and the log-sum-exp
/// −∞. A log-sum-exp that is NaN or +∞ makes its row NaN. One part is
/// copied.
///
/// Defaults: D has the type of the parts, no gaps, no log-sum-exp.
///
/// [`Context::plan_merge_attention`]: crate::Context::plan_merge_attention
#[derive(Clone, Debug)]
pub struct MergeAttention {
    dtype: DType,
    parts: usize,
    tokens: usize,
    heads: usize,
    dim: usize,
    strides: Option<[u64; 3]>,
    d_dtype: DType,
    d_strides: Option<[u64; 2]>,
    alignment: usize,
    d_alignment: usize,
    lse: bool,
}

impl MergeAttention {
    /// Most parts.
    pub const MOST_PARTS: usize = MOST_PARTS;

    /// Merge of `parts` results `[tokens, heads, dim]` of type `dtype`:
    /// 1 to 256 parts, and a head dimension that is a multiple of 8 up
    /// to 576. With 0 tokens the plan launches nothing.
    pub fn new(dtype: DType, parts: usize, tokens: usize, heads: usize, dim: usize) -> Self {
        Self {
            dtype,
            parts,
            tokens,
            heads,
            dim,
            strides: None,
            d_dtype: dtype,
            d_strides: None,
            alignment: WIDE_ACCESS,
            d_alignment: WIDE_ACCESS,
            lse: false,
        }
    }

    /// Strides of the partial results between parts, tokens and heads,
    /// in elements. `[parts, tokens, heads, dim]` by default.
    pub fn part_strides(mut self, part: u64, token: u64, head: u64) -> Self {
        self.strides = Some([part, token, head]);
        self
    }

    /// Element type of D. By default that of the parts.
    pub fn d_dtype(mut self, dtype: DType) -> Self {
        self.d_dtype = dtype;
        self
    }

    /// Strides of D between tokens and heads, in elements; heads must
    /// not overlap. `[tokens, heads, dim]` by default.
    pub fn d_strides(mut self, token: u64, head: u64) -> Self {
        self.d_strides = Some([token, head]);
        self
    }

    /// Alignment of the address of the partial results in every run,
    /// in bytes. 16 by default, which all buffers of a context have;
    /// less is slower.
    pub fn alignment(mut self, bytes: usize) -> Self {
        self.alignment = bytes;
        self
    }

    /// Alignment of D's address, in bytes, at every run; 16 by
    /// default.
    pub fn d_alignment(mut self, bytes: usize) -> Self {
        self.d_alignment = bytes;
        self
    }

    /// Also writes the merged log-sum-exp, f32 `[tokens, heads]`: the
    /// result can be a part of another merge.
    pub fn log_sum_exp(mut self) -> Self {
        self.lse = true;
        self
    }

    /// Validates everything that is independent of a run's buffers.
    pub(super) fn check(&self) -> Result<CheckedMergeAttention, Error> {
        let &Self { dtype, parts, tokens, heads, dim, d_dtype, lse, .. } = self;
        let counts =
            [("parts", parts, 1, MOST_PARTS), ("tokens", tokens, 0, MOST_TOKENS), ("heads", heads, 1, MOST_HEADS)];
        counts.into_iter().try_for_each(|(name, got, least, most)| check_count(name, got, least, most))?;
        if dim == 0 || dim > MOST_DIM || !dim.is_multiple_of(HEAD_DIM_STEP) {
            let (name, step, most) = ("features of a head", HEAD_DIM_STEP, MOST_DIM);
            return Err(Error::HeadDim { name, step, most, got: dim });
        }
        let (head, token) = (dim as u64, (heads * dim) as u64);
        let strides = self.strides.unwrap_or([tokens as u64 * token, token, head]);
        let of_parts = HeadsOf::of_tokens("partial results", heads, dim, dtype);
        let KvRows { page_stride, rows: partial } = of_parts.check(strides, [parts, tokens], self.alignment)?;
        let [d_token, d_head] = self.d_strides.unwrap_or([token, head]);
        let d = HeadsOf::of_tokens("d", heads, dim, d_dtype)
            .check([0, d_token, d_head], [1, tokens], self.d_alignment)?
            .rows;
        if !d.is_injective(tokens, heads, dim) {
            let HeadRows { token_stride, head_stride, .. } = d;
            return Err(Error::OverlappingHeads { operand: "d", token_stride, head_stride, columns: dim });
        }
        Ok(CheckedMergeAttention {
            parts,
            tokens,
            heads,
            dim,
            dtype,
            part_stride: page_stride,
            partial,
            d_dtype,
            d,
            lse,
        })
    }
}
