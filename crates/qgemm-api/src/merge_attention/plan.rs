//! [`MergeAttentionPlan`]: the ready kernel of one merge.

use qgemm_formats::DType;
use qgemm_hal::{BufferMut, BufferRef, CheckedMergeAttention, HeadRows, KvFormat, MergeAttentionOperand, Stream};
use qgemm_sched::Preferences;

use super::description::MergeAttention;
use crate::attention::extent_bytes;
use crate::context::Context;
use crate::error::Error;
use crate::operand::{Extent, WIDE_ACCESS};
use crate::planned::{Bound, Planned, Wanted, chosen_by_traffic, explain};
use crate::record::{PlanRecord, Recorded};
use crate::setters::setters;

/// Ready kernel of one [`MergeAttention`], from
/// [`Context::plan_merge_attention`]. Its text lists the launches of
/// a run.
pub type MergeAttentionPlan = Planned<CheckedMergeAttention>;

/// Operands of one run of a [`MergeAttentionPlan`].
#[derive(Debug)]
#[non_exhaustive]
pub struct MergeAttentionArgs<'a> {
    /// Results of the parts, `[parts, tokens, heads, dim]`.
    pub partial: BufferRef<'a>,
    /// Log-sum-exps of the parts, f32 `[parts, tokens, heads]`.
    pub partial_lse: BufferRef<'a>,
    /// Written: the merged results, `[tokens, heads, dim]`.
    pub d: BufferMut<'a>,
    /// Merged log-sum-exp, an f32 output `[tokens, heads]`, when the
    /// merge [returns it](MergeAttention::log_sum_exp).
    pub lse: Option<BufferMut<'a>>,
}

impl<'a> MergeAttentionArgs<'a> {
    /// Operands of every run.
    pub fn new(
        partial: impl Into<BufferRef<'a>>,
        partial_lse: impl Into<BufferRef<'a>>,
        d: impl Into<BufferMut<'a>>,
    ) -> Self {
        Self { partial: partial.into(), partial_lse: partial_lse.into(), d: d.into(), lse: None }
    }

    setters! {
        /// With the merged log-sum-exp.
        lse: BufferMut,
    }
}

impl Context {
    /// Chooses a kernel for `merge` and makes it ready. A known problem
    /// costs a lookup, as with [`Context::plan`].
    ///
    /// ```
    /// use qgemm_api::{Context, DType, MergeAttention, MergeAttentionArgs};
    ///
    /// // Two parts of one token with one head: the second saw three times as much weight.
    /// let ctx = Context::open("cpu")?;
    /// let plan = ctx.plan_merge_attention(&MergeAttention::new(DType::F32, 2, 1, 1, 8).log_sum_exp())?;
    /// let partial = ctx.upload(&[[1.0f32; 8], [5.0; 8]].concat())?; // [parts, tokens, heads, dim]
    /// let partial_lse = ctx.upload(&[0.0f32, 3f32.ln()])?; // [parts, tokens, heads]
    /// let (mut d, mut lse) = (ctx.allocate(8 * 4)?, ctx.allocate(4)?);
    /// let args = MergeAttentionArgs::new(&partial, &partial_lse, &mut d).lse(&mut lse);
    /// plan.run(&ctx.default_stream(), args)?;
    /// let (d, lse): (Vec<f32>, Vec<f32>) = (ctx.download(&d)?, ctx.download(&lse)?);
    /// assert!(d.iter().all(|v| (v - 4.0).abs() < 1e-5) && (lse[0] - 4f32.ln()).abs() < 1e-5);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the merge is invalid or no family serves it, or when a
    /// kernel cannot be prepared.
    pub fn plan_merge_attention(&self, merge: &MergeAttention) -> Result<MergeAttentionPlan, Error> {
        Planned::new(self, merge.check()?, Preferences::default())
    }

    /// Record of the choice of [`Context::plan_merge_attention`]: see
    /// [`Context::explain`].
    ///
    /// # Errors
    /// When the merge is invalid.
    pub fn explain_merge_attention(&self, merge: &MergeAttention) -> Result<PlanRecord, Error> {
        explain(self, &merge.check()?, &Preferences::default())
    }
}

chosen_by_traffic!(CheckedMergeAttention);

impl Recorded for CheckedMergeAttention {}

impl Bound for CheckedMergeAttention {
    fn wanted(&self, operand: MergeAttentionOperand, _: bool) -> Wanted {
        use MergeAttentionOperand as O;
        let of_heads = |parts: usize, part_stride: u64, rows: &HeadRows, dtype: DType| {
            let (strides, counts) =
                ([part_stride, rows.token_stride, rows.head_stride], [parts, self.tokens, self.heads]);
            // `MergeAttention::check` has verified that the extents fit the
            // address space.
            let bytes = extent_bytes(strides, counts, self.dim, KvFormat::Plain(dtype)).unwrap_or(u64::MAX);
            Extent::new(dtype, bytes as usize, if rows.aligned { WIDE_ACCESS } else { dtype.bytes() })
        };
        let numbers = |count: usize| Extent::of_values(DType::F32, count);
        match operand {
            O::Partial => {
                let extent = of_heads(self.parts, self.part_stride, &self.partial, self.dtype);
                Wanted::always("partial results", extent)
            }
            O::PartialLse => Wanted::always("partial log-sum-exps", numbers(self.parts * self.rows())),
            O::D => Wanted::always("d", of_heads(1, 0, &self.d, self.d_dtype)),
            O::Lse => Wanted::optional("log-sum-exp", self.lse.then(|| numbers(self.rows())), "the merge writes it"),
        }
    }
}

impl MergeAttentionPlan {
    /// Submits the merge to `stream`. A run allocates nothing, waits
    /// for nothing and takes no lock. A CUDA graph may capture it.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, unexpected
    /// or on another device; or on a device error. Nothing is written
    /// then.
    pub fn run(&self, stream: &Stream, args: MergeAttentionArgs<'_>) -> Result<(), Error> {
        use MergeAttentionOperand as O;
        let mut run = self.start(stream)?;
        run.read(O::Partial, args.partial)?;
        run.read(O::PartialLse, args.partial_lse)?;
        run.write(O::D, args.d)?;
        run.write(O::Lse, args.lse)?;
        run.launch(stream)
    }
}
