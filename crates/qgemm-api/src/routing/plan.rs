//! [`RoutingPlan`]: kernels made ready for one routing.

use std::fmt;
use std::sync::Arc;

use qgemm_formats::{DType, ElementType};
use qgemm_hal::op::routing::{STATUS_BAD_ID, STATUS_FINE, STATUS_WORDS};
use qgemm_hal::{
    BufferMut, BufferRef, CheckedRouting, Device, DeviceId, KernelId, LaunchSequence, Operands, Operation,
    RoutingLaunches, RoutingOperand, Stream,
};
use qgemm_sched::memory_bound::choose;

use super::description::Routing;
use crate::context::Context;
use crate::error::Error;
use crate::operand::{Checks, Extent, portion_of, zero};
use crate::plan_cache::{PlanCaches, Ready};
use crate::workspace::Workspace;

/// Bytes of an id, a weight, an offset, a count, an entry of a list, and a word of the status.
const WORD: usize = 4;

/// Kernels chosen and made ready for one [`Routing`]; made by [`Context::plan_routing`]. Its text says what a run launches.
#[derive(Debug)]
pub struct RoutingPlan {
    op: CheckedRouting,
    device: Arc<dyn Device>,
    /// `None` for 0 tokens.
    ready: Option<Arc<Ready<CheckedRouting>>>,
}

/// Which slots each expert has: the slot of place `j` of token `t` is `t · top_k + j`.
///
/// The list of expert `e` is `rows[offsets[e]..offsets[e + 1]]`, in ascending order. Slots without an expert are in no list; as many
/// entries behind the last one are `u32::MAX`.
#[derive(Debug)]
pub struct RoutingLists<'a> {
    /// Written: a u32 for every expert, and one more.
    pub offsets: BufferMut<'a>,
    /// Written: a u32 for every expert.
    pub counts: BufferMut<'a>,
    /// Written: a u32 for every slot.
    pub rows: BufferMut<'a>,
}

/// What one run of a [`RoutingPlan`] reads and writes.
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
/// let args = RoutingArgs::of_logits((&logits).into(), (&mut ids).into(), (&mut weights).into(), (&mut status).into());
/// plan.run(&ctx.default_stream(), args)?;
/// plan.check_status(&ctx, &status)?;
/// let ids: Vec<u32> = ctx.download(&ids)?; // u32::MAX would be -1: no expert
/// assert_eq!(ids, [2, 1, 0, 2]);
/// # let weights: Vec<f32> = ctx.download(&weights)?;
/// # assert!((weights[2] - 0.8176).abs() < 1e-4 && (weights[2] + weights[3] - 1.0).abs() < 1e-6);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Debug)]
pub struct RoutingArgs<'a> {
    /// Logits, where experts are chosen.
    pub logits: Option<BufferRef<'a>>,
    /// Ids, where they are given: `top_k` i32 a token.
    pub given_ids: Option<BufferRef<'a>>,
    /// An f32 an expert, when the routing is [biased](Routing::biased).
    pub bias: Option<BufferRef<'a>>,
    /// Written, where experts are chosen: `top_k` i32 a token.
    pub ids: Option<BufferMut<'a>>,
    /// Written, where experts are chosen: `top_k` f32 a token.
    pub weights: Option<BufferMut<'a>>,
    /// Written, where ids are given, and when the routing makes [lists](Routing::lists).
    pub lists: Option<RoutingLists<'a>>,
    /// Written: 16 bytes that [`RoutingPlan::check_status`] reads.
    pub status: BufferMut<'a>,
    /// Tokens of this run, where they are fewer than those planned.
    pub tokens: Option<usize>,
    /// At least [`RoutingPlan::workspace_bytes`], when that is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

impl<'a> RoutingArgs<'a> {
    /// What every run from logits has; bias, lists and workspace are fields to set.
    pub fn of_logits(logits: BufferRef<'a>, ids: BufferMut<'a>, weights: BufferMut<'a>, status: BufferMut<'a>) -> Self {
        Self {
            logits: Some(logits),
            given_ids: None,
            bias: None,
            ids: Some(ids),
            weights: Some(weights),
            lists: None,
            status,
            tokens: None,
            workspace: None,
        }
    }

    /// What every run from ids has; the workspace is a field to set.
    pub fn of_ids(ids: BufferRef<'a>, lists: RoutingLists<'a>, status: BufferMut<'a>) -> Self {
        Self {
            logits: None,
            given_ids: Some(ids),
            bias: None,
            ids: None,
            weights: None,
            lists: Some(lists),
            status,
            tokens: None,
            workspace: None,
        }
    }
}

impl RoutingPlan {
    pub(crate) fn new(shared: &Arc<dyn Device>, caches: &PlanCaches, routing: &Routing) -> Result<Self, Error> {
        let (op, device) = (routing.check()?, &**shared);
        let make = || {
            let CheckedRouting { tokens, experts, top_k, .. } = op;
            let _span = tracing::info_span!("plan", tokens, experts, top_k).entered();
            let (family, plan) = choose(&op, device.info(), device.catalog().routing)?;
            Ok::<_, Error>(Ready { family, plan, sequence: family.prepare(device, &op, &plan)? })
        };
        let ready = if op.is_nothing() { None } else { Some(caches.routing.get_or_make(&op, make)?) };
        Ok(Self { device: Arc::clone(shared), ready, op })
    }

    /// Bytes of workspace that [`RoutingPlan::run`] needs; 0 for few tokens.
    pub fn workspace_bytes(&self) -> usize {
        self.launch().map_or(0, |launch| launch.config.workspace_bytes)
    }

    /// Name of the chosen kernels; `none` for 0 tokens.
    pub fn kernel_name(&self) -> &str {
        self.sequence().map_or("none", LaunchSequence::name)
    }

    /// Identity of the first kernel; `None` for 0 tokens.
    pub fn kernel_id(&self) -> Option<KernelId> {
        self.launch().map(|launch| launch.config.kernel)
    }

    /// The chosen configuration; `None` for 0 tokens.
    pub fn launch(&self) -> Option<&RoutingLaunches> {
        self.ready.as_ref().map(|ready| &ready.plan)
    }

    /// The kernels that a run launches, in order; `None` for 0 tokens.
    pub fn sequence(&self) -> Option<&LaunchSequence> {
        self.ready.as_ref().map(|ready| &ready.sequence)
    }

    /// The validated operation.
    pub fn op(&self) -> &CheckedRouting {
        &self.op
    }

    /// Bytes that a run must move at least: those it reads and those it writes, once each.
    pub fn bytes(&self) -> f64 {
        self.op.traffic()
    }

    /// The device that the plan is for.
    pub fn device(&self) -> DeviceId {
        self.device.info().id
    }

    /// Submits the routing to `stream`. Allocates nothing, waits for nothing and takes no lock, so it may be captured in a CUDA
    /// graph. Ids that are no expert's are no error here: the status holds the first.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, on another device or not part of the routing, or a device error.
    /// Nothing has been written then.
    pub fn run(&self, stream: &Stream, mut args: RoutingArgs<'_>) -> Result<(), Error> {
        let workspace = args.workspace.take().map(Workspace::view);
        self.run_within(stream, args, workspace)
    }

    /// [`RoutingPlan::run`] with a workspace that may be part of another buffer, in place of that of `args`.
    pub(crate) fn run_within(
        &self,
        stream: &Stream,
        args: RoutingArgs<'_>,
        workspace: Option<BufferMut<'_>>,
    ) -> Result<(), Error> {
        use RoutingOperand as O;
        let RoutingArgs { logits, given_ids, bias, ids, weights, lists, status, tokens, workspace: _ } = args;
        let portion = portion_of(tokens, self.op.tokens)?;
        let op = &self.op.of_portion(portion);
        let checks = Checks(self.device());
        checks.device("stream", stream.device())?;
        let words = |count: usize| Extent::of_values(ElementType::Int32, count);
        let numbers = |count: usize| Extent::of_values(DType::F32, count);
        let slots = |is_used: bool| is_used.then(|| words(op.slots()));
        let extent = op.logits().map(|logits| Extent::of(logits, op.tokens, op.logit_experts()));
        let from_logits = extent.is_some();
        let chosen = "the routing chooses experts from logits";
        let logits = checks.optional("logits", logits, extent, chosen)?;
        let given_ids = checks.optional("given ids", given_ids, slots(!from_logits), "the routing is of given ids")?;
        let bias =
            checks.optional("bias", bias, op.bias.then(|| numbers(op.logit_experts())), "the routing adds a bias")?;
        let ids = checks.optional("ids", ids, slots(from_logits), chosen)?;
        let weights = checks.optional("weights", weights, from_logits.then(|| numbers(op.slots())), chosen)?;
        let (offsets, counts, rows) = match lists {
            Some(RoutingLists { offsets, counts, rows }) => (Some(offsets), Some(counts), Some(rows)),
            None => (None, None, None),
        };
        let listed = "the routing makes lists";
        let of_experts = |count: usize| op.lists.then(|| words(count));
        let (of_offsets, of_counts, of_status) =
            (of_experts(op.experts + 1), of_experts(op.experts), words(STATUS_WORDS));
        let offsets = checks.optional("offsets", offsets, of_offsets, listed)?;
        let counts = checks.optional("counts", counts, of_counts, listed)?;
        let rows = checks.optional("rows", rows, slots(op.lists), listed)?;
        checks.view("status", status.view(), of_status)?;
        let Some(ready) = self.ready.as_ref().filter(|_| !op.is_nothing()) else {
            // No list has a slot, and nothing is wrong.
            let written = [(offsets, of_offsets), (counts, of_counts), (Some(status), Some(of_status))];
            return written.into_iter().try_for_each(|(view, extent)| zero(&*self.device, stream, view, extent));
        };
        let mut operands = Operands::new();
        operands.take_portion(portion);
        operands.read_if_any(O::Logits, logits);
        operands.read_if_any(O::GivenIds, given_ids);
        operands.read_if_any(O::Bias, bias);
        let written =
            [(O::Ids, ids), (O::Weights, weights), (O::Offsets, offsets), (O::Counts, counts), (O::Rows, rows)];
        for (operand, view) in written.into_iter().chain([(O::Status, Some(status))]) {
            if let Some(view) = view {
                operands.write(operand, view);
            }
        }
        let why = "the plan keeps counts of parts of the tokens";
        if let Some(workspace) = checks.workspace(workspace, self.workspace_bytes(), why)? {
            operands.write(O::Workspace, workspace);
        }
        let _span = tracing::trace_span!("launch", kernel = self.kernel_name()).entered();
        Ok(ready.sequence.run_for(op, stream, operands)?)
    }

    /// Waits for the default stream and reads the status of a run: whether every slot has an expert. A run on another stream is to be
    /// [synchronized](Context::synchronize) with first.
    ///
    /// # Errors
    /// [`Error::UnknownExpert`] or [`Error::TooFewExperts`], which name the first slot without one; or when `status` is too short or on
    /// another device, or a device error.
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
        let (token, slot, experts) = (token as usize, slot as usize, self.op.experts);
        match code {
            STATUS_FINE => Ok(()),
            STATUS_BAD_ID => Err(Error::UnknownExpert { token, slot, id: id.cast_signed(), experts }),
            _ => Err(Error::TooFewExperts { token, expected: self.op.chosen(), got: slot }),
        }
    }
}

/// What was chosen, and the launches of a run: each with its kernel, geometry and operands.
impl fmt::Display for RoutingPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CheckedRouting { tokens, experts, top_k, .. } = self.op;
        write!(f, "{} for {tokens} tokens, {top_k} of {experts} experts, on {}", self.kernel_name(), self.device())?;
        let Some(ready) = &self.ready else { return Ok(()) };
        let RoutingLaunches { config, estimate } = &ready.plan;
        let mut given = self.op.operands();
        if config.workspace_bytes > 0 {
            given.push(RoutingOperand::Workspace);
        }
        writeln!(f, ", {} bytes of workspace, expected to take {:.1} µs", config.workspace_bytes, estimate * 1e6)?;
        ready.sequence.display_with(&given).fmt(f)
    }
}
