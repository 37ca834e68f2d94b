//! MoE layer ([`MoeLayer`]): routing, expert products and the combine step.

use std::fmt;
use std::sync::{Arc, OnceLock};

use qgemm_formats::DType;
use qgemm_hal::op::routing::MOST_TOKENS;
use qgemm_hal::{Buffer, BufferMut, BufferRef, Stream};

use super::moe::Moe;
use super::plan::{ExpertArgs, ExpertPlan, expert_lists};
use super::problem::ExpertProblem;
use super::weights::Experts;
use crate::context::Context;
use crate::error::Error;
use crate::gemm::{Problem, XRef};
use crate::routing::{Routing, RoutingArgs, RoutingLists, RoutingPlan};
use crate::setters::setters;
use crate::workspace::Workspace;

/// Bytes of an expert id or router weight.
const WORD: usize = 4;
/// Bytes of the status of a routing, and of an expert product.
const ROUTING_STATUS: usize = 16;
const EXPERTS_STATUS: usize = 8;
/// Row offsets of one expert with all rows. Offsets beyond the rows are clamped.
const ALL_ROWS: [u32; 2] = [0, u32::MAX];

/// Token buckets with their own plans: 1, 2, 3, 4, 6, 8, 12, … A plan serves all token
/// counts above the previous bucket, which would get as many tiles.
const STEPS: usize = 2 * MOST_TOKENS.ilog2() as usize;

/// Tokens of a bucket.
fn step_tokens(step: usize) -> usize {
    match step {
        0 => 1,
        _ => (2 + (step - 1) % 2) << ((step - 1) / 2),
    }
}

/// Bucket of a token count, at least one. `STEPS` when none is large enough.
fn step_of(tokens: usize) -> usize {
    (0..STEPS).find(|&step| step_tokens(step) >= tokens).unwrap_or(STEPS)
}

/// Feed-forward layer of experts (MoE) for any number of tokens. Made
/// by [`Context::moe_layer`].
///
/// `D[t] = Σj weights[t, j] · down(e) · activation(up(e) · X[t])` with `e = ids[t, j]`,
/// summed in slot order in f32. A shared expert and a residual are added on request.
///
/// [`MoeLayer::workspace`] plans for a maximum of tokens; runs up to it plan nothing.
/// A run launches a routing (for given ids only if kernels take lists of them).
/// CUDA devices launch at most three more kernels: gate and up, down, and the sum.
/// A shared expert is part of these ([`Moe::last_is_shared`]), or costs two more if
/// its size differs. [`MoePlan::launches`] counts them. The host reads nothing back,
/// so a captured CUDA graph follows the ids of each replay.
///
/// ```
/// use qgemm_api::{Context, DType, HostExperts, MoeArgs, quantize};
///
/// let ctx = Context::open("cpu")?;
/// let one = |n: usize, k: usize, v: f32| quantize(&vec![v; n * k], n, k, "q8_0".parse().unwrap()).unwrap().0;
/// let up = ctx.load_experts(&HostExperts::gated(&[(one(64, 32, 1.0), one(64, 32, 0.5)), (one(64, 32, 2.0), one(64, 32, 0.5))])?)?;
/// let down = ctx.load_experts(&HostExperts::new(&[one(32, 64, 0.25), one(32, 64, 1.0)])?)?;
/// let layer = ctx.moe_layer(&up, &down, 1, |moe| moe.routed(DType::F32, |routing| routing.renormalized()))?;
///
/// // Before the first request: plans for up to four tokens are made, and one workspace serves them.
/// let mut workspace = layer.workspace(4)?;
/// let (x, logits) = (ctx.upload(&[0.5f32; 2 * 32])?, ctx.upload(&[9.0f32, 0.0, 0.0, 9.0])?);
/// let mut d = ctx.allocate(2 * 32 * 4)?;
/// layer.run(&ctx.default_stream(), 2, MoeArgs::from_logits(&x, &logits, &mut d), &mut workspace)?;
/// layer.check_status(&workspace)?; // every slot had an expert
/// let d: Vec<f32> = ctx.download(&d)?;
/// // Token 0: SiLU(16) · 8 · 0.25 · 64; token 1, whose expert has twice the gate and four times the down: SiLU(32) · 8 · 64.
/// assert!((d[0] - 2048.0).abs() < 10.0 && (d[32] - 16384.0).abs() < 100.0);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Clone)]
pub struct MoeLayer {
    ctx: Context,
    up: Experts,
    down: Experts,
    moe: Moe,
    /// Up and down of the shared expert.
    shared: Option<[Experts; 2]>,
    /// Plans, one per token bucket.
    plans: Arc<[OnceLock<MoePlan>; STEPS]>,
}

/// Plans of a layer for one token bucket.
#[derive(Debug)]
pub struct MoePlan {
    tokens: usize,
    shared: Option<[ExpertPlan; 2]>,
    routing: Option<RoutingPlan>,
    up: ExpertPlan,
    down: ExpertPlan,
}

/// Operands of a [`MoeLayer`] run.
#[derive(Debug)]
#[non_exhaustive]
pub struct MoeArgs<'a> {
    /// Activations X, `[tokens, K]`.
    pub x: XRef<'a>,
    /// Given f32 factor of a quantized X
    /// ([`Quantization::given_factor`](crate::Quantization::given_factor)).
    pub x_factor: Option<BufferRef<'a>>,
    /// Output, `[tokens, N]`.
    pub d: BufferMut<'a>,
    /// Source of expert ids.
    pub source: MoeSource<'a>,
    /// Routing bias, f32 per expert, if the routing is [biased](Routing::biased).
    pub bias: Option<BufferRef<'a>>,
    /// Biases of up and of down, if the layer has them.
    pub biases: [Option<BufferRef<'a>>; 2],
    /// Residual, `[tokens, N]`, if the layer has one.
    pub residual: Option<BufferRef<'a>>,
}

/// Source of expert ids and router weights.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum MoeSource<'a> {
    /// Router logits, `[tokens, E]`, for a [routed](Moe::routed) layer.
    Logits(BufferRef<'a>),
    /// Ids (i32) and weights (f32) per slot, for other layers.
    Given {
        /// Expert ids.
        ids: BufferRef<'a>,
        /// Router weights.
        weights: BufferRef<'a>,
    },
}

impl<'a> MoeArgs<'a> {
    /// Operands of a layer that routes from logits.
    pub fn from_logits(x: impl Into<XRef<'a>>, logits: impl Into<BufferRef<'a>>, d: impl Into<BufferMut<'a>>) -> Self {
        Self::new(x.into(), MoeSource::Logits(logits.into()), d.into())
    }

    /// Operands of a layer with given ids and weights.
    pub fn given(
        x: impl Into<XRef<'a>>,
        ids: impl Into<BufferRef<'a>>,
        weights: impl Into<BufferRef<'a>>,
        d: impl Into<BufferMut<'a>>,
    ) -> Self {
        Self::new(x.into(), MoeSource::Given { ids: ids.into(), weights: weights.into() }, d.into())
    }

    fn new(x: XRef<'a>, source: MoeSource<'a>, d: BufferMut<'a>) -> Self {
        Self { x, x_factor: None, d, source, bias: None, biases: [None; 2], residual: None }
    }

    setters! {
        /// Sets the given factor of a quantized X.
        x_factor: BufferRef,
        /// Sets the routing bias.
        bias: BufferRef,
    }

    /// Sets the biases of all experts' up.
    pub fn up_bias(mut self, bias: impl Into<BufferRef<'a>>) -> Self {
        self.biases[0] = Some(bias.into());
        self
    }

    /// Sets the biases of all experts' down.
    pub fn down_bias(mut self, bias: impl Into<BufferRef<'a>>) -> Self {
        self.biases[1] = Some(bias.into());
        self
    }

    /// Sets the residual.
    pub fn residual(mut self, residual: impl Into<BufferRef<'a>>) -> Self {
        self.residual = Some(residual.into());
        self
    }
}

/// Memory between the kernels of a run. Concurrent runs must not share
/// it: keep one per stream.
#[derive(Debug)]
pub struct MoeWorkspace {
    /// Tokens of the last run.
    tokens: usize,
    /// Maximum number of tokens.
    most: usize,
    of_plans: Workspace,
    ids: Buffer,
    weights: Buffer,
    lists: Buffer,
    counts: Buffer,
    hidden: Buffer,
    shared: Option<Shared>,
    routing_status: Buffer,
    status: Buffer,
}

/// Intermediate results of a shared expert, and its row index.
#[derive(Debug)]
struct Shared {
    index: Buffer,
    hidden: Buffer,
    out: Buffer,
}

impl MoeLayer {
    pub(crate) fn new(
        ctx: &Context,
        up: &Experts,
        down: &Experts,
        top_k: usize,
        describe: impl FnOnce(Moe) -> Moe,
    ) -> Result<Self, Error> {
        let wrong = |expected: String, got: &Experts| Error::WrongWeight { expected, got: got.shape().to_string() };
        if (down.experts(), down.k()) != (up.experts(), up.n()) {
            return Err(wrong(format!("{} experts of N x {}", up.experts(), up.n()), down));
        }
        if down.is_gated() {
            return Err(wrong("experts that are no gated pairs".to_owned(), down));
        }
        let mut moe = describe(Moe::new(up.experts(), top_k));
        if let Some((first, experts)) = moe.local {
            let why = "give the ids of local experts, counted from the first";
            let unrouted = Error::NotForExperts { what: "a part of the experts of given ids", why };
            let local = first..first.saturating_add(up.experts());
            moe.routing = Some(moe.routing.take().ok_or(unrouted)?.local_among(local, experts));
        }
        if moe.last_is_shared {
            let why = "give its id to every token, among the others";
            let unrouted = Error::NotForExperts { what: "an expert for all tokens of given ids", why };
            moe.routing = Some(moe.routing.take().ok_or(unrouted)?.sharing_last());
        }
        if let Some(routing) = &moe.routing {
            let local = routing.check()?.local_experts();
            if local != up.experts() {
                return Err(wrong(format!("{local} local experts"), up));
            }
        }
        let shared = match &moe.shared {
            None => None,
            Some((shared_up, shared_down)) => {
                let fits = shared_up.k() == up.k() && shared_down.k() == shared_up.n() && shared_down.n() == down.n();
                if !fits || shared_down.is_gated() {
                    let expected =
                        format!("a shared expert with an up of I x {} and a down of {} x I", up.k(), down.n());
                    let got = format!("{} and {}", shared_up.shape(), shared_down.shape());
                    return Err(Error::WrongWeight { expected, got });
                }
                Some([shared_up.shared_by(1)?, shared_down.shared_by(1)?])
            }
        };
        let plans = Arc::new(std::array::from_fn(|_| OnceLock::new()));
        let layer = Self { ctx: ctx.clone(), up: up.clone(), down: down.clone(), moe, shared, plans };
        // Most errors do not depend on the number of tokens.
        layer.plan(1)?;
        Ok(layer)
    }

    /// Plan for `tokens` tokens, made on first use.
    ///
    /// # Errors
    /// As [`Context::plan_experts`] and [`Context::plan_routing`].
    pub fn plan(&self, tokens: usize) -> Result<&MoePlan, Error> {
        let step = step_of(tokens);
        let Some(place) = self.plans.get(step) else {
            return Err(Error::OutOfRange { name: "tokens", least: 0, most: MOST_TOKENS, got: tokens });
        };
        match place.get() {
            Some(plan) => Ok(plan),
            None => {
                let plan = self.make_plan(step_tokens(step))?;
                Ok(place.get_or_init(|| plan))
            }
        }
    }

    /// Plans for all token counts up to `most` and makes the kernels ready, which may
    /// compile them. Returns the required workspace bytes.
    ///
    /// # Errors
    /// As [`MoeLayer::plan`].
    pub fn prepare(&self, most: usize) -> Result<usize, Error> {
        let mut bytes = 0;
        for step in 0..=step_of(most) {
            bytes = bytes.max(self.plan(if step < STEPS { step_tokens(step) } else { most })?.workspace_bytes());
        }
        Ok(bytes)
    }

    fn make_plan(&self, tokens: usize) -> Result<MoePlan, Error> {
        let Self { ctx, up, down, moe, .. } = self;
        let biased = |p: Problem, dtype: Option<DType>| match dtype {
            Some(dtype) => p.bias(dtype),
            None => p,
        };
        // The second products check the ids.
        let first = ExpertProblem::indexed(up, tokens, moe.slots())
            .each(|p| {
                biased(moe.arithmetic(moe.of_x(p)).d_dtype(moe.x_dtype).activation(moe.activation), moe.biases[0])
            })
            .unchecked();
        let shared = match &self.shared {
            None => None,
            Some([up, down]) => {
                let up = ExpertProblem::contiguous(up, tokens)
                    .each(|p| moe.arithmetic(moe.of_x(p)).d_dtype(moe.x_dtype).activation(moe.activation));
                let down = ExpertProblem::contiguous(down, tokens).each(|p| {
                    let p = moe.arithmetic(p.x_dtype(moe.x_dtype)).d_dtype(DType::F32);
                    match moe.residual {
                        Some(residual) => p.residual(residual),
                        None => p,
                    }
                });
                Some([ctx.plan_experts(&up.unchecked())?, ctx.plan_experts(&down.unchecked())?])
            }
        };
        let added = if self.shared.is_some() { Some(DType::F32) } else { moe.residual };
        let second = ExpertProblem::indexed(down, tokens, moe.slots()).x_per_slot().combined().each(|p| {
            let p = biased(moe.arithmetic(p.x_dtype(moe.x_dtype)).d_dtype(moe.d_dtype), moe.biases[1]);
            match added {
                Some(dtype) => p.residual(dtype),
                None => p,
            }
        });
        // Slots of experts elsewhere are no faults.
        let second = if moe.local.is_some() { second.unchecked() } else { second };
        let of_all = |problem: ExpertProblem| match moe.local {
            Some((_, experts)) => problem.routed_to(experts),
            None => problem,
        };
        let (first, second) = (of_all(first), of_all(second));
        // Both products read one index.
        let plan_both = |first: ExpertProblem, second: ExpertProblem| -> Result<[ExpertPlan; 2], Error> {
            let up = ctx.plan_experts(&first)?;
            let down = ctx.plan_experts(&if up.prefetches_early() { second.index_ready() } else { second })?;
            Ok([up, down])
        };
        let listed = plan_both(first.clone().listed(), second.clone().listed())?;
        let lists = listed.iter().any(ExpertPlan::reads_lists);
        let [up, down] = if lists { listed } else { plan_both(first, second)? };
        let routing = match &moe.routing {
            Some(routing) => {
                let routing = routing.clone().of_tokens(tokens);
                Some(ctx.plan_routing(&if lists { routing.lists() } else { routing })?)
            }
            // Lists of given ids are made once for both products.
            None if lists => Some(ctx.plan_routing(&Routing::from_ids(tokens, moe.experts, moe.top_k))?),
            None => None,
        };
        Ok(MoePlan { tokens, shared, routing, up, down })
    }

    /// [`MoeLayer::prepare`], and a workspace for runs of up to `most` tokens.
    ///
    /// # Errors
    /// As [`MoeLayer::plan`], or out of memory.
    pub fn workspace(&self, most: usize) -> Result<MoeWorkspace, Error> {
        let bytes = self.prepare(most)?;
        let (ctx, width) = (&self.ctx, self.moe.x_dtype.bytes());
        let slots = most.saturating_mul(self.moe.slots());
        let lists = expert_lists(self.moe.experts, slots).map_or(usize::MAX, |[_, slots]| slots.end);
        let allocate = |count: usize, width: usize| ctx.allocate(count.saturating_mul(width));
        let routed = if self.moe.routing.is_some() { slots } else { 0 };
        let shared = match &self.shared {
            None => None,
            Some([up, down]) => Some(Shared {
                index: ctx.upload(&ALL_ROWS)?,
                hidden: allocate(most.saturating_mul(up.n()), width)?,
                out: allocate(most.saturating_mul(down.n()), DType::F32.bytes())?,
            }),
        };
        Ok(MoeWorkspace {
            tokens: 0,
            most,
            of_plans: ctx.workspace(bytes)?,
            ids: allocate(routed, WORD)?,
            weights: allocate(routed, WORD)?,
            lists: ctx.allocate(lists)?,
            counts: allocate(self.moe.experts, WORD)?,
            hidden: allocate(slots.saturating_mul(self.up.n()), width)?,
            shared,
            routing_status: ctx.allocate(ROUTING_STATUS)?,
            status: ctx.allocate(EXPERTS_STATUS)?,
        })
    }

    /// Submits the layer for `tokens` tokens to `stream`. It plans nothing and, like
    /// [`ExpertPlan::run`], may be captured in a CUDA graph.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for more tokens than the workspace or the
    /// [prepared](MoeLayer::prepare) plans allow. When an operand is missing, too short,
    /// misaligned, on another device or not part of the layer.
    pub fn run(
        &self,
        stream: &Stream,
        tokens: usize,
        args: MoeArgs<'_>,
        workspace: &mut MoeWorkspace,
    ) -> Result<(), Error> {
        if tokens == 0 {
            return Ok(());
        }
        let out_of_range = |name, most| Error::OutOfRange { name, least: 0, most, got: tokens };
        if tokens > workspace.most {
            return Err(out_of_range("tokens of a run in this workspace", workspace.most));
        }
        let Some(plan) = self.plans.get(step_of(tokens)).and_then(OnceLock::get) else {
            let prepared = self.plans.iter().take_while(|plan| plan.get().is_some()).count();
            return Err(out_of_range("tokens that the layer is prepared for", step_tokens(prepared.saturating_sub(1))));
        };
        let MoeArgs { x, x_factor, d, source, bias, biases, residual } = args;
        let MoeWorkspace { of_plans, ids, weights, lists, counts, hidden, shared, routing_status, status, .. } =
            workspace;
        let is_listed = plan.up.op().lists;
        let made_lists = match is_listed {
            true => {
                let [_, slots] = expert_lists(self.moe.experts, 0).unwrap_or_default();
                let (offsets, rows) = lists.split_at_mut(slots.start)?;
                Some(RoutingLists { offsets, counts: counts.view_mut(), rows })
            }
            false => None,
        };
        let (ids, weights): (BufferRef<'_>, BufferRef<'_>) = match (&plan.routing, source) {
            (Some(routing), MoeSource::Logits(logits)) if self.moe.routing.is_some() => {
                let (status, made) = (routing_status.view_mut(), (ids.view_mut(), weights.view_mut()));
                let mut args = RoutingArgs::of_logits(logits, made.0, made.1, status);
                (args.bias, args.lists, args.workspace) = (bias, made_lists, Some(&mut *of_plans));
                args.tokens = Some(tokens);
                routing.run(stream, args)?;
                (ids.view(), weights.view())
            }
            (routing, MoeSource::Given { ids, weights }) if self.moe.routing.is_none() => {
                if let Some((routing, made_lists)) = routing.as_ref().zip(made_lists) {
                    let args = RoutingArgs::of_ids(ids, made_lists, routing_status.view_mut());
                    let workspace = Some(&mut *of_plans);
                    routing.run(stream, RoutingArgs { tokens: Some(tokens), workspace, ..args })?;
                }
                (ids, weights)
            }
            (_, MoeSource::Given { .. }) => return Err(Error::UnexpectedOperand { operand: "given ids" }),
            (_, MoeSource::Logits(_)) => return Err(Error::UnexpectedOperand { operand: "logits" }),
        };
        let lists = is_listed.then(|| lists.view());
        let mut first = ExpertArgs::new(x, &self.up, ids, hidden.view_mut()).tokens(tokens).workspace(of_plans);
        (first.x_factor, first.bias, first.lists) = (x_factor, biases[0], lists);
        plan.up.run(stream, first)?;
        let added = match (plan.shared.as_ref().zip(self.shared.as_ref()), shared) {
            (Some(([first, second], [up, down])), Some(Shared { index, hidden, out })) => {
                let mut args = ExpertArgs::new(x, up, &*index, hidden.view_mut()).tokens(tokens).workspace(of_plans);
                args.x_factor = x_factor;
                first.run(stream, args)?;
                let args = ExpertArgs::new(hidden.view(), down, &*index, out.view_mut()).tokens(tokens);
                second.run(stream, ExpertArgs { residual, ..args.workspace(of_plans) })?;
                Some(out.view())
            }
            _ => residual,
        };
        let mut second = ExpertArgs::new(hidden.view(), &self.down, ids, d).router_weights(weights).tokens(tokens);
        (second.bias, second.residual, second.lists) = (biases[1], added, lists);
        second.status = plan.down.op().checks_index.then(|| status.view_mut());
        plan.down.run(stream, second.workspace(of_plans))?;
        workspace.tokens = tokens;
        Ok(())
    }

    /// Waits for the default stream and checks that every slot of the last run
    /// had an expert and a weight.
    ///
    /// # Errors
    /// As [`RoutingPlan::check_status`] and [`ExpertPlan::check_status`], or a device
    /// error.
    pub fn check_status(&self, workspace: &MoeWorkspace) -> Result<(), Error> {
        if workspace.tokens == 0 {
            return Ok(());
        }
        let plan = self.plan(workspace.tokens)?;
        // The products report wrong given ids and weights, too.
        if let Some(routing) = plan.routing.as_ref().filter(|_| self.moe.routing.is_some()) {
            routing.check_status(&self.ctx, &workspace.routing_status)?;
        }
        match plan.down.op().checks_index {
            true => plan.down.check_status(&self.ctx, &workspace.status),
            false => Ok(()),
        }
    }
}

impl fmt::Debug for MoeLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { up, down, moe, .. } = self;
        f.debug_struct("MoeLayer").field("up", up).field("down", down).field("moe", moe).finish_non_exhaustive()
    }
}

impl MoePlan {
    /// Maximum number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// All products in launch order.
    fn products(&self) -> impl Iterator<Item = &ExpertPlan> {
        std::iter::once(&self.up).chain(self.shared.iter().flatten()).chain(std::iter::once(&self.down))
    }

    /// Number of launches of a run.
    pub fn launches(&self) -> usize {
        let routing =
            self.routing.as_ref().and_then(RoutingPlan::sequence).map_or(0, |sequence| sequence.steps().len());
        let steps = |plan: &ExpertPlan| plan.sequence().map_or(0, |sequence| sequence.steps().len());
        routing + self.products().map(steps).sum::<usize>()
    }

    /// Maximum workspace of a launch, in bytes. Launches use it in turn.
    fn workspace_bytes(&self) -> usize {
        let routing = self.routing.as_ref().map_or(0, RoutingPlan::workspace_bytes);
        self.products().map(|plan| plan.workspace_bytes()).fold(routing, usize::max)
    }

    /// Routing. `None` when ids are given and products take no lists.
    pub fn routing(&self) -> Option<&RoutingPlan> {
        self.routing.as_ref()
    }

    /// Products of gate and up.
    pub fn up(&self) -> &ExpertPlan {
        &self.up
    }

    /// Products of down and their sum.
    pub fn down(&self) -> &ExpertPlan {
        &self.down
    }
}

/// Launches of a run in order.
impl fmt::Display for MoePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(routing) = &self.routing {
            writeln!(f, "{routing}")?;
        }
        let mut products = self.products();
        products.try_for_each(|product| writeln!(f, "{product}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_tokens_has_a_step() {
        assert_eq!([0, 1, 2, 3, 4, 5, 6].map(step_tokens), [1, 2, 3, 4, 6, 8, 12]);
        for tokens in [1, 2, 3, 4, 5, 7, 100, 4096, 4097, MOST_TOKENS] {
            let step = step_of(tokens);
            let before = step.checked_sub(1).map_or(0, step_tokens);
            assert!(step_tokens(step) >= tokens && before < tokens, "{tokens}");
        }
        assert_eq!((step_tokens(STEPS - 1), step_of(MOST_TOKENS + 1)), (MOST_TOKENS, STEPS));
    }
}
