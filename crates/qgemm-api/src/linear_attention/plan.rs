//! [`LinearAttentionPlan`]: the ready kernels of one linear attention.

use qgemm_formats::{DType, ElementType};
use qgemm_hal::op::linear_attention::DecayPer;
use qgemm_hal::{BufferMut, BufferRef, CheckedLinearAttention, HeadRows, KvFormat, LinearAttentionOperand, Stream};
use qgemm_sched::Preferences;

use super::description::LinearAttention;
use crate::attention::extent_bytes;
use crate::context::Context;
use crate::error::Error;
use crate::operand::{Extent, WIDE_ACCESS};
use crate::planned::{Bound, Planned, Wanted, chosen_by_traffic, explain};
use crate::record::{PlanRecord, Recorded, WorkspaceRegion};
use crate::setters::setters;
use crate::workspace::Workspace;

/// Ready kernels of one [`LinearAttention`], from
/// [`Context::plan_linear_attention`]. Its text lists the launches of
/// a run.
pub type LinearAttentionPlan = Planned<CheckedLinearAttention>;

/// Operands of one run of a [`LinearAttentionPlan`].
#[derive(Debug)]
#[non_exhaustive]
pub struct LinearAttentionArgs<'a> {
    /// Queries, `[tokens, key heads, key dim]`.
    pub q: BufferRef<'a>,
    /// Keys, `[tokens, key heads, key dim]`.
    pub k: BufferRef<'a>,
    /// Values, `[tokens, heads, v_dim]`.
    pub v: BufferRef<'a>,
    /// Read and written: states, f32 `[slots, heads, v_dim, key dim]`.
    pub states: BufferMut<'a>,
    /// Written: results, `[tokens, heads, v_dim]`.
    pub d: BufferMut<'a>,
    /// Log-decay, or `a`, with [`LinearAttention::decay`].
    pub decay: Option<BufferRef<'a>>,
    /// Logarithm of the decay rate of each head, f32, with
    /// [`Decay::softplus`](crate::Decay::softplus).
    pub a_log: Option<BufferRef<'a>>,
    /// Summand of `a`, f32, with
    /// [`Decay::softplus`](crate::Decay::softplus).
    pub dt_bias: Option<BufferRef<'a>>,
    /// β, f32 `[tokens, heads]`, with [`LinearAttention::beta`].
    pub beta: Option<BufferRef<'a>>,
    /// Factor of V for each head, f32, with [`LinearAttention::skip`].
    pub skip: Option<BufferRef<'a>>,
    /// Token offsets of each sequence, and their end, for
    /// [`Queries::offsets`](crate::Queries::offsets): u32.
    pub q_offsets: Option<BufferRef<'a>>,
    /// Slot of each sequence, i32, with
    /// [`LinearAttention::slot_indices`].
    pub slots: Option<BufferRef<'a>>,
    /// Tokens of each sequence that enter its stored state, u32, with
    /// [`LinearAttention::advance`].
    pub advance: Option<BufferRef<'a>>,
    /// First tokens of each sequence without output, u32, with
    /// [`LinearAttention::pending`].
    pub pending: Option<BufferRef<'a>>,
    /// Workspace of at least
    /// [`LinearAttentionPlan::workspace_bytes`](Planned::workspace_bytes),
    /// when that is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

impl<'a> LinearAttentionArgs<'a> {
    /// Operands of every run.
    pub fn new(
        q: impl Into<BufferRef<'a>>,
        k: impl Into<BufferRef<'a>>,
        v: impl Into<BufferRef<'a>>,
        states: impl Into<BufferMut<'a>>,
        d: impl Into<BufferMut<'a>>,
    ) -> Self {
        Self {
            q: q.into(),
            k: k.into(),
            v: v.into(),
            states: states.into(),
            d: d.into(),
            decay: None,
            a_log: None,
            dt_bias: None,
            beta: None,
            skip: None,
            q_offsets: None,
            slots: None,
            advance: None,
            pending: None,
            workspace: None,
        }
    }

    setters! {
        /// With the log-decay.
        decay: BufferRef,
        /// With β.
        beta: BufferRef,
        /// With the factors of V.
        skip: BufferRef,
        /// With the token offsets.
        q_offsets: BufferRef,
        /// With the slot of each sequence.
        slots: BufferRef,
        /// With the tokens that enter the stored states.
        advance: BufferRef,
        /// With the numbers of first tokens without output.
        pending: BufferRef,
    }

    /// With the operands of [`Decay::softplus`](crate::Decay::softplus).
    pub fn made_decay(
        mut self,
        a: impl Into<BufferRef<'a>>,
        a_log: impl Into<BufferRef<'a>>,
        dt_bias: impl Into<BufferRef<'a>>,
    ) -> Self {
        (self.decay, self.a_log, self.dt_bias) = (Some(a.into()), Some(a_log.into()), Some(dt_bias.into()));
        self
    }

    /// With a workspace.
    pub fn workspace(mut self, workspace: &'a mut Workspace) -> Self {
        self.workspace = Some(workspace);
        self
    }
}

impl Context {
    /// Chooses a kernel for `attention` and makes it ready. A known
    /// problem costs a lookup, as with [`Context::plan`].
    ///
    /// # Errors
    /// When the attention is invalid or no family serves it, or when a
    /// kernel cannot be prepared.
    pub fn plan_linear_attention(&self, attention: &LinearAttention) -> Result<LinearAttentionPlan, Error> {
        Planned::new(self, attention.check()?, Preferences::default())
    }

    /// Record of the choice of [`Context::plan_linear_attention`]: see
    /// [`Context::explain`].
    ///
    /// # Errors
    /// When the attention is invalid.
    pub fn explain_linear_attention(&self, attention: &LinearAttention) -> Result<PlanRecord, Error> {
        explain(self, &attention.check()?, &Preferences::default())
    }
}

chosen_by_traffic!(CheckedLinearAttention);

impl Recorded for CheckedLinearAttention {
    fn workspace(&self, plan: &qgemm_hal::LinearAttentionPlan) -> Vec<WorkspaceRegion> {
        WorkspaceRegion::whole("decays and indices", plan.config.workspace_bytes)
    }
}

impl Bound for CheckedLinearAttention {
    fn wanted(&self, operand: LinearAttentionOperand, used: bool) -> Wanted {
        use LinearAttentionOperand as O;
        // `LinearAttention::check` has verified that the extents fit the
        // address space.
        let of = |strides, counts, columns, dtype: DType, alignment| {
            let bytes = extent_bytes(strides, counts, columns, KvFormat::Plain(dtype)).unwrap_or(u64::MAX);
            Extent::new(dtype, bytes as usize, alignment)
        };
        let of_heads = |rows: &HeadRows, heads, columns| {
            let alignment = if rows.aligned { WIDE_ACCESS } else { self.dtype.bytes() };
            of([0, rows.token_stride, rows.head_stride], [1, self.tokens, heads], columns, self.dtype, alignment)
        };
        let of_tokens =
            |stride, columns, dtype: DType| of([0, stride, 0], [1, self.tokens, 1], columns, dtype, dtype.bytes());
        let optional = |name, extent: Extent, why| Wanted::optional(name, used.then_some(extent), why);
        let numbers = |count| Extent::of_values(DType::F32, count);
        let words = |count| Extent::of_values(ElementType::Int32, count);
        let is_made = "the decay is made of it";
        match operand {
            O::Q => Wanted::always("q", of_heads(&self.q, self.key_heads, self.qk_dim)),
            O::K => Wanted::always("k", of_heads(&self.k, self.key_heads, self.qk_dim)),
            O::V => Wanted::always("v", of_heads(&self.v, self.heads, self.v_dim)),
            O::D => Wanted::always("d", of_heads(&self.d, self.heads, self.v_dim)),
            O::Decay => {
                let (stride, dtype) = self.decay.map_or((0, DType::F32), |decay| (decay.token_stride, decay.dtype()));
                optional("decay", of_tokens(stride, self.token_decays().max(1), dtype), "the state decays")
            }
            O::ALog => optional("a_log", numbers(self.heads), is_made),
            O::DtBias => {
                let per_feature = self.decay.is_some_and(|decay| decay.per == DecayPer::Feature);
                let of_head = if per_feature { self.qk_dim } else { 1 };
                optional("dt_bias", numbers(self.heads * of_head), is_made)
            }
            O::Beta => optional(
                "beta",
                of_tokens(self.beta.map_or(0, |beta| beta.token_stride), self.heads, DType::F32),
                "beta is given",
            ),
            O::Skip => optional("skip", numbers(self.heads), "values are added to the results"),
            O::States => {
                let state = self.heads * self.state_len();
                Wanted::always(
                    "states",
                    of([self.slot_stride, 0, 0], [self.slots, 1, 1], state, DType::F32, WIDE_ACCESS),
                )
            }
            O::QOffsets => optional("q offsets", words(self.sequences + 1), "tokens are found by offsets"),
            O::Slots => optional("slots", words(self.sequences), "slot indices are given"),
            O::Advance => optional("advance", words(self.sequences), "not all tokens enter the state"),
            O::Pending => optional("pending", words(self.sequences), "some tokens have no output"),
            O::Workspace => Wanted::workspace("decays and indices are gathered there"),
        }
    }
}

impl LinearAttentionPlan {
    /// Tokens that a step of the recurrence processes. With more than 1,
    /// bits depend on how tokens are spread over runs, and a NaN or an
    /// infinity among a chunk's operands reaches results of the whole chunk.
    pub fn step_tokens(&self) -> usize {
        self.launch().map_or(1, |plan| plan.config.step_tokens as usize)
    }

    /// Submits the attention to `stream`. A run allocates nothing, waits
    /// for nothing and takes no lock. A CUDA graph may capture it.
    /// Offsets, slots and counts are read on the device at run time.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, unexpected
    /// or on another device; or on a device error. Nothing is written
    /// then.
    pub fn run(&self, stream: &Stream, mut args: LinearAttentionArgs<'_>) -> Result<(), Error> {
        let workspace = args.workspace.take().map(Workspace::view);
        self.run_within(stream, args, workspace)
    }

    /// [`LinearAttentionPlan::run`] with a workspace inside another
    /// buffer, instead of the one in `args`.
    pub(crate) fn run_within(
        &self,
        stream: &Stream,
        args: LinearAttentionArgs<'_>,
        workspace: Option<BufferMut<'_>>,
    ) -> Result<(), Error> {
        use LinearAttentionOperand as O;
        let mut run = self.start(stream)?;
        run.read(O::Q, args.q)?;
        run.read(O::K, args.k)?;
        run.read(O::V, args.v)?;
        let optional = [
            (O::Decay, args.decay),
            (O::ALog, args.a_log),
            (O::DtBias, args.dt_bias),
            (O::Beta, args.beta),
            (O::Skip, args.skip),
            (O::QOffsets, args.q_offsets),
            (O::Slots, args.slots),
            (O::Advance, args.advance),
            (O::Pending, args.pending),
        ];
        optional.into_iter().try_for_each(|(operand, view)| run.read(operand, view))?;
        run.write(O::States, args.states)?;
        run.write(O::D, args.d)?;
        run.workspace(workspace)?;
        run.launch(stream)
    }
}
