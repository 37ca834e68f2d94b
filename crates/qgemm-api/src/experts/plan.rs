//! [`ExpertPlan`]: ready kernels of one problem with experts.

use std::fmt;
use std::ops::{Deref, Range};

use qgemm_formats::{DType, ElementType};
use qgemm_hal::{
    BufferMut, BufferRef, CheckedExperts, Dense, Device, DeviceInfo, ExpertFault, ExpertForm, ExpertOperand,
    ExpertsPlan, Families, Family, LaunchSequence, Schedule, Stream,
};
use qgemm_sched::experts::candidates;
use qgemm_sched::{Candidates, Offered, Preferences, SchedError, TunedTable, wanted_families};

use super::problem::ExpertProblem;
use super::weights::{Experts, ExpertsShape};
use crate::context::Context;
use crate::error::Error;
use crate::gemm::{XOf, XRef, stored_x};
use crate::normed::{Shared, behind_norm, preferences_beside};
use crate::operand::{Checks, Extent, portion_of};
use crate::plain_x::{XOperands, behind_dequantize, behind_quantize};
use crate::planned::{Bound, Chosen, Planned, Wanted, explain};
use crate::record::{Dispatch, DispatchSchedule, PlanRecord, Recorded, Sizes, SplitAxis, Tile, WorkspaceRegion};
use crate::setters::setters;
use crate::workspace::Workspace;

/// Size of a fault and its index.
const STATUS_BYTES: usize = 2 * size_of::<u32>();

/// Ready kernels of one [`ExpertProblem`], from
/// [`Context::plan_experts`](crate::Context::plan_experts). Its
/// text lists the launches of a run.
///
/// A plan depends on shapes, not on weights or an index. It runs
/// with all experts of its number, format and size, and with
/// every index.
#[derive(Debug)]
pub struct ExpertPlan {
    planned: Planned<CheckedExperts>,
    shape: ExpertsShape,
}

impl Deref for ExpertPlan {
    type Target = Planned<CheckedExperts>;

    fn deref(&self) -> &Self::Target {
        &self.planned
    }
}

impl fmt::Display for ExpertPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.planned.fmt(f)
    }
}

/// Operands of one run of an [`ExpertPlan`].
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
    /// Quantization factor of X, an f32, where it was given
    /// ([`Quantization::given_factor`]).
    ///
    /// [`Quantization::given_factor`]: crate::Quantization::given_factor
    pub x_factor: Option<BufferRef<'a>>,
    /// The experts.
    pub w: &'a Experts,
    /// Assignment of rows to experts: `E + 1` offsets, `E` counts, or
    /// one id per slot, four bytes each.
    pub index: BufferRef<'a>,
    /// Output.
    pub d: BufferMut<'a>,
    /// C, when the problem adds `beta · C`.
    pub c: Option<BufferRef<'a>>,
    /// Biases of all experts, concatenated; one if they
    /// [share](crate::Weight::shared_by) a weight.
    pub bias: Option<BufferRef<'a>>,
    /// Scale of each row in f32, when the problem scales tokens.
    pub token_scale: Option<BufferRef<'a>>,
    /// The residual, when the problem adds one.
    pub residual: Option<BufferRef<'a>>,
    /// Gamma of the norm of X, K values.
    pub gamma: Option<BufferRef<'a>>,
    /// Beta of the norm of X, K values.
    pub beta: Option<BufferRef<'a>>,
    /// Router weight of each slot in f32, when slots are
    /// [combined](ExpertProblem::combined).
    pub router_weights: Option<BufferRef<'a>>,
    /// Slots of each expert, when the problem is
    /// [listed](ExpertProblem::listed).
    pub lists: Option<BufferRef<'a>>,
    /// Tokens of this run, or rows sorted by expert, if fewer than
    /// planned.
    pub tokens: Option<usize>,
    /// Status output of eight bytes for [`ExpertPlan::check_status`],
    /// unless the index is [unchecked](ExpertProblem::unchecked).
    pub status: Option<BufferMut<'a>>,
    /// Workspace of at least
    /// [`ExpertPlan::workspace_bytes`](Planned::workspace_bytes),
    /// when that is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

/// Byte ranges of the offsets and of the slots in a buffer of
/// expert lists. `None` if the buffer exceeds the address space.
///
/// ```
/// let [offsets, rows] = qgemm_api::expert_lists(128, 256).unwrap();
/// assert_eq!((offsets, rows), (0..129 * 4, 768..768 + 256 * 4));
/// ```
pub fn expert_lists(experts: usize, slots: usize) -> Option<[Range<usize>; 2]> {
    qgemm_hal::list_parts(experts, slots)
}

impl<'a> ExpertArgs<'a> {
    /// Operands of every run. Methods add the other operands.
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

    setters! {
        /// With the quantization factor of X: see
        /// [`ExpertArgs::x_factor`].
        x_factor: BufferRef,
        /// With eight bytes for [`ExpertPlan::check_status`].
        status: BufferMut,
        /// With the C of [`Problem::c`](crate::Problem::c).
        c: BufferRef,
        /// With the biases of all experts, concatenated.
        bias: BufferRef,
        /// With a scale for each row.
        token_scale: BufferRef,
        /// With the residual of [`Problem::residual`](crate::Problem::residual).
        residual: BufferRef,
        /// With the gamma of [`Problem::norm`](crate::Problem::norm).
        gamma: BufferRef,
        /// With the beta of [`Problem::norm`](crate::Problem::norm).
        beta: BufferRef,
        /// With a router weight for each slot, in f32, when slots are
        /// [combined](ExpertProblem::combined).
        router_weights: BufferRef,
        /// With the slots of each expert, when the problem is
        /// [listed](ExpertProblem::listed). The buffer has the offsets of
        /// a [`RoutingLists`] at [`expert_lists`]`[0]`, and its rows at
        /// `[1]`. Wrong lists are memory-safe. The lists must match the
        /// given ids.
        ///
        /// [`RoutingLists`]: crate::RoutingLists
        /// [`expert_lists`]: crate::expert_lists
        lists: BufferRef,
    }

    /// For the first `tokens` planned tokens, or as many rows sorted
    /// by expert. Operands need no further elements. Not with a
    /// [capacity](ExpertProblem::masked), whose counts give the
    /// number of rows, nor with a norm.
    pub fn tokens(mut self, tokens: usize) -> Self {
        self.tokens = Some(tokens);
        self
    }

    /// With a workspace of at least [`ExpertPlan::workspace_bytes`](Planned::workspace_bytes).
    pub fn workspace(mut self, workspace: &'a mut Workspace) -> Self {
        self.workspace = Some(workspace);
        self
    }
}

impl Context {
    /// Chooses kernels for `problem` and makes them ready. A known
    /// problem costs a lookup, as with [`Context::plan`].
    ///
    /// # Errors
    /// When the problem is invalid, its experts are on another device
    /// or no family serves it; or when the kernel cannot be prepared.
    pub fn plan_experts(&self, problem: &ExpertProblem) -> Result<ExpertPlan, Error> {
        self.check_weight(problem.shape().each.device)?;
        let op = problem.check()?;
        let preferences = preferences_of(&op, problem)?;
        Ok(ExpertPlan { planned: Planned::new(self, op, preferences)?, shape: *problem.shape() })
    }

    /// Plans of all candidates of [`Context::plan_experts`], fastest
    /// first by the cost model. Empty without rows. For tests and
    /// measurements of every candidate.
    ///
    /// # Errors
    /// As [`Context::plan_experts`].
    pub fn plan_experts_candidates(&self, problem: &ExpertProblem) -> Result<Vec<ExpertPlan>, Error> {
        let (op, candidates) = ExpertPlan::candidates(self, problem)?;
        candidates.iter().map(|candidate| ExpertPlan::of_candidate(self, problem, &op, candidate)).collect()
    }

    /// Record of the choice of [`Context::plan_experts`]: see
    /// [`Context::explain`].
    ///
    /// # Errors
    /// When the problem is invalid, or its experts are on another
    /// device.
    pub fn explain_experts(&self, problem: &ExpertProblem) -> Result<PlanRecord, Error> {
        self.check_weight(problem.shape().each.device)?;
        explain(self, &problem.check()?, problem.preferences())
    }
}

/// Preferences of a problem, with its workspace limit less the
/// workspace of a norm before the products.
fn preferences_of(op: &CheckedExperts, problem: &ExpertProblem) -> Result<Preferences, Error> {
    preferences_beside(op.each.normed_regions(op.x_rows(), 0), problem.preferences())
}

impl Chosen for CheckedExperts {
    fn candidates(
        &self,
        info: &DeviceInfo,
        families: Families<Self>,
        preferences: &Preferences,
        tuned: &TunedTable,
    ) -> Result<Candidates<'static, Self>, SchedError> {
        let families = wanted_families(families, preferences.family.as_deref(), info)?;
        Ok(candidates(self, info, &families, preferences, tuned))
    }

    /// Launches of `plan` from `family`, after any norm,
    /// dequantization or quantization of X.
    fn prepare(
        &self,
        device: &dyn Device,
        family: &'static dyn Family<Self>,
        plan: &ExpertsPlan,
    ) -> Result<LaunchSequence, Error> {
        use ExpertOperand as O;
        let products = family.prepare(device, &self.product(plan), plan)?;
        let of = XOperands { x: O::X, scales: O::XScales, factors: O::XPlaneFactors, workspace: O::Workspace };
        if let Some((step, regions)) = self.quantize_step(plan) {
            return behind_quantize(device, &step, regions, products, of, O::XSums);
        }
        if let (Some(region), Some((_, step))) = (&plan.dequantized, self.dequantized()) {
            return behind_dequantize(device, &step, region, products, of);
        }
        let regions = self.each.normed_regions(self.x_rows(), plan.workspace_bytes);
        let Some((norm, regions)) = self.norm_prologue().zip(regions) else { return Ok(products) };
        let shared = Shared { x: O::X, gamma: O::Gamma, beta: O::Beta, workspace: O::Workspace, planes: None };
        behind_norm(device, &norm, regions, products, shared)
    }
}

impl Recorded for CheckedExperts {
    fn sizes(&self) -> Option<Sizes> {
        Some(Sizes { m: self.each.m, n: self.each.out_features, k: self.each.k })
    }

    fn tile(plan: &ExpertsPlan) -> Option<Tile> {
        Some(Tile::of(&plan.config.tile))
    }

    fn cut(plan: &ExpertsPlan) -> String {
        if plan.config.grouped { "whole tiles".into() } else { "a tile a slot".into() }
    }

    fn workspace(&self, plan: &ExpertsPlan) -> Vec<WorkspaceRegion> {
        let parts =
            [("products", plan.products, plan.product_bytes), ("scratch", plan.scratch, plan.config.scratch_bytes)];
        let plain = plan.dequantized.map(|region| ("plain x", region.x, region.rows * region.row_bytes));
        let regions = parts.into_iter().chain(plain).filter(|(_, _, bytes)| *bytes > 0);
        regions.map(|(name, at, bytes)| WorkspaceRegion::new(name, at, bytes)).collect()
    }

    fn dispatch(&self, plan: &ExpertsPlan) -> Dispatch {
        let schedule = match plan.config.tile.schedule {
            Schedule::StreamK => DispatchSchedule::Persistent,
            Schedule::Grid | Schedule::Threads => DispatchSchedule::Static,
        };
        Dispatch { schedule, threads: Some(plan.config.tile.threads), ..Dispatch::along(SplitAxis::N, 1) }
    }
}

impl Bound for CheckedExperts {
    fn wanted(&self, operand: ExpertOperand, _: bool) -> Wanted {
        use ExpertOperand as O;
        let each = &self.each;
        let output = |dense: &Dense, rows: usize| Extent::of(dense, rows, each.out_features);
        let of_columns = |dtype: DType| Extent::of_values(dtype, each.k);
        let norm = each.norm.map(|norm| norm.function);
        match operand {
            O::D => Wanted::always(
                "D",
                match &self.combine {
                    None => output(&each.d, each.m),
                    Some(combine) => output(&combine.d, self.tokens()),
                },
            ),
            O::Index => Wanted::always("index", Extent::of_values(ElementType::Int32, self.index_len())),
            O::Status => {
                let two_words = self.checks_index.then(|| Extent::of_values(ElementType::Int32, 2));
                Wanted::optional("status", two_words, "the problem has its index checked")
            }
            O::C => {
                let extent = each.c.map(|dense| output(&dense, each.m));
                Wanted::optional("C", extent, "the problem adds beta · C")
            }
            O::Bias => {
                let extent = each.bias.map(|dtype| Extent::of_values(dtype, self.weights() * each.bias_len()));
                Wanted::optional("bias", extent, "the problem adds a bias")
            }
            O::TokenScale => {
                let extent = each.token_scale.then(|| Extent::of_values(DType::F32, each.m));
                Wanted::optional("row factors", extent, "the problem scales rows")
            }
            O::Residual => {
                let extent = match &self.combine {
                    None => each.residual.map(|dense| output(&dense, each.m)),
                    Some(combine) => combine.residual.map(|dense| output(&dense, self.tokens())),
                };
                Wanted::optional("residual", extent, "the problem adds a residual")
            }
            O::RouterWeights => {
                let extent = self.combine.map(|_| Extent::of_values(DType::F32, each.m));
                Wanted::optional("router weights", extent, "the problem combines slots")
            }
            O::Lists => {
                let parts = self.list_parts().filter(|_| self.lists);
                let extent = parts.map(|[_, slots]| Extent::of_values(ElementType::Int32, slots.end / 4));
                Wanted::optional("lists", extent, "the problem is listed")
            }
            O::Gamma => {
                let extent = norm.and_then(|function| function.gamma).map(of_columns);
                Wanted::optional("gamma", extent, "the problem normalizes X with a gamma")
            }
            O::Beta => {
                let extent = norm.and_then(|function| function.beta).map(of_columns);
                Wanted::optional("beta", extent, "the problem normalizes X with a beta")
            }
            O::Workspace => Wanted::workspace(
                "the plan keeps lists, gathered, normalized, plain or quantized rows, or the slots' products",
            ),
            // The descriptions of X and of the experts bind them.
            _ => Wanted::optional("an operand", None, "the problem has it"),
        }
    }
}

impl ExpertPlan {
    /// Candidates of a problem, fastest first; empty without rows.
    pub(crate) fn candidates(
        ctx: &Context,
        problem: &ExpertProblem,
    ) -> Result<(CheckedExperts, Vec<Offered<'static, CheckedExperts>>), Error> {
        ctx.check_weight(problem.shape().each.device)?;
        let op = problem.check()?;
        let offered = crate::planned::candidates(ctx, &op, &preferences_of(&op, problem)?)?.offered;
        Ok((op, offered))
    }

    /// Plan of one candidate.
    pub(crate) fn of_candidate(
        ctx: &Context,
        problem: &ExpertProblem,
        op: &CheckedExperts,
        candidate: &Offered<'static, CheckedExperts>,
    ) -> Result<Self, Error> {
        Ok(Self { planned: Planned::of_candidate(ctx, op, candidate)?, shape: *problem.shape() })
    }

    /// Whether products run expert by expert, by lists of slots. The
    /// lists come with a [listed](ExpertProblem::listed) problem, or
    /// a run makes them.
    pub fn reads_lists(&self) -> bool {
        let is_indexed = matches!(self.op().form, ExpertForm::Indexed { .. });
        is_indexed && self.launch().is_some_and(|plan| plan.config.grouped)
    }

    /// Whether earlier writes are ready for the following run.
    pub(crate) fn prefetches_early(&self) -> bool {
        self.launch().is_some_and(|plan| plan.config.prefetches_early)
    }

    /// Submits the products to `stream`. A run allocates nothing,
    /// waits for nothing and takes no lock. A CUDA graph may capture
    /// it; replays read the index again.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, on another
    /// device or not part of the problem; when the experts differ
    /// from the planned ones; or on a device error. Nothing is
    /// written then.
    pub fn run(&self, stream: &Stream, mut args: ExpertArgs<'_>) -> Result<(), Error> {
        let workspace = args.workspace.take().map(Workspace::view);
        self.run_within(stream, args, workspace)
    }

    /// [`ExpertPlan::run`] with a workspace inside another buffer,
    /// instead of the one in `args`.
    pub(crate) fn run_within(
        &self,
        stream: &Stream,
        args: ExpertArgs<'_>,
        workspace: Option<BufferMut<'_>>,
    ) -> Result<(), Error> {
        use ExpertOperand as O;
        let checks = Checks(self.device());
        checks.device("weight", args.w.device())?;
        self.shape.check_serves(args.w.shape())?;
        let portion = portion_of(args.tokens, self.op().tokens())?;
        if portion.is_some() && matches!(self.op().form, ExpertForm::Masked { .. }) {
            let why = "counts say how many rows there are";
            return Err(Error::NotForExperts { what: "fewer tokens than were planned", why });
        }
        let op = &self.op().of_portion(portion);
        let mut run = self.start_portion(stream, op, portion)?;
        let names = [O::X, O::XScales, O::XPlaneFactors, O::XSums];
        let plain = stored_x(&op.each).map(|x| Extent::of(&x, op.x_rows(), op.each.k));
        let read = XOf { op: &op.each, rows: op.x_rows(), plain };
        read.give(args.x, args.x_factor, run.checks, names, &mut run.operands)?;
        run.write(O::D, args.d)?;
        run.read(O::Index, args.index)?;
        run.write(O::Status, args.status)?;
        let optional = [
            (O::C, args.c),
            (O::Bias, args.bias),
            (O::TokenScale, args.token_scale),
            (O::Residual, args.residual),
            (O::RouterWeights, args.router_weights),
            (O::Lists, args.lists),
            (O::Gamma, args.gamma),
            (O::Beta, args.beta),
        ];
        optional.into_iter().try_for_each(|(operand, view)| run.read(operand, view))?;
        if run.is_nothing() {
            // Without rows, every index is valid.
            return run.zero(stream, O::Status);
        }
        args.w.give(&mut run.operands);
        run.workspace(workspace)?;
        run.launch(stream)
    }

    /// Waits for the default stream and checks the index of the run
    /// that wrote `status`.
    ///
    /// # Errors
    /// [`Error::BadExpertIndex`] with the first wrong entry,
    /// [`Error::BufferTooShort`], or a device error.
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
        let top_k = match self.op().form {
            ExpertForm::Indexed { top_k, .. } => Some(top_k),
            _ => None,
        };
        match ExpertFault::ALL.into_iter().find(|fault| *fault as u32 == code) {
            Some(fault) => Err(Error::BadExpertIndex { fault, place: place as usize, top_k }),
            None => Ok(()),
        }
    }
}
