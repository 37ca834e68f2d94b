//! [`RoutingPlan`]: ready kernels of one routing.

use qgemm_formats::{DType, ElementType};
use qgemm_hal::op::routing::{STATUS_BAD_ID, STATUS_FINE, STATUS_WORDS};
use qgemm_hal::{BufferMut, BufferRef, CheckedRouting, RoutingLaunches, RoutingOperand, Stream};
use qgemm_sched::Preferences;

use super::description::Routing;
use crate::context::Context;
use crate::error::Error;
use crate::operand::{Checks, Extent, portion_of};
use crate::planned::{Bound, Planned, Wanted, chosen_by_traffic, explain};
use crate::record::{PlanRecord, Recorded, WorkspaceRegion};
use crate::workspace::Workspace;

/// Bytes of a word of the status.
const WORD: usize = 4;

/// Ready kernels of one [`Routing`], from
/// [`Context::plan_routing`]. Its text lists the launches of a
/// run.
pub type RoutingPlan = Planned<CheckedRouting>;

/// Lists of slots by expert: slot `j` of token `t` is
/// `t · top_k + j`.
///
/// List `e` is `rows[offsets[e]..offsets[e + 1]]`, in ascending
/// order. A slot without an expert is in no list. After the last
/// list, each such slot leaves a `u32::MAX`.
#[derive(Debug)]
pub struct RoutingLists<'a> {
    /// Offsets output: a u32 for every local expert, and one more.
    pub offsets: BufferMut<'a>,
    /// Counts output: a u32 for every local expert.
    pub counts: BufferMut<'a>,
    /// Slots output: a u32 for every slot.
    pub rows: BufferMut<'a>,
}

impl<'a> RoutingLists<'a> {
    /// Buffers of the lists.
    pub fn new(
        offsets: impl Into<BufferMut<'a>>,
        counts: impl Into<BufferMut<'a>>,
        rows: impl Into<BufferMut<'a>>,
    ) -> Self {
        Self { offsets: offsets.into(), counts: counts.into(), rows: rows.into() }
    }
}

/// Operands of one run of a [`RoutingPlan`].
///
/// ```
/// use qgemm_api::{Context, DType, Routing, RoutingArgs};
///
/// let ctx = Context::open("cpu")?;
/// // Two of four experts for each of two tokens.
/// let plan = ctx.plan_routing(&Routing::from_logits(2, 4, 2, DType::F32).renormalized())?;
/// let logits = ctx.upload(&DType::F32.encode(&[0.0, 1.0, 9.0, 1.0, 2.0, -1.0, 0.5, f32::NAN]))?;
/// let (mut ids, mut weights) = (ctx.allocate(2 * 2 * 4)?, ctx.allocate(2 * 2 * 4)?);
/// let mut status = ctx.allocate(16)?;
/// let args = RoutingArgs::of_logits(&logits, &mut ids, &mut weights, &mut status);
/// plan.run(&ctx.default_stream(), args)?;
/// plan.check_status(&ctx, &status)?;
/// let ids: Vec<u32> = ctx.download(&ids)?; // u32::MAX would be -1: no expert
/// assert_eq!(ids, [2, 1, 0, 2]);
/// # let weights: Vec<f32> = ctx.download(&weights)?;
/// # assert!((weights[2] - 0.8176).abs() < 1e-4 && (weights[2] + weights[3] - 1.0).abs() < 1e-6);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct RoutingArgs<'a> {
    /// Logits, for a routing that chooses experts.
    pub logits: Option<BufferRef<'a>>,
    /// Ids, for a routing of given ids: `top_k` i32 per token.
    pub given_ids: Option<BufferRef<'a>>,
    /// Bias, an f32 per expert, when the routing is
    /// [biased](Routing::biased).
    pub bias: Option<BufferRef<'a>>,
    /// Ids output of a routing that chooses experts: `top_k` i32 per
    /// token.
    pub ids: Option<BufferMut<'a>>,
    /// Weights output of a routing that chooses experts: `top_k` f32
    /// per token.
    pub weights: Option<BufferMut<'a>>,
    /// Lists output, for given ids and when the routing makes
    /// [lists](Routing::lists).
    pub lists: Option<RoutingLists<'a>>,
    /// Status output of 16 bytes, for [`RoutingPlan::check_status`].
    pub status: BufferMut<'a>,
    /// Tokens of this run, if fewer than planned.
    pub tokens: Option<usize>,
    /// Workspace of at least [`RoutingPlan::workspace_bytes`], when
    /// that is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

impl<'a> RoutingArgs<'a> {
    /// Operands with a status. Methods add the other operands.
    pub fn new(status: impl Into<BufferMut<'a>>) -> Self {
        Self {
            logits: None,
            given_ids: None,
            bias: None,
            ids: None,
            weights: None,
            lists: None,
            status: status.into(),
            tokens: None,
            workspace: None,
        }
    }

    /// Operands of every run from logits.
    pub fn of_logits(
        logits: impl Into<BufferRef<'a>>,
        ids: impl Into<BufferMut<'a>>,
        weights: impl Into<BufferMut<'a>>,
        status: impl Into<BufferMut<'a>>,
    ) -> Self {
        let (logits, ids, weights) = (Some(logits.into()), Some(ids.into()), Some(weights.into()));
        Self { logits, ids, weights, ..Self::new(status) }
    }

    /// Operands of every run from ids.
    pub fn of_ids(ids: impl Into<BufferRef<'a>>, lists: RoutingLists<'a>, status: impl Into<BufferMut<'a>>) -> Self {
        Self { given_ids: Some(ids.into()), lists: Some(lists), ..Self::new(status) }
    }

    /// With the lists of [`Routing::lists`].
    pub fn lists(mut self, lists: RoutingLists<'a>) -> Self {
        self.lists = Some(lists);
        self
    }

    /// With the bias of [`Routing::biased`].
    pub fn bias(mut self, bias: impl Into<BufferRef<'a>>) -> Self {
        self.bias = Some(bias.into());
        self
    }

    /// For the first `tokens` planned tokens.
    pub fn tokens(mut self, tokens: usize) -> Self {
        self.tokens = Some(tokens);
        self
    }

    /// With a workspace.
    pub fn workspace(mut self, workspace: &'a mut Workspace) -> Self {
        self.workspace = Some(workspace);
        self
    }
}

impl Context {
    /// Chooses kernels for `routing` and makes them ready. A known
    /// problem costs a lookup, as with [`Context::plan`].
    ///
    /// ```
    /// use qgemm_api::{Context, Error, Routing, RoutingArgs, RoutingLists};
    ///
    /// let ctx = Context::open("cpu")?;
    /// // Two experts for each of three tokens, of three; the last one is none.
    /// let plan = ctx.plan_routing(&Routing::from_ids(3, 3, 2))?;
    /// let ids = ctx.upload(&[2i32, 0, 0, 1, 2, 7].map(i32::to_le_bytes).concat())?;
    /// let (mut offsets, mut counts, mut rows) = (ctx.allocate(4 * 4)?, ctx.allocate(3 * 4)?, ctx.allocate(6 * 4)?);
    /// let mut status = ctx.allocate(16)?;
    /// let lists = RoutingLists::new(&mut offsets, &mut counts, &mut rows);
    /// plan.run(&ctx.default_stream(), RoutingArgs::of_ids(&ids, lists, &mut status))?;
    /// let words = |bytes: Vec<u8>| bytes.as_chunks().0.iter().map(|&b| u32::from_le_bytes(b)).collect::<Vec<_>>();
    /// assert_eq!(words(ctx.download(&offsets)?), [0, 2, 3, 5]);
    /// assert_eq!(words(ctx.download(&rows)?), [1, 2, 3, 0, 4, u32::MAX]);
    /// let wrong = plan.check_status(&ctx, &status);
    /// assert!(matches!(wrong, Err(Error::UnknownExpert { token: 2, slot: 1, id: 7, experts: 3 })));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// When the routing is invalid or no family serves it, or when a
    /// kernel cannot be prepared.
    pub fn plan_routing(&self, routing: &Routing) -> Result<RoutingPlan, Error> {
        Planned::new(self, routing.check()?, Preferences::default())
    }

    /// Record of the choice of [`Context::plan_routing`]: see
    /// [`Context::explain`].
    ///
    /// # Errors
    /// When the routing is invalid.
    pub fn explain_routing(&self, routing: &Routing) -> Result<PlanRecord, Error> {
        explain(self, &routing.check()?, &Preferences::default())
    }
}

chosen_by_traffic!(CheckedRouting);

impl Recorded for CheckedRouting {
    fn workspace(&self, plan: &RoutingLaunches) -> Vec<WorkspaceRegion> {
        WorkspaceRegion::whole("counts", plan.config.workspace_bytes)
    }
}

impl Bound for CheckedRouting {
    fn wanted(&self, operand: RoutingOperand, _: bool) -> Wanted {
        use RoutingOperand as O;
        let words = |count: usize| Extent::of_values(ElementType::Int32, count);
        let numbers = |count: usize| Extent::of_values(DType::F32, count);
        let from_logits = self.logits().is_some();
        let chosen = "the routing chooses experts from logits";
        let lists = |name, count| Wanted::optional(name, self.lists.then(|| words(count)), "the routing makes lists");
        match operand {
            O::Logits => {
                let extent = self.logits().map(|logits| Extent::of(logits, self.tokens, self.logit_experts()));
                Wanted::optional("logits", extent, chosen)
            }
            O::GivenIds => {
                let extent = (!from_logits).then(|| words(self.slots()));
                Wanted::optional("given ids", extent, "the routing is of given ids")
            }
            O::Bias => {
                let extent = self.bias.then(|| numbers(self.logit_experts()));
                Wanted::optional("bias", extent, "the routing adds a bias")
            }
            O::Ids => Wanted::optional("ids", from_logits.then(|| words(self.slots())), chosen),
            O::Weights => Wanted::optional("weights", from_logits.then(|| numbers(self.slots())), chosen),
            O::Offsets => lists("offsets", self.local_experts() + 1),
            O::Counts => lists("counts", self.local_experts()),
            O::Rows => lists("rows", self.slots()),
            O::Status => Wanted::always("status", words(STATUS_WORDS)),
            O::Workspace => Wanted::workspace("the plan keeps counts of parts of the tokens"),
        }
    }
}

impl RoutingPlan {
    /// Submits the routing to `stream`. A run allocates nothing,
    /// waits for nothing and takes no lock. A CUDA graph may capture
    /// it. An id without an expert is no error of the run: the status
    /// holds the first one.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, unexpected
    /// or on another device; or on a device error. Nothing is written
    /// then.
    pub fn run(&self, stream: &Stream, mut args: RoutingArgs<'_>) -> Result<(), Error> {
        let workspace = args.workspace.take().map(Workspace::view);
        self.run_within(stream, args, workspace)
    }

    /// [`RoutingPlan::run`] with a workspace inside another buffer,
    /// instead of the one in `args`.
    pub(crate) fn run_within(
        &self,
        stream: &Stream,
        args: RoutingArgs<'_>,
        workspace: Option<BufferMut<'_>>,
    ) -> Result<(), Error> {
        use RoutingOperand as O;
        let RoutingArgs { logits, given_ids, bias, ids, weights, lists, status, tokens, workspace: _ } = args;
        let portion = portion_of(tokens, self.op().tokens)?;
        let op = self.op().of_portion(portion);
        let mut run = self.start_portion(stream, &op, portion)?;
        run.read(O::Logits, logits)?;
        run.read(O::GivenIds, given_ids)?;
        run.read(O::Bias, bias)?;
        run.write(O::Ids, ids)?;
        run.write(O::Weights, weights)?;
        let (offsets, counts, rows) = match lists {
            Some(RoutingLists { offsets, counts, rows }) => (Some(offsets), Some(counts), Some(rows)),
            None => (None, None, None),
        };
        run.write(O::Offsets, offsets)?;
        run.write(O::Counts, counts)?;
        run.write(O::Rows, rows)?;
        run.write(O::Status, status)?;
        if run.is_nothing() {
            // Without slots, the lists are empty and nothing is wrong.
            return [O::Offsets, O::Counts, O::Status].into_iter().try_for_each(|operand| run.zero(stream, operand));
        }
        run.workspace(workspace)?;
        run.launch(stream)
    }

    /// Waits for the default stream and reads the status of a run:
    /// whether every slot has an expert.
    /// [Synchronize](Context::synchronize) first with a run on
    /// another stream.
    ///
    /// # Errors
    /// [`Error::UnknownExpert`] or [`Error::TooFewExperts`] with the
    /// first slot without an expert. Also when `status` is too short
    /// or on another device, or on a device error.
    pub fn check_status<'a>(&self, ctx: &Context, status: impl Into<BufferRef<'a>>) -> Result<(), Error> {
        let status = status.into();
        Checks(self.device()).device("context", ctx.info().id)?;
        Checks(self.device()).view("status", status, Extent::of_values(ElementType::Int32, STATUS_WORDS))?;
        let bytes = ctx.download(status.slice(0..STATUS_WORDS * WORD)?)?;
        let mut words = [0u32; STATUS_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        let [code, token, slot, id] = words;
        let (token, slot, experts) = (token as usize, slot as usize, self.op().experts);
        match code {
            STATUS_FINE => Ok(()),
            STATUS_BAD_ID => Err(Error::UnknownExpert { token, slot, id: id.cast_signed(), experts }),
            _ => Err(Error::TooFewExperts { token, expected: self.op().chosen(), got: slot }),
        }
    }
}
