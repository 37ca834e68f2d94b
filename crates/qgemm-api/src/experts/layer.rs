//! [`MoeLayer`]: a feed-forward layer of experts, from routing to the sum of a token's experts.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::{Activation, Buffer, BufferMut, BufferRef, Stream, XPrecision};

use super::plan::{ExpertArgs, ExpertPlan, expert_lists};
use super::problem::ExpertProblem;
use super::weights::Experts;
use crate::context::Context;
use crate::error::Error;
use crate::gemm::{Linear, Problem, XRef};
use crate::plans_by_tokens::{Found, PlansByTokens};
use crate::quantization::Quantization;
use crate::routing::{Routing, RoutingArgs, RoutingLists, RoutingPlan};
use crate::weight::Weight;
use crate::workspace::Workspace;

/// Bytes of an id and of a router weight.
const WORD: usize = 4;
/// Bytes that a routing and a product with experts say in what was wrong.
const ROUTING_STATUS: usize = 16;
const EXPERTS_STATUS: usize = 8;

/// What a [`MoeLayer`] computes beside its products with the experts; stated in [`Context::moe_layer`].
#[derive(Clone, Debug)]
pub struct Moe {
    experts: usize,
    top_k: usize,
    x_dtype: DType,
    x_quantization: Option<Quantization>,
    d_dtype: DType,
    activation: Activation,
    routing: Option<Routing>,
    shared: Option<(Weight, Weight)>,
    residual: Option<DType>,
    biases: [Option<DType>; 2],
    x_precision: XPrecision,
}

impl Moe {
    fn new(experts: usize, top_k: usize) -> Self {
        Self {
            experts,
            top_k,
            x_dtype: DType::F32,
            x_quantization: None,
            d_dtype: DType::F32,
            activation: Activation::Silu,
            routing: None,
            shared: None,
            residual: None,
            biases: [None; 2],
            x_precision: XPrecision::default(),
        }
    }

    /// The type of X, and of what the first products pass on to the second. f32 when not given.
    pub fn x_dtype(mut self, dtype: DType) -> Self {
        self.x_dtype = dtype;
        self
    }

    /// X is what this quantization writes, of `K` columns and any number of rows, and [`Moe::x_dtype`] the type of what the first products pass on alone.
    pub fn x_quantization(mut self, quantization: &Quantization) -> Self {
        self.x_quantization = Some(quantization.clone());
        self
    }

    /// `p`, of X as the layer has it.
    fn of_x(&self, p: Problem) -> Problem {
        match &self.x_quantization {
            Some(quantization) => p.x_quantization(quantization),
            None => p.x_dtype(self.x_dtype),
        }
    }

    /// What activations of all products may be rounded to, as [`Problem::x_precision`](crate::Problem::x_precision) says.
    pub fn x_precision(mut self, precision: XPrecision) -> Self {
        self.x_precision = precision;
        self
    }

    /// The type of D. f32 when not given.
    pub fn d_dtype(mut self, dtype: DType) -> Self {
        self.d_dtype = dtype;
        self
    }

    /// What the first products go through: SiLU when not given. Of gated pairs, the gate does.
    pub fn activation(mut self, activation: Activation) -> Self {
        self.activation = activation;
        self
    }

    /// Chooses experts from logits of type `dtype`, as `describe` says of a [`Routing`]. Else ids and weights are given.
    pub fn routed(mut self, dtype: DType, describe: impl FnOnce(Routing) -> Routing) -> Self {
        self.routing = Some(describe(Routing::from_logits(1, self.experts, self.top_k, dtype)));
        self
    }

    /// Adds the products of an expert that every token goes to: a pair of gate and up or one weight, and a down.
    pub fn shared(mut self, up: &Weight, down: &Weight) -> Self {
        self.shared = Some((up.clone(), down.clone()));
        self
    }

    /// Adds biases of this type to the products of the experts' up, those of all experts one after the other, as
    /// [`Problem::bias`](crate::Problem::bias) has them.
    pub fn up_bias(mut self, dtype: DType) -> Self {
        self.biases[0] = Some(dtype);
        self
    }

    /// The same of down.
    pub fn down_bias(mut self, dtype: DType) -> Self {
        self.biases[1] = Some(dtype);
        self
    }

    /// Adds a residual of this type to the sum.
    pub fn residual(mut self, dtype: DType) -> Self {
        self.residual = Some(dtype);
        self
    }
}

/// A feed-forward layer of experts for any number of tokens:
/// `D[t] = Σj weights[t, j] · down(e) · activation(up(e) · X[t])` with `e = ids[t, j]`, in the order of the slots and in f32, and what an
/// expert for all tokens and a residual add. Made by [`Context::moe_layer`].
///
/// A run launches a routing (of given ids where kernels take lists of them), and on GPUs at most four kernels more, six with an expert for all tokens. It reads
/// nothing back: in a captured CUDA graph, replays follow the ids of the moment.
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
/// // Before the first request: plans are made for one to four tokens, and one workspace serves them.
/// let mut workspace = layer.workspace(1..=4)?;
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
    shared: Option<(Linear, Linear)>,
    plans: Arc<PlansByTokens<MoePlan>>,
}

/// The plans of a layer for one number of tokens.
#[derive(Debug)]
pub struct MoePlan {
    routing: Option<RoutingPlan>,
    up: ExpertPlan,
    down: ExpertPlan,
}

/// What a run of a [`MoeLayer`] reads and writes.
#[derive(Debug)]
#[non_exhaustive]
pub struct MoeArgs<'a> {
    /// Activations, `[tokens, K]`.
    pub x: XRef<'a>,
    /// The factor, an f32, that X was quantized with, where it was given ([`Quantization::given_factor`]).
    pub x_factor: Option<BufferRef<'a>>,
    /// Output, `[tokens, N]`.
    pub d: BufferMut<'a>,
    /// Where experts come from.
    pub source: MoeSource<'a>,
    /// An f32 an expert, when the routing is [biased](Routing::biased).
    pub bias: Option<BufferRef<'a>>,
    /// The biases of up and of down, when the layer adds them.
    pub biases: [Option<BufferRef<'a>>; 2],
    /// The residual, `[tokens, N]`, when the layer adds one.
    pub residual: Option<BufferRef<'a>>,
}

/// Where the experts of tokens come from.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum MoeSource<'a> {
    /// `[tokens, E]`, of a layer that is [routed](Moe::routed).
    Logits(BufferRef<'a>),
    /// An i32 and an f32 a slot, of one that is not.
    Given {
        /// Ids of experts.
        ids: BufferRef<'a>,
        /// What their results are multiplied with.
        weights: BufferRef<'a>,
    },
}

impl<'a> MoeArgs<'a> {
    /// Of a layer that chooses experts.
    pub fn from_logits(x: impl Into<XRef<'a>>, logits: impl Into<BufferRef<'a>>, d: impl Into<BufferMut<'a>>) -> Self {
        Self::new(x.into(), MoeSource::Logits(logits.into()), d.into())
    }

    /// Of a layer that is given them.
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

    /// With the factor that X was quantized with.
    pub fn x_factor(mut self, factor: impl Into<BufferRef<'a>>) -> Self {
        self.x_factor = Some(factor.into());
        self
    }

    /// With the bias of the routing.
    pub fn bias(mut self, bias: impl Into<BufferRef<'a>>) -> Self {
        self.bias = Some(bias.into());
        self
    }

    /// With the biases of all experts' up.
    pub fn up_bias(mut self, bias: impl Into<BufferRef<'a>>) -> Self {
        self.biases[0] = Some(bias.into());
        self
    }

    /// With the biases of all experts' down.
    pub fn down_bias(mut self, bias: impl Into<BufferRef<'a>>) -> Self {
        self.biases[1] = Some(bias.into());
        self
    }

    /// With the residual.
    pub fn residual(mut self, residual: impl Into<BufferRef<'a>>) -> Self {
        self.residual = Some(residual.into());
        self
    }
}

/// What the kernels of a run leave for one another. Runs that share one must not be at work at the same time: keep one a stream.
#[derive(Debug)]
pub struct MoeWorkspace {
    tokens: usize,
    of_plans: Workspace,
    ids: Buffer,
    weights: Buffer,
    lists: Buffer,
    counts: Buffer,
    hidden: Buffer,
    shared: Option<[Buffer; 2]>,
    routing_status: Buffer,
    status: Buffer,
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
        let moe = describe(Moe::new(up.experts(), top_k));
        let shared = match &moe.shared {
            None => None,
            Some((shared_up, shared_down)) => Some(Self::shared_layers(ctx, &moe, shared_up, shared_down, up, down)?),
        };
        let layer = Self {
            ctx: ctx.clone(),
            up: up.clone(),
            down: down.clone(),
            moe,
            shared,
            plans: Arc::new(PlansByTokens::new()),
        };
        // Most of what can be wrong is so for every number of tokens.
        layer.plan(1)?;
        Ok(layer)
    }

    fn shared_layers(
        ctx: &Context,
        moe: &Moe,
        shared_up: &Weight,
        shared_down: &Weight,
        up: &Experts,
        down: &Experts,
    ) -> Result<(Linear, Linear), Error> {
        let fits = shared_up.k() == up.k() && shared_down.k() == shared_up.n() && shared_down.n() == down.n();
        if !fits || shared_down.is_gated() {
            let expected = format!("an up of I x {} and a down of {} x I for all tokens", up.k(), down.n());
            let got = format!("{} and {}", shared_up.shape(), shared_down.shape());
            return Err(Error::WrongWeight { expected, got });
        }
        let first = ctx.layer(shared_up, |p| {
            moe.of_x(p).x_precision(moe.x_precision).d_dtype(moe.x_dtype).activation(moe.activation)
        })?;
        let second = ctx.layer(shared_down, |p| {
            let p = p.x_dtype(moe.x_dtype).x_precision(moe.x_precision).d_dtype(DType::F32);
            match moe.residual {
                Some(residual) => p.residual(residual),
                None => p,
            }
        })?;
        Ok((first, second))
    }

    /// The plans for `tokens` tokens; made now where they have not been before.
    ///
    /// # Errors
    /// As [`Context::plan_experts`] and [`Context::plan_routing`].
    pub fn plan(&self, tokens: usize) -> Result<impl Deref<Target = MoePlan> + '_, Error> {
        match self.plans.get(tokens) {
            Some(plan) => Ok(Found::Kept(plan)),
            None => Ok(self.plans.keep(tokens, self.make_plan(tokens)?)),
        }
    }

    fn make_plan(&self, tokens: usize) -> Result<MoePlan, Error> {
        let Self { ctx, up, down, moe, .. } = self;
        let biased = |p: Problem, dtype: Option<DType>| match dtype {
            Some(dtype) => p.bias(dtype),
            None => p,
        };
        // What is wrong with ids, the second products look for.
        let first = ExpertProblem::indexed(up, tokens, moe.top_k)
            .each(|p| {
                biased(
                    moe.of_x(p).x_precision(moe.x_precision).d_dtype(moe.x_dtype).activation(moe.activation),
                    moe.biases[0],
                )
            })
            .unchecked();
        let added = if self.shared.is_some() { Some(DType::F32) } else { moe.residual };
        let second = ExpertProblem::indexed(down, tokens, moe.top_k).x_per_slot().combined().each(|p| {
            let p = biased(p.x_dtype(moe.x_dtype).x_precision(moe.x_precision).d_dtype(moe.d_dtype), moe.biases[1]);
            match added {
                Some(dtype) => p.residual(dtype),
                None => p,
            }
        });
        if let Some((first, second)) = &self.shared {
            first.prepare([tokens])?;
            second.prepare([tokens])?;
        }
        let listed = [ctx.plan_experts(&first.clone().listed())?, ctx.plan_experts(&second.clone().listed())?];
        let lists = listed.iter().any(ExpertPlan::reads_lists);
        let [up, down] = if lists { listed } else { [ctx.plan_experts(&first)?, ctx.plan_experts(&second)?] };
        let routing = match &moe.routing {
            _ if tokens == 0 => None,
            Some(routing) => {
                let routing = routing.clone().of_tokens(tokens);
                Some(ctx.plan_routing(&if lists { routing.lists() } else { routing })?)
            }
            // Lists of given ids are made once for both products.
            None if lists => Some(ctx.plan_routing(&Routing::from_ids(tokens, moe.experts, moe.top_k))?),
            None => None,
        };
        Ok(MoePlan { routing, up, down })
    }

    /// Plans for each of these numbers of tokens, makes the kernels ready (which may compile them), and allocates a workspace that serves
    /// all of them.
    ///
    /// # Errors
    /// As [`MoeLayer::plan`], or exhausted memory.
    pub fn workspace(&self, tokens: impl IntoIterator<Item = usize>) -> Result<MoeWorkspace, Error> {
        let (mut most, mut bytes) = (0, 0);
        for tokens in tokens {
            let plan = self.plan(tokens)?;
            let routing = plan.routing.as_ref().map_or(0, RoutingPlan::workspace_bytes);
            bytes =
                [bytes, routing, plan.up.workspace_bytes(), plan.down.workspace_bytes()].into_iter().max().unwrap_or(0);
            if let Some((first, second)) = &self.shared {
                bytes = bytes.max(first.prepare([tokens])?).max(second.prepare([tokens])?);
            }
            most = most.max(tokens);
        }
        let (ctx, width) = (&self.ctx, self.moe.x_dtype.bytes());
        let slots = most.saturating_mul(self.moe.top_k);
        let lists = expert_lists(self.moe.experts, slots).map_or(usize::MAX, |[_, slots]| slots.end);
        let allocate = |count: usize, width: usize| ctx.allocate(count.saturating_mul(width));
        let routed = if self.moe.routing.is_some() { slots } else { 0 };
        let shared = match &self.shared {
            None => None,
            Some((first, second)) => Some([
                allocate(most.saturating_mul(first.weight().n()), width)?,
                allocate(most.saturating_mul(second.weight().n()), DType::F32.bytes())?,
            ]),
        };
        Ok(MoeWorkspace {
            tokens: 0,
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

    /// Submits the layer for `tokens` tokens to `stream`. After a [`MoeLayer::workspace`] for this number it does what
    /// [`ExpertPlan::run`] does and no more, and may be captured in a CUDA graph; a number that is new is planned first.
    ///
    /// # Errors
    /// As [`MoeLayer::plan`], and when an operand is missing, too short, misaligned, on another device or not part of the layer.
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
        let plan = self.plan(tokens)?;
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
                routing.run(stream, args)?;
                (ids.view(), weights.view())
            }
            (routing, MoeSource::Given { ids, weights }) if self.moe.routing.is_none() => {
                if let Some((routing, made_lists)) = routing.as_ref().zip(made_lists) {
                    let args = RoutingArgs::of_ids(ids, made_lists, routing_status.view_mut());
                    routing.run(stream, RoutingArgs { workspace: Some(&mut *of_plans), ..args })?;
                }
                (ids, weights)
            }
            (_, MoeSource::Given { .. }) => return Err(Error::UnexpectedOperand { operand: "given ids" }),
            (_, MoeSource::Logits(_)) => return Err(Error::UnexpectedOperand { operand: "logits" }),
        };
        let lists = is_listed.then(|| lists.view());
        let mut first = ExpertArgs::new(x, &self.up, ids, hidden.view_mut()).workspace(of_plans);
        (first.x_factor, first.bias, first.lists) = (x_factor, biases[0], lists);
        plan.up.run(stream, first)?;
        let added = match (&self.shared, shared) {
            (Some((first, second)), Some([hidden, out])) => {
                let mut args = first.args(x, hidden.view_mut()).workspace(of_plans);
                args.x_factor = x_factor;
                first.run(stream, tokens, args)?;
                let mut args = second.args(hidden.view(), out.view_mut()).workspace(of_plans);
                args.residual = residual;
                second.run(stream, tokens, args)?;
                Some(out.view())
            }
            _ => residual,
        };
        let mut second = ExpertArgs::new(hidden.view(), &self.down, ids, d).router_weights(weights);
        (second.bias, second.residual, second.lists) = (biases[1], added, lists);
        plan.down.run(stream, second.status(status.view_mut()).workspace(of_plans))?;
        workspace.tokens = tokens;
        Ok(())
    }

    /// Waits for the default stream and says whether in the last run with this workspace every slot had an expert and a weight.
    ///
    /// # Errors
    /// As [`RoutingPlan::check_status`] and [`ExpertPlan::check_status`], or a device error.
    pub fn check_status(&self, workspace: &MoeWorkspace) -> Result<(), Error> {
        if workspace.tokens == 0 {
            return Ok(());
        }
        let plan = self.plan(workspace.tokens)?;
        // What is wrong with given ids, the products say, too, and that of weights.
        if let Some(routing) = plan.routing.as_ref().filter(|_| self.moe.routing.is_some()) {
            routing.check_status(&self.ctx, &workspace.routing_status)?;
        }
        plan.down.check_status(&self.ctx, &workspace.status)
    }
}

impl fmt::Debug for MoeLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { up, down, moe, .. } = self;
        f.debug_struct("MoeLayer").field("up", up).field("down", down).field("moe", moe).finish_non_exhaustive()
    }
}

impl MoePlan {
    /// Launches of a run, an expert for all tokens aside.
    pub fn launches(&self) -> usize {
        let steps = |plan: &ExpertPlan| plan.sequence().map_or(0, |sequence| sequence.steps().len());
        let routing = self.routing.as_ref().map_or(0, |plan| plan.sequence().steps().len());
        routing + steps(&self.up) + steps(&self.down)
    }

    /// The routing; `None` where ids are given or there are no tokens.
    pub fn routing(&self) -> Option<&RoutingPlan> {
        self.routing.as_ref()
    }

    /// The products of gate and up.
    pub fn up(&self) -> &ExpertPlan {
        &self.up
    }

    /// The products of down, and their sum.
    pub fn down(&self) -> &ExpertPlan {
        &self.down
    }
}

/// The launches of a run, one after the other.
impl fmt::Display for MoePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(routing) = &self.routing {
            writeln!(f, "{routing}")?;
        }
        write!(f, "{}\n{}", self.up, self.down)
    }
}
