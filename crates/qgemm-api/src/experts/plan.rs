//! [`ExpertPlan`]: kernels made ready for one problem with experts.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use qgemm_formats::{DType, ElementType};
use qgemm_hal::{
    BufferMut, BufferRef, CheckedExperts, Dense, Device, DeviceId, ExpertFault, ExpertForm, ExpertOperand, ExpertsPlan,
    Family, KernelId, LaunchSequence, Operands, Operation, Stream,
};
use qgemm_sched::experts::{candidates, choose};
use qgemm_sched::{Offered, TunedTable};

use super::problem::ExpertProblem;
use super::weights::{Experts, ExpertsShape};
use crate::context::Context;
use crate::error::Error;
use crate::gemm::{XOf, XRef, stored_x};
use crate::normed::{Shared, behind_norm, preferences_beside};
use crate::operand::{Checks, Extent, portion_of, zero};
use crate::plain_x::{XOperands, behind_dequantize, behind_quantize};
use crate::plan_cache::{PlanCaches, Ready};
use crate::workspace::Workspace;

/// A fault and its place.
const STATUS_BYTES: usize = 2 * size_of::<u32>();

/// Kernels chosen and made ready for one [`ExpertProblem`]; made by
/// [`Context::plan_experts`](crate::Context::plan_experts). Its text says what a run launches.
///
/// A plan belongs to shapes, not to weights or to an index: it runs with all experts of that number, format and size, and with
/// every index.
#[derive(Debug)]
pub struct ExpertPlan {
    op: CheckedExperts,
    device: Arc<dyn Device>,
    shape: ExpertsShape,
    extents: Extents,
    /// `None` where there are no rows.
    ready: Option<Arc<Ready<CheckedExperts>>>,
}

/// Bytes that a run wants of each operand.
#[derive(Clone, Copy, Debug)]
struct Extents {
    /// Of plain numbers; a quantized X is checked by its description.
    x: Option<Extent>,
    d: Extent,
    c: Option<Extent>,
    bias: Option<Extent>,
    token_scale: Option<Extent>,
    residual: Option<Extent>,
    gamma: Option<Extent>,
    beta: Option<Extent>,
    index: Extent,
    router_weights: Option<Extent>,
    lists: Option<Extent>,
}

impl Extents {
    fn of(op: &CheckedExperts) -> Self {
        let each = &op.each;
        let output = |dense: &Dense, rows: usize| Extent::of(dense, rows, each.out_features);
        let of_columns = |dtype: DType| Extent::of_values(dtype, each.k);
        let (d, residual) = match &op.combine {
            None => (output(&each.d, each.m), each.residual.map(|dense| output(&dense, each.m))),
            Some(combine) => {
                let tokens = op.tokens();
                (output(&combine.d, tokens), combine.residual.map(|dense| output(&dense, tokens)))
            }
        };
        Self {
            x: stored_x(each).map(|x| Extent::of(&x, op.x_rows(), each.k)),
            d,
            c: each.c.map(|dense| output(&dense, each.m)),
            bias: each.bias.map(|dtype| Extent::of_values(dtype, op.weights() * each.bias_len())),
            token_scale: each.token_scale.then(|| Extent::of_values(DType::F32, each.m)),
            residual,
            gamma: each.norm.and_then(|norm| norm.function.gamma).map(of_columns),
            beta: each.norm.and_then(|norm| norm.function.beta).map(of_columns),
            index: Extent::of_values(ElementType::Int32, op.index_len()),
            router_weights: op.combine.map(|_| Extent::of_values(DType::F32, each.m)),
            lists: op
                .list_parts()
                .filter(|_| op.lists)
                .map(|[_, slots]| Extent::of_values(ElementType::Int32, slots.end / 4)),
        }
    }
}

/// What one run of an [`ExpertPlan`] reads and writes.
///
/// ```
/// use qgemm_api::{Context, DType, ExpertArgs, ExpertProblem, HostExperts, quantize};
///
/// let ctx = Context::open("cpu")?;
/// let one = |value: f32| quantize(&[value; 64 * 32], 64, 32, "q8_0".parse().unwrap()).unwrap().0;
/// let experts = ctx.load_experts(&HostExperts::new(&[one(1.0), one(2.0), one(3.0)])?)?;
///
/// // One token, given to experts 2 and 0, whose results count a quarter and a half.
/// let plan = ctx.plan_experts(&ExpertProblem::indexed(&experts, 1, 2).combined())?;
/// let x = ctx.upload(&DType::F32.encode(&[1.0; 32]))?;
/// let ids = ctx.upload(&[2i32, 0].map(i32::to_le_bytes).concat())?;
/// let weights = ctx.upload(&DType::F32.encode(&[0.25, 0.5]))?;
/// let mut d = ctx.allocate(64 * 4)?;
/// let mut status = ctx.allocate(8)?;
/// let mut workspace = ctx.workspace(plan.workspace_bytes())?;
/// let args = ExpertArgs::new(&x, &experts, &ids, &mut d).router_weights(&weights);
/// plan.run(&ctx.default_stream(), args.status(&mut status).workspace(&mut workspace))?;
/// plan.check_status(&ctx, &status)?; // every id was an expert's
/// let d = DType::F32.decode(&ctx.download(&d)?);
/// assert!(d.iter().all(|v| (v - (0.25 * 3.0 + 0.5 * 1.0) * 32.0).abs() < 0.1));
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct ExpertArgs<'a> {
    /// Activations.
    pub x: XRef<'a>,
    /// The factor, an f32, that X was quantized with, where it was given ([`Quantization::given_factor`]).
    ///
    /// [`Quantization::given_factor`]: crate::Quantization::given_factor
    pub x_factor: Option<BufferRef<'a>>,
    /// The experts.
    pub w: &'a Experts,
    /// Which rows are whose: `E + 1` offsets, `E` counts, or an id a slot, of four bytes each.
    pub index: BufferRef<'a>,
    /// Output.
    pub d: BufferMut<'a>,
    /// C, when the problem adds `beta · C`.
    pub c: Option<BufferRef<'a>>,
    /// The biases of all experts, one after the other, when the problem adds a bias; one where they [share](crate::Weight::shared_by) a weight.
    pub bias: Option<BufferRef<'a>>,
    /// A value for each row in f32, when the problem scales tokens.
    pub token_scale: Option<BufferRef<'a>>,
    /// The residual, when the problem adds one.
    pub residual: Option<BufferRef<'a>>,
    /// K values, when the problem normalizes X with a gamma.
    pub gamma: Option<BufferRef<'a>>,
    /// K values, when the problem normalizes X with a beta.
    pub beta: Option<BufferRef<'a>>,
    /// A value for each slot in f32, when slots are [combined](ExpertProblem::combined).
    pub router_weights: Option<BufferRef<'a>>,
    /// The slots of each expert, when the problem is [listed](ExpertProblem::listed).
    pub lists: Option<BufferRef<'a>>,
    /// Tokens of this run, or rows that are sorted by expert, where they are fewer than those planned.
    pub tokens: Option<usize>,
    /// Eight bytes that the run writes for [`ExpertPlan::check_status`], unless the index is [unchecked](ExpertProblem::unchecked).
    pub status: Option<BufferMut<'a>>,
    /// At least [`ExpertPlan::workspace_bytes`], when that is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

/// Where a buffer of lists of `slots` slots of `experts` experts has the offsets, and where the slots, in bytes; `None` where it would
/// be longer than memory has addresses.
///
/// ```
/// let [offsets, rows] = qgemm_api::expert_lists(128, 256).unwrap();
/// assert_eq!((offsets, rows), (0..129 * 4, 768..768 + 256 * 4));
/// ```
pub fn expert_lists(experts: usize, slots: usize) -> Option<[Range<usize>; 2]> {
    qgemm_hal::list_parts(experts, slots)
}

impl<'a> ExpertArgs<'a> {
    /// What every run has. Methods add the other operands.
    pub fn new(
        x: impl Into<XRef<'a>>,
        w: &'a Experts,
        index: impl Into<BufferRef<'a>>,
        d: impl Into<BufferMut<'a>>,
    ) -> Self {
        Self {
            x: x.into(),
            x_factor: None,
            w,
            index: index.into(),
            d: d.into(),
            c: None,
            bias: None,
            token_scale: None,
            residual: None,
            gamma: None,
            beta: None,
            router_weights: None,
            lists: None,
            tokens: None,
            status: None,
            workspace: None,
        }
    }

    /// With the factor that X was quantized with: see [`ExpertArgs::x_factor`].
    pub fn x_factor(mut self, factor: impl Into<BufferRef<'a>>) -> Self {
        self.x_factor = Some(factor.into());
        self
    }

    /// With eight bytes for [`ExpertPlan::check_status`].
    pub fn status(mut self, status: impl Into<BufferMut<'a>>) -> Self {
        self.status = Some(status.into());
        self
    }

    /// With the C of [`Problem::c`](crate::Problem::c).
    pub fn c(mut self, c: impl Into<BufferRef<'a>>) -> Self {
        self.c = Some(c.into());
        self
    }

    /// With the biases of all experts, one after the other.
    pub fn bias(mut self, bias: impl Into<BufferRef<'a>>) -> Self {
        self.bias = Some(bias.into());
        self
    }

    /// With a factor for each row.
    pub fn token_scale(mut self, token_scale: impl Into<BufferRef<'a>>) -> Self {
        self.token_scale = Some(token_scale.into());
        self
    }

    /// With the residual of [`Problem::residual`](crate::Problem::residual).
    pub fn residual(mut self, residual: impl Into<BufferRef<'a>>) -> Self {
        self.residual = Some(residual.into());
        self
    }

    /// With the gamma of [`Problem::norm`](crate::Problem::norm).
    pub fn gamma(mut self, gamma: impl Into<BufferRef<'a>>) -> Self {
        self.gamma = Some(gamma.into());
        self
    }

    /// With the beta of [`Problem::norm`](crate::Problem::norm).
    pub fn beta(mut self, beta: impl Into<BufferRef<'a>>) -> Self {
        self.beta = Some(beta.into());
        self
    }

    /// With a value for each slot in f32, when slots are [combined](ExpertProblem::combined).
    pub fn router_weights(mut self, router_weights: impl Into<BufferRef<'a>>) -> Self {
        self.router_weights = Some(router_weights.into());
        self
    }

    /// With the slots of each expert, when the problem is [listed](ExpertProblem::listed): the offsets of a [`RoutingLists`] at
    /// [`expert_lists`]`[0]`, its rows at `[1]`. Lists that are wrong do no harm; they are taken to be of the ids that are given.
    ///
    /// [`RoutingLists`]: crate::RoutingLists
    /// [`expert_lists`]: crate::expert_lists
    pub fn lists(mut self, lists: impl Into<BufferRef<'a>>) -> Self {
        self.lists = Some(lists.into());
        self
    }

    /// For the first `tokens` tokens of those that were planned, or so many rows that are sorted by expert: operands need no more than
    /// these. Not with a [capacity](ExpertProblem::masked), whose counts say how many rows there are, nor with a norm.
    pub fn tokens(mut self, tokens: usize) -> Self {
        self.tokens = Some(tokens);
        self
    }

    /// With a workspace of at least [`ExpertPlan::workspace_bytes`].
    pub fn workspace(mut self, workspace: &'a mut Workspace) -> Self {
        self.workspace = Some(workspace);
        self
    }
}

impl ExpertPlan {
    pub(crate) fn new(
        shared: &Arc<dyn Device>,
        tuned: &TunedTable,
        caches: &PlanCaches,
        problem: &ExpertProblem,
    ) -> Result<Self, Error> {
        let (op, device) = (problem.check()?, &**shared);
        let preferences = preferences_beside(op.each.normed_regions(op.x_rows(), 0), problem.preferences())?;
        let key = (op, preferences);
        let (op, preferences) = &key;
        let make = || {
            let (experts, each) = (op.experts, &op.each);
            let (rows, format) = (each.m, each.format);
            let _span =
                tracing::info_span!("plan experts", experts, rows, n = each.stored_rows, k = each.k, %format).entered();
            let (family, plan) = choose(op, device.info(), device.catalog().experts, preferences, tuned)?;
            Ok::<_, Error>(Ready { family, plan, sequence: sequence(device, op, family, &plan)? })
        };
        let ready = if op.is_nothing() { None } else { Some(caches.experts.get_or_make(&key, make)?) };
        Ok(Self::of(shared, problem, key.0, ready))
    }

    pub(crate) fn every_way(
        device: &Arc<dyn Device>,
        tuned: &TunedTable,
        problem: &ExpertProblem,
    ) -> Result<Vec<Self>, Error> {
        let (op, ways) = Self::ways(&**device, tuned, problem)?;
        ways.iter().map(|way| Self::of_way(device, problem, &op, way)).collect()
    }

    /// Candidates of a problem, fastest first; empty without rows.
    pub(crate) fn ways(
        device: &dyn Device,
        tuned: &TunedTable,
        problem: &ExpertProblem,
    ) -> Result<(CheckedExperts, Vec<Offered<'static, CheckedExperts>>), Error> {
        let op = problem.check()?;
        if op.is_nothing() {
            return Ok((op, Vec::new()));
        }
        let preferences = preferences_beside(op.each.normed_regions(op.x_rows(), 0), problem.preferences())?;
        let all = candidates(&op, device.info(), device.catalog().experts, &preferences, tuned);
        Ok((op, all.offered))
    }

    /// The plan of one of them.
    pub(crate) fn of_way(
        device: &Arc<dyn Device>,
        problem: &ExpertProblem,
        op: &CheckedExperts,
        way: &Offered<'static, CheckedExperts>,
    ) -> Result<Self, Error> {
        let Offered { family, plan, .. } = *way;
        let sequence = sequence(&**device, op, family, &plan)?;
        Ok(Self::of(device, problem, op.clone(), Some(Arc::new(Ready { family, plan, sequence }))))
    }

    fn of(
        device: &Arc<dyn Device>,
        problem: &ExpertProblem,
        op: CheckedExperts,
        ready: Option<Arc<Ready<CheckedExperts>>>,
    ) -> Self {
        Self { extents: Extents::of(&op), device: Arc::clone(device), shape: *problem.shape(), op, ready }
    }

    /// Bytes of workspace that [`ExpertPlan::run`] needs.
    pub fn workspace_bytes(&self) -> usize {
        self.launch().map_or(0, |launch| {
            let own = launch.workspace_bytes;
            self.op.each.normed_regions(self.op.x_rows(), own).map_or(own, |regions| regions.all().end)
        })
    }

    /// Name of the chosen kernel, such as `gemm_nt_q4_k_f16_indexed`; `none` where there are no rows.
    pub fn kernel_name(&self) -> &str {
        self.sequence().map_or("none", LaunchSequence::name)
    }

    /// Whether slots are multiplied expert by expert, by lists of them: those of a problem that is
    /// [listed](ExpertProblem::listed), or others that a run makes.
    pub fn reads_lists(&self) -> bool {
        let is_indexed = matches!(self.op.form, ExpertForm::Indexed { .. });
        is_indexed && self.launch().is_some_and(|plan| plan.config.grouped)
    }

    /// Whether what was written before this product is settled for the run after it.
    pub(crate) fn settles(&self) -> bool {
        self.launch().is_some_and(|plan| plan.config.settles)
    }

    /// Identity of the chosen kernel; `None` where there are no rows.
    pub fn kernel_id(&self) -> Option<KernelId> {
        self.launch().map(|launch| launch.config.kernel_id(&self.op))
    }

    /// The chosen configuration; `None` where there are no rows.
    pub fn launch(&self) -> Option<&ExpertsPlan> {
        self.ready.as_ref().map(|ready| &ready.plan)
    }

    /// The kernels that a run launches, in order; `None` where there are no rows.
    pub fn sequence(&self) -> Option<&LaunchSequence> {
        self.ready.as_ref().map(|ready| &ready.sequence)
    }

    /// The validated operation.
    pub fn op(&self) -> &CheckedExperts {
        &self.op
    }

    /// Bytes that a run must move at least when as many experts as possible have rows.
    pub fn bytes(&self) -> u64 {
        self.op.traffic() as u64
    }

    /// Multiply-adds of a run in which every row is given to an expert.
    pub fn macs(&self) -> f64 {
        self.op.macs()
    }

    /// The device that the plan is for.
    pub fn device(&self) -> DeviceId {
        self.shape.each.device
    }

    /// Submits the products to `stream`. Allocates nothing, waits for nothing and takes no lock, so it may be captured in a CUDA
    /// graph, whose replays read the index anew.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, on another device or not part of the problem; when the experts are not
    /// like those planned for; or a device error. Nothing has been written then.
    pub fn run(&self, stream: &Stream, mut args: ExpertArgs<'_>) -> Result<(), Error> {
        let workspace = args.workspace.take().map(Workspace::view);
        self.run_within(stream, args, workspace)
    }

    /// [`ExpertPlan::run`] with a workspace that may be part of another buffer, in place of that of `args`.
    pub(crate) fn run_within(
        &self,
        stream: &Stream,
        args: ExpertArgs<'_>,
        workspace: Option<BufferMut<'_>>,
    ) -> Result<(), Error> {
        let ExpertArgs {
            x,
            x_factor,
            w,
            index,
            d,
            status,
            c,
            bias,
            token_scale,
            residual,
            gamma,
            beta,
            router_weights,
            lists,
            tokens,
            workspace: _,
        } = args;
        let checks = Checks(self.device());
        checks.device("stream", stream.device())?;
        checks.device("weight", w.device())?;
        self.shape.check_serves(w.shape())?;
        let portion = portion_of(tokens, self.op.tokens())?;
        if portion.is_some() && matches!(self.op.form, ExpertForm::Masked { .. }) {
            let why = "counts say how many rows there are";
            return Err(Error::NotForExperts { what: "fewer tokens than were planned", why });
        }
        let op = &self.op.of_portion(portion);
        let of = if portion.is_some() { Extents::of(op) } else { self.extents };
        use ExpertOperand as O;
        let mut operands = Operands::new();
        operands.take_portion(portion);
        let names = [O::X, O::XScales, O::XPlaneFactors, O::XSums];
        let read = XOf { op: &op.each, rows: op.x_rows(), plain: of.x };
        read.give(x, x_factor, checks, names, &mut operands)?;
        checks.view("D", d.view(), of.d)?;
        checks.view("index", index, of.index)?;
        let two_words = self.op.checks_index.then(|| Extent::of_values(ElementType::Int32, 2));
        let status = checks.optional("status", status, two_words, "the problem has its index checked")?;
        let c = checks.optional("C", c, of.c, "the problem adds beta · C")?;
        let bias = checks.optional("bias", bias, of.bias, "the problem adds a bias")?;
        let token_scale = checks.optional("row factors", token_scale, of.token_scale, "the problem scales rows")?;
        let residual = checks.optional("residual", residual, of.residual, "the problem adds a residual")?;
        let router_weights =
            checks.optional("router weights", router_weights, of.router_weights, "the problem combines slots")?;
        let lists = checks.optional("lists", lists, of.lists, "the problem is listed")?;
        let gamma = checks.optional("gamma", gamma, of.gamma, "the problem normalizes X with a gamma")?;
        let beta = checks.optional("beta", beta, of.beta, "the problem normalizes X with a beta")?;
        let Some(ready) = self.ready.as_ref().filter(|_| !op.is_nothing()) else {
            // Without rows nothing is wrong with the index.
            return zero(&*self.device, stream, status, two_words);
        };
        w.give(&mut operands);
        operands.read(O::Index, index);
        operands.read_if_any(O::C, c);
        operands.read_if_any(O::Bias, bias);
        operands.read_if_any(O::TokenScale, token_scale);
        operands.read_if_any(O::Residual, residual);
        operands.read_if_any(O::Gamma, gamma);
        operands.read_if_any(O::Beta, beta);
        operands.read_if_any(O::RouterWeights, router_weights);
        operands.read_if_any(O::Lists, lists);
        operands.write(O::D, d);
        if let Some(status) = status {
            operands.write(O::Status, status);
        }
        let why = "the plan keeps lists, gathered, normalized, plain or quantized rows, or the slots' products";
        if let Some(workspace) = checks.workspace(workspace, self.workspace_bytes(), why)? {
            operands.write(O::Workspace, workspace);
        }
        let _span = tracing::trace_span!("launch", kernel = self.kernel_name()).entered();
        Ok(ready.sequence.run_for(op, stream, operands)?)
    }

    /// Waits for the default stream and says whether the index of the run that wrote `status` was right.
    ///
    /// # Errors
    /// [`Error::BadExpertIndex`] with the first place that is wrong, [`Error::BufferTooShort`], or a device error.
    pub fn check_status<'a>(&self, ctx: &Context, status: impl Into<BufferRef<'a>>) -> Result<(), Error> {
        let status = status.into();
        Checks(self.device()).device("context", ctx.info().id)?;
        Checks(self.device()).device("status", status.device())?;
        let bytes: Vec<u8> = ctx.download(status)?;
        let word =
            |at: usize| bytes.get(at..at + 4).and_then(|bytes| bytes.first_chunk()).map(|b| u32::from_le_bytes(*b));
        let (Some(code), Some(place)) = (word(0), word(4)) else {
            return Err(Error::BufferTooShort { operand: "status", expected: STATUS_BYTES, got: bytes.len() });
        };
        let top_k = match self.op.form {
            ExpertForm::Indexed { top_k, .. } => Some(top_k),
            _ => None,
        };
        match ExpertFault::ALL.into_iter().find(|fault| *fault as u32 == code) {
            Some(fault) => Err(Error::BadExpertIndex { fault, place: place as usize, top_k }),
            None => Ok(()),
        }
    }
}

/// What a run launches: the norm of X, or what makes X plain or quantizes it, where there is such a step, and what `family` has for `plan`.
fn sequence(
    device: &dyn Device,
    op: &CheckedExperts,
    family: &dyn Family<CheckedExperts>,
    plan: &ExpertsPlan,
) -> Result<LaunchSequence, Error> {
    use ExpertOperand as O;
    let products = family.prepare(device, &op.product(plan), plan)?.with_math(plan.config.tile.math);
    let of = XOperands { x: O::X, scales: O::XScales, factors: O::XPlaneFactors, workspace: O::Workspace };
    if let Some((step, regions)) = op.quantize_step(plan) {
        return behind_quantize(device, &step, regions, products, of, O::XSums);
    }
    if let (Some(region), Some((_, step))) = (&plan.dequantized, op.dequantized()) {
        return behind_dequantize(device, &step, region, products, of);
    }
    let regions = op.each.normed_regions(op.x_rows(), plan.workspace_bytes);
    let Some((norm, regions)) = op.norm_prologue().zip(regions) else { return Ok(products) };
    let shared = Shared { x: O::X, gamma: O::Gamma, beta: O::Beta, workspace: O::Workspace, planes: None };
    behind_norm(device, &norm, regions, products, shared)
}

/// What was chosen, and the launches of a run: each with its kernel, geometry and operands.
impl fmt::Display for ExpertPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (each, experts) = (&self.op.each, self.op.experts);
        let (name, rows, n, k) = (self.kernel_name(), each.m, each.out_features, each.k);
        write!(f, "{name} for {rows} rows with {experts} experts of {n} x {k} on {}", self.device())?;
        let Some(Ready { plan, sequence, .. }) = self.ready.as_deref() else { return Ok(()) };
        let microseconds = plan.estimate * 1e6;
        let workspace_bytes = self.workspace_bytes();
        writeln!(f, ", {workspace_bytes} bytes of workspace, expected to take {microseconds:.1} µs")?;
        let mut given = self.op.operands();
        if workspace_bytes > 0 {
            given.push(ExpertOperand::Workspace);
        }
        sequence.display_with(&given).fmt(f)
    }
}
