//! [`AttentionPlan`]: ready kernels of one attention.

use qgemm_formats::{DType, ElementType};
use qgemm_hal::op::attention::{KV_BLOCK, KV_SCALES};
use qgemm_hal::{
    AttentionOperand, AttentionPlan as Launch, BufferMut, BufferRef, CheckedAttention, DeviceInfo, Families, HeadRows,
    KvFormat, KvRows, Stream,
};
use qgemm_sched::{Candidates, Preferences, SchedError, TunedTable, attention, wanted_families};

use super::description::{Attention, extent_bytes};
use crate::context::Context;
use crate::error::Error;
use crate::operand::{Extent, WIDE_ACCESS};
use crate::planned::{Bound, Chosen, Planned, Wanted, explain};
use crate::record::{Dispatch, PlanRecord, Recorded, Reduction, ReductionOrder, SplitAxis, WorkspaceRegion};
use crate::workspace::Workspace;

/// Ready kernels of one [`Attention`], from
/// [`Context::plan_attention`]. Its text lists the launches of a
/// run.
pub type AttentionPlan = Planned<CheckedAttention>;

/// Operands of one run of an [`AttentionPlan`].
#[derive(Debug)]
#[non_exhaustive]
pub struct AttentionArgs<'a> {
    /// Queries.
    pub q: BufferRef<'a>,
    /// Keys.
    pub k: BufferRef<'a>,
    /// Values.
    pub v: BufferRef<'a>,
    /// Written: the results.
    pub d: BufferMut<'a>,
    /// Factors of the keys, for formats with factors: an f32 per KV
    /// head.
    pub k_factors: Option<BufferRef<'a>>,
    /// Factors of the values, for formats with factors: an f32 per KV
    /// head.
    pub v_factors: Option<BufferRef<'a>>,
    /// Scales of the keys, for formats with scales: an f16 per 32
    /// features. Element `i` of the keys, stride gaps included, has
    /// scale `i / 32`.
    pub k_scales: Option<BufferRef<'a>>,
    /// Scales of the values, in the layout of the key scales.
    pub v_scales: Option<BufferRef<'a>>,
    /// Offsets of the query tokens of each sequence, and their end,
    /// for [`Queries::offsets`](crate::Queries::offsets): u32.
    pub q_offsets: Option<BufferRef<'a>>,
    /// Offsets of the keys of each sequence, and their end, for
    /// [`Keys::offsets`](crate::Keys::offsets): u32.
    pub kv_offsets: Option<BufferRef<'a>>,
    /// Number of keys of each sequence, for
    /// [`Keys::lengths`](crate::Keys::lengths) and
    /// [`Keys::paged`](crate::Keys::paged): u32.
    pub kv_lengths: Option<BufferRef<'a>>,
    /// Page indices of each sequence, for
    /// [`Keys::paged`](crate::Keys::paged): u32.
    pub block_table: Option<BufferRef<'a>>,
    /// Bit mask of visible keys per query, for [`Attention::mask`]:
    /// u32.
    pub mask: Option<BufferRef<'a>>,
    /// Sink of each query head, for [`Attention::sinks`]: f32.
    pub sinks: Option<BufferRef<'a>>,
    /// Output gate, of D's shape and type, for [`Attention::gated`].
    pub gate: Option<BufferRef<'a>>,
    /// Log-sum-exp, an f32 output `[tokens, heads]`, when the
    /// attention [returns it](Attention::log_sum_exp).
    pub lse: Option<BufferMut<'a>>,
    /// Workspace of at least [`AttentionPlan::workspace_bytes`], when
    /// that is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

impl<'a> AttentionArgs<'a> {
    /// Operands of every run. Methods add the other operands.
    pub fn new(
        q: impl Into<BufferRef<'a>>,
        k: impl Into<BufferRef<'a>>,
        v: impl Into<BufferRef<'a>>,
        d: impl Into<BufferMut<'a>>,
    ) -> Self {
        Self {
            q: q.into(),
            k: k.into(),
            v: v.into(),
            d: d.into(),
            k_factors: None,
            v_factors: None,
            k_scales: None,
            v_scales: None,
            q_offsets: None,
            kv_offsets: None,
            kv_lengths: None,
            block_table: None,
            mask: None,
            sinks: None,
            gate: None,
            lse: None,
            workspace: None,
        }
    }

    /// With factors of the keys per KV head.
    pub fn k_factors(mut self, k_factors: impl Into<BufferRef<'a>>) -> Self {
        self.k_factors = Some(k_factors.into());
        self
    }

    /// With factors of the values per KV head.
    pub fn v_factors(mut self, v_factors: impl Into<BufferRef<'a>>) -> Self {
        self.v_factors = Some(v_factors.into());
        self
    }

    /// With the scales of the blocks of keys.
    pub fn k_scales(mut self, k_scales: impl Into<BufferRef<'a>>) -> Self {
        self.k_scales = Some(k_scales.into());
        self
    }

    /// With the scales of the blocks of values.
    pub fn v_scales(mut self, v_scales: impl Into<BufferRef<'a>>) -> Self {
        self.v_scales = Some(v_scales.into());
        self
    }

    /// With the offsets of the queries.
    pub fn q_offsets(mut self, q_offsets: impl Into<BufferRef<'a>>) -> Self {
        self.q_offsets = Some(q_offsets.into());
        self
    }

    /// With the offsets of the keys.
    pub fn kv_offsets(mut self, kv_offsets: impl Into<BufferRef<'a>>) -> Self {
        self.kv_offsets = Some(kv_offsets.into());
        self
    }

    /// With the lengths of the sequences.
    pub fn kv_lengths(mut self, kv_lengths: impl Into<BufferRef<'a>>) -> Self {
        self.kv_lengths = Some(kv_lengths.into());
        self
    }

    /// With the block table.
    pub fn block_table(mut self, block_table: impl Into<BufferRef<'a>>) -> Self {
        self.block_table = Some(block_table.into());
        self
    }

    /// With the mask.
    pub fn mask(mut self, mask: impl Into<BufferRef<'a>>) -> Self {
        self.mask = Some(mask.into());
        self
    }

    /// With the sinks of the query heads.
    pub fn sinks(mut self, sinks: impl Into<BufferRef<'a>>) -> Self {
        self.sinks = Some(sinks.into());
        self
    }

    /// With the output gate.
    pub fn gate(mut self, gate: impl Into<BufferRef<'a>>) -> Self {
        self.gate = Some(gate.into());
        self
    }

    /// With a buffer for the log-sum-exp.
    pub fn lse(mut self, lse: impl Into<BufferMut<'a>>) -> Self {
        self.lse = Some(lse.into());
        self
    }

    /// With a workspace.
    pub fn workspace(mut self, workspace: &'a mut Workspace) -> Self {
        self.workspace = Some(workspace);
        self
    }
}

impl Context {
    /// Chooses kernels for `attention` and makes them ready. A known
    /// problem costs a lookup, as with [`Context::plan`].
    ///
    /// ```
    /// use qgemm_api::{Attention, AttentionArgs, Context, DType, Keys, Queries};
    ///
    /// let ctx = Context::open("cpu")?;
    /// // One query of each of two sequences, with room for four keys each; one head of eight features.
    /// let attention = Attention::new(DType::F32, 1, 1, 8, Queries::each(2, 1), Keys::lengths(4)).causal();
    /// let plan = ctx.plan_attention(&attention)?;
    /// let (q, k) = (ctx.upload(&[0.5f32; 2 * 8])?, ctx.upload(&[1.0f32; 2 * 4 * 8])?);
    /// let values: Vec<f32> = (0..2 * 4 * 8).map(|i| (i / 8) as f32).collect();
    /// let (v, lengths) = (ctx.upload(&values)?, ctx.upload(&[3u32, 1])?);
    /// let mut d = ctx.allocate(2 * 8 * 4)?;
    /// let args = AttentionArgs::new(&q, &k, &v, &mut d);
    /// plan.run(&ctx.default_stream(), args.kv_lengths(&lengths))?;
    /// let means: Vec<f32> = ctx.download(&d)?; // all keys are alike: the means of the values 0, 1, 2, and of 4
    /// assert!(means[..8].iter().all(|v| (v - 1.0).abs() < 1e-6) && means[8..].iter().all(|v| *v == 4.0));
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the attention is invalid or no family serves it, or when
    /// a kernel cannot be prepared.
    pub fn plan_attention(&self, attention: &Attention) -> Result<AttentionPlan, Error> {
        Planned::new(self, attention.check()?, attention.preferences())
    }

    /// Plans of all candidates of [`Context::plan_attention`],
    /// fastest first by the cost model. Empty without queries. For
    /// tests of every candidate.
    ///
    /// # Errors
    /// As [`Context::plan_attention`].
    pub fn plan_attention_candidates(&self, attention: &Attention) -> Result<Vec<AttentionPlan>, Error> {
        Planned::of_candidates(self, &attention.check()?, &attention.preferences())
    }

    /// Record of the choice of [`Context::plan_attention`]: see
    /// [`Context::explain`].
    ///
    /// # Errors
    /// When the attention is invalid, or the requested family does
    /// not exist.
    pub fn explain_attention(&self, problem: &Attention) -> Result<PlanRecord, Error> {
        explain(self, &problem.check()?, &problem.preferences())
    }
}

impl Chosen for CheckedAttention {
    fn candidates(
        &self,
        info: &DeviceInfo,
        families: Families<Self>,
        preferences: &Preferences,
        _: &TunedTable,
    ) -> Result<Candidates<'static, Self>, SchedError> {
        let families = wanted_families(families, preferences.family.as_deref(), info)?;
        Ok(attention::candidates(self, info, &families))
    }
}

impl Recorded for CheckedAttention {
    fn cut(plan: &Launch) -> String {
        match plan.config.parts {
            1 => "whole sequences".into(),
            parts => format!("keys in {parts} parts of {}", plan.config.part_keys),
        }
    }

    fn workspace(&self, plan: &Launch) -> Vec<WorkspaceRegion> {
        let name = if plan.config.parts > 1 { "partial results" } else { "lists of tiles" };
        let plain = plan.config.dequantized_bytes;
        let own = plan.config.workspace_bytes - plain;
        let mut regions = WorkspaceRegion::whole(name, own);
        regions.extend((plain > 0).then(|| WorkspaceRegion::new("dequantized keys and values", own, plain)));
        regions
    }

    fn dispatch(&self, plan: &Launch) -> Dispatch {
        Dispatch::along(SplitAxis::Head, plan.config.parts)
    }

    fn reduction(&self, plan: &Launch, _: &DeviceInfo) -> Option<Reduction> {
        (plan.config.parts > 1).then(|| Reduction::of_parts(self.workspace(plan), ReductionOrder::InOrder))
    }
}

impl Bound for CheckedAttention {
    fn wanted(&self, operand: AttentionOperand, used: bool) -> Wanted {
        use AttentionOperand as O;
        let paging = self.paging();
        let of = |strides, counts, columns, format: KvFormat, alignment| {
            // `Attention::check` has verified that the extents fit the
            // address space.
            let bytes = extent_bytes(strides, counts, columns, format).unwrap_or(u64::MAX) as usize;
            Extent::new(format.element(), bytes, alignment)
        };
        let of_tokens = |rows: &HeadRows, columns| {
            let alignment = if rows.aligned { WIDE_ACCESS } else { self.dtype.bytes() };
            let strides = [0, rows.token_stride, rows.head_stride];
            of(strides, [1, self.tokens, self.heads], columns, KvFormat::Plain(self.dtype), alignment)
        };
        let of_keys = |rows: &KvRows, columns, format: KvFormat| {
            let alignment = if rows.rows.aligned { format.vector_bytes() } else { format.width() };
            let strides = [rows.page_stride, rows.rows.token_stride, rows.rows.head_stride];
            of(strides, [paging.pages, paging.page_size, self.kv_heads], columns, format, alignment)
        };
        let scales = |name, of: Extent, format: KvFormat| {
            let extent = Extent::of_values(KV_SCALES, of.bytes() * 8 / format.bits() / KV_BLOCK);
            let why = "the format has scales of blocks";
            Wanted::optional(name, format.has_scales().then_some(extent), why)
        };
        let values = |name, element: ElementType, count, why| {
            Wanted::optional(name, used.then(|| Extent::of_values(element, count)), why)
        };
        let (word, number) = (ElementType::Int32, ElementType::from(DType::F32));
        let factors = "the format has a factor a head";
        match operand {
            O::Q => Wanted::always("q", of_tokens(&self.q, self.qk_dim)),
            O::K => Wanted::always("k", of_keys(&self.k, self.qk_dim, self.kv.k)),
            O::V => Wanted::always("v", of_keys(&self.v, self.v_dim, self.kv.v)),
            O::D => Wanted::always("d", of_tokens(&self.d, self.v_dim)),
            O::KFactors => values("k factors", number, self.kv_heads, factors),
            O::VFactors => values("v factors", number, self.kv_heads, factors),
            O::KScales => scales("k scales", of_keys(&self.k, self.qk_dim, self.kv.k), self.kv.k),
            O::VScales => scales("v scales", of_keys(&self.v, self.v_dim, self.kv.v), self.kv.v),
            O::QOffsets => values("q offsets", word, self.sequences + 1, "the attention finds queries by offsets"),
            O::KvOffsets => values("kv offsets", word, self.sequences + 1, "the attention finds keys by offsets"),
            O::KvLengths => values("kv lengths", word, self.sequences, "keys are as many as lengths say"),
            O::BlockTable => {
                values("block table", word, self.sequences * paging.width, "the attention finds keys by a table")
            }
            O::Mask => values("mask", word, self.mask_words(), "the attention has a bit mask"),
            O::Sinks => values("sinks", number, self.heads, "the attention has sinks"),
            O::Gate => {
                let extent = self.gate.as_ref().map(|gate| of_tokens(gate, self.v_dim));
                Wanted::optional("gate", extent, "the attention has an output gate")
            }
            O::Lse => values("lse", number, self.tokens * self.heads, "the attention writes it"),
            O::Workspace => Wanted::workspace("the plan keeps results of parts of the keys"),
        }
    }
}

impl AttentionPlan {
    /// Submits the attention to `stream`. A run allocates nothing,
    /// waits for nothing and takes no lock. A CUDA graph may capture
    /// it. Lengths, offsets and tables are read on the device at run
    /// time.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, unexpected
    /// or on another device; or on a device error. Nothing is written
    /// then.
    pub fn run(&self, stream: &Stream, mut args: AttentionArgs<'_>) -> Result<(), Error> {
        let workspace = args.workspace.take().map(Workspace::view);
        self.run_within(stream, args, workspace)
    }

    /// [`AttentionPlan::run`] with a workspace inside another buffer,
    /// instead of the one in `args`.
    pub(crate) fn run_within(
        &self,
        stream: &Stream,
        args: AttentionArgs<'_>,
        workspace: Option<BufferMut<'_>>,
    ) -> Result<(), Error> {
        use AttentionOperand as O;
        let mut run = self.start(stream)?;
        for (operand, view) in [(O::Q, args.q), (O::K, args.k), (O::V, args.v)] {
            run.read(operand, view)?;
        }
        run.write(O::D, args.d)?;
        let optional = [
            (O::KFactors, args.k_factors),
            (O::VFactors, args.v_factors),
            (O::KScales, args.k_scales),
            (O::VScales, args.v_scales),
            (O::QOffsets, args.q_offsets),
            (O::KvOffsets, args.kv_offsets),
            (O::KvLengths, args.kv_lengths),
            (O::BlockTable, args.block_table),
            (O::Mask, args.mask),
            (O::Sinks, args.sinks),
            (O::Gate, args.gate),
        ];
        optional.into_iter().try_for_each(|(operand, view)| run.read(operand, view))?;
        run.write(O::Lse, args.lse)?;
        run.workspace(workspace)?;
        run.launch(stream)
    }
}
