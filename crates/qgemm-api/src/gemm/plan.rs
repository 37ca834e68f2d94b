//! [`Plan`]: kernels made ready for one problem.

use std::fmt;
use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::{
    BufferMut, BufferRef, CheckedGemm, Dense, Device, DeviceId, GemmOperand, KernelId, LaunchPlan, LaunchSequence,
    Operand, Operands, Operation, Stream,
};
use qgemm_sched::gemm::choose;
use qgemm_sched::{Preferences, TunedTable};

use super::candidate::Candidate;
use super::problem::{Problem, stored_x};
use super::sequence::prepare;
use super::x::{XOf, XRef};
use crate::context::Context;
use crate::error::Error;
use crate::normed::preferences_beside;
use crate::operand::{Checks, Extent};
use crate::plan_cache::{PlanCaches, Ready};
use crate::record::{GemmSubject, PlanRecord};
use crate::weight::{Weight, WeightShape};
use crate::workspace::Workspace;

/// Kernels chosen and made ready for one [`Problem`]; made by [`Context::plan`](crate::Context::plan). Its text says what a run
/// launches, and what each launch reads and writes.
///
/// A plan belongs to a shape, not to a weight: it runs with every weight that has the format, N, K and device
/// of the one it was made from; where that one's values are fit for f16 ([`Weight::fits_f16`]), theirs must be, too.
#[derive(Debug)]
pub struct Plan {
    op: CheckedGemm,
    weight: WeightShape,
    /// Whether the problem names a C, read or (with `beta` 0) not.
    c_stated: bool,
    /// Of plain numbers; a quantized X is checked by its description.
    x: Option<Extent>,
    d: Extent,
    /// Of segments.
    others: Vec<Extent>,
    c: Option<Extent>,
    bias: Option<Extent>,
    token_scale: Option<Extent>,
    residual: Option<Extent>,
    gamma: Option<Extent>,
    beta: Option<Extent>,
    /// `None` for 0 tokens.
    ready: Option<Arc<Ready<CheckedGemm>>>,
    /// What it was chosen by, for its record.
    preferences: Preferences,
    device: Arc<dyn Device>,
    tuned: Arc<TunedTable>,
}

/// What one run reads and writes.
///
/// ```
/// # use qgemm_api::{Args, Context, DType, HostWeight, Problem};
/// # let ctx = Context::open("noop")?;
/// # let weight = ctx.load_dense(&[0; 4 * 64], DType::F32, 2, 32, Default::default())?;
/// # let plan = ctx.plan(&Problem::new(&weight, 1).x_dtype(DType::F16))?;
/// let x = ctx.upload(&DType::F16.encode(&[1.0; 32]))?;
/// let mut d = ctx.allocate(2 * 2)?;
/// plan.run(&ctx.default_stream(), Args::new(&x, &weight, &mut d))?;
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct Args<'a> {
    /// Activations.
    pub x: XRef<'a>,
    /// The factor, an f32, that X was quantized with, where it was given ([`Quantization::given_factor`]).
    ///
    /// [`Quantization::given_factor`]: crate::Quantization::given_factor
    pub x_factor: Option<BufferRef<'a>>,
    /// The weight.
    pub w: &'a Weight,
    /// Output.
    pub d: BufferMut<'a>,
    /// C, when the problem adds `beta · C`.
    pub c: Option<BufferRef<'a>>,
    /// N values, when the problem adds a bias; of a gated pair 2 N.
    pub bias: Option<BufferRef<'a>>,
    /// M values in f32, when the problem scales tokens.
    pub token_scale: Option<BufferRef<'a>>,
    /// The residual, when the problem adds one.
    pub residual: Option<BufferRef<'a>>,
    /// K values, when the problem normalizes X with a gamma. Like weights, gamma and beta must not be what work before this on the
    /// stream still writes.
    pub gamma: Option<BufferRef<'a>>,
    /// K values, when the problem normalizes X with a beta.
    pub beta: Option<BufferRef<'a>>,
    /// At least [`Plan::workspace_bytes`], when that is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

impl<'a> Args<'a> {
    /// What every run has. Methods add the other operands, and where they are optional to the caller, too, the fields can
    /// be set.
    pub fn new(x: impl Into<XRef<'a>>, w: &'a Weight, d: impl Into<BufferMut<'a>>) -> Self {
        let (x, d) = (x.into(), d.into());
        let [x_factor, c, bias, token_scale, residual, gamma, beta] = [None; 7];
        Self { x, x_factor, w, d, c, bias, token_scale, residual, gamma, beta, workspace: None }
    }

    /// With the factor that X was quantized with: see [`Args::x_factor`].
    pub fn x_factor(mut self, factor: impl Into<BufferRef<'a>>) -> Self {
        self.x_factor = Some(factor.into());
        self
    }

    /// With the C of [`Problem::c`].
    pub fn c(mut self, c: impl Into<BufferRef<'a>>) -> Self {
        self.c = Some(c.into());
        self
    }

    /// With the bias of [`Problem::bias`].
    pub fn bias(mut self, bias: impl Into<BufferRef<'a>>) -> Self {
        self.bias = Some(bias.into());
        self
    }

    /// With the factors of [`Problem::token_scale`].
    pub fn token_scale(mut self, token_scale: impl Into<BufferRef<'a>>) -> Self {
        self.token_scale = Some(token_scale.into());
        self
    }

    /// With the residual of [`Problem::residual`].
    pub fn residual(mut self, residual: impl Into<BufferRef<'a>>) -> Self {
        self.residual = Some(residual.into());
        self
    }

    /// With the gamma of [`Problem::norm`].
    pub fn gamma(mut self, gamma: impl Into<BufferRef<'a>>) -> Self {
        self.gamma = Some(gamma.into());
        self
    }

    /// With the beta of [`Problem::norm`].
    pub fn beta(mut self, beta: impl Into<BufferRef<'a>>) -> Self {
        self.beta = Some(beta.into());
        self
    }

    /// With a workspace of at least [`Plan::workspace_bytes`].
    pub fn workspace(mut self, workspace: &'a mut Workspace) -> Self {
        self.workspace = Some(workspace);
        self
    }
}

impl Plan {
    pub(crate) fn new(ctx: &Context, caches: &PlanCaches, problem: &Problem) -> Result<Self, Error> {
        let op = problem.check()?;
        let preferences = preferences_beside(op.normed_regions(op.m, 0), problem.preferences())?;
        let key = (op, preferences);
        let (op, preferences) = &key;
        let make = || {
            let CheckedGemm { m, stored_rows, k, format, .. } = op;
            let _span = tracing::info_span!("plan", m, n = stored_rows, k, %format).entered();
            let device = ctx.device();
            let (family, plan) = choose(op, device.info(), device.catalog().gemm, preferences, ctx.tuned())?;
            Ok::<_, Error>(Ready {
                family,
                plan,
                sequence: prepare(&**device, op, family, &plan)?.with_math(plan.config.math),
            })
        };
        let ready = if op.m == 0 { None } else { Some(caches.gemm.get_or_make(&key, make)?) };
        Self::of(ctx, problem, key.0, ready)
    }

    pub(crate) fn of_candidate(ctx: &Context, candidate: &Candidate) -> Result<Self, Error> {
        let &Candidate { ref problem, ref op, family, launch } = candidate;
        let ready = Ready {
            family,
            plan: launch,
            sequence: prepare(&**ctx.device(), op, family, &launch)?.with_math(launch.config.math),
        };
        Self::of(ctx, problem, op.clone(), Some(Arc::new(ready)))
    }

    fn of(
        ctx: &Context,
        problem: &Problem,
        op: CheckedGemm,
        ready: Option<Arc<Ready<CheckedGemm>>>,
    ) -> Result<Self, Error> {
        let output = |dense: &Dense| Extent::of(dense, op.m, op.out_features);
        let of_columns = |dtype: DType| Extent::of_values(dtype, op.k);
        let mut outputs = op.outputs().map(|(_, features, d)| Extent::of(&d, op.m, features.len()));
        Ok(Self {
            x: stored_x(&op).map(|x| Extent::of(&x, op.m, op.k)),
            d: outputs.next().unwrap_or_else(|| output(&op.d)),
            others: outputs.collect(),
            c: op.c.as_ref().map(output),
            bias: op.bias.map(|dtype| Extent::of_values(dtype, op.bias_len())),
            token_scale: op.token_scale.then(|| Extent::of_values(DType::F32, op.m)),
            residual: op.residual.as_ref().filter(|_| !op.residual_in_d).map(output),
            gamma: op.norm.and_then(|norm| norm.function.gamma).map(of_columns),
            beta: op.norm.and_then(|norm| norm.function.beta).map(of_columns),
            weight: *problem.weight(),
            c_stated: problem.states_c(),
            op,
            ready,
            preferences: problem.preferences().clone(),
            device: Arc::clone(ctx.device()),
            tuned: Arc::clone(ctx.tuned()),
        })
    }

    /// Bytes of workspace that [`Plan::run`] needs; 0 for most plans.
    pub fn workspace_bytes(&self) -> usize {
        self.launch().map_or(0, |launch| {
            let own = launch.workspace.bytes;
            self.op.normed_regions_of(launch).map_or(own, |regions| regions.all().end)
        })
    }

    /// Name of the chosen kernel, such as `gemm_nt_q4_k_f16`; `none` for 0 tokens.
    pub fn kernel_name(&self) -> &str {
        self.sequence().map_or("none", LaunchSequence::name)
    }

    /// Identity of the chosen kernel; `None` for 0 tokens.
    pub fn kernel_id(&self) -> Option<KernelId> {
        self.launch().map(|launch| launch.config.kernel_id(self.op.format))
    }

    /// A number that changes with the sources of the chosen kernel, for
    /// [`TunedTable::record`](crate::tuning::TunedTable::record); `None` for 0 tokens.
    pub fn source_hash(&self) -> Option<u64> {
        self.ready.as_ref().map(|ready| ready.family.source_hash(&self.op.product(&ready.plan), &ready.plan.config))
    }

    /// The chosen configuration and its launch geometry; `None` for 0 tokens.
    pub fn launch(&self) -> Option<&LaunchPlan> {
        self.ready.as_ref().map(|ready| &ready.plan)
    }

    /// The kernels that a run launches, in order; `None` for 0 tokens.
    pub fn sequence(&self) -> Option<&LaunchSequence> {
        self.ready.as_ref().map(|ready| &ready.sequence)
    }

    /// The validated operation.
    pub fn op(&self) -> &CheckedGemm {
        &self.op
    }

    /// What will run, what else there was, and why it was not taken. Made anew by each call, which takes many times as long as to
    /// plan.
    ///
    /// # Errors
    /// None that planning has not found before.
    pub fn record(&self) -> Result<PlanRecord, Error> {
        let subject = GemmSubject {
            op: &self.op,
            info: self.device.info(),
            families: self.device.catalog().gemm,
            preferences: &self.preferences,
            tuned: &self.tuned,
        };
        match &self.ready {
            Some(ready) => subject.of_plan(&ready.plan, &ready.sequence),
            None => subject.explain(),
        }
    }

    /// Bytes that a run must move at least: W, X, D, C and the residual once each.
    pub fn bytes(&self) -> u64 {
        self.op.traffic() as u64
    }

    /// Multiply-adds of a run.
    pub fn macs(&self) -> u64 {
        self.op.macs() as u64
    }

    /// The device that the plan is for.
    pub fn device(&self) -> DeviceId {
        self.weight.device
    }

    /// Submits the multiplication to `stream`. The API allocates nothing, waits for nothing and takes no lock, and neither
    /// does the CUDA backend, so that a run may be captured in a CUDA graph. What others do besides:
    ///
    /// - **CPU**: D is there when this returns. A small product is computed by the calling thread alone. A larger one is
    ///   shared with a thread pool ([rayon](crate::cpu::rayon)'s global one, or [one's own](crate::cpu::open_with_pool)): a
    ///   thread that is not of the pool waits for it on a mutex, and the pool's queue allocates a block about every sixtieth
    ///   time. A thread that works on a larger product than any before allocates its scratch memory.
    /// - **wgpu**: wgpu records a command, which takes locks of the device and of its own, and allocates on the host; at most
    ///   sixteen launches later it goes to the queue. Operands that were not bound together before are bound, and the first run that reads and
    ///   writes one buffer compiles the kernel for that.
    /// - **Emulated devices** do their work before this returns.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, on another device, or (C, bias, …) not part of the
    /// problem; when the weight is not like the one planned for; or a device error. Nothing has been written
    /// then.
    pub fn run(&self, stream: &Stream, mut args: Args<'_>) -> Result<(), Error> {
        let workspace = args.workspace.take().map(Workspace::view);
        self.run_within(stream, args, workspace)
    }

    /// [`Plan::run`] with a workspace that may be part of another buffer, zeroed before its first use as one.
    pub(crate) fn run_within<'a>(
        &self,
        stream: &Stream,
        args: Args<'a>,
        workspace: Option<BufferMut<'a>>,
    ) -> Result<(), Error> {
        self.run_segments(stream, args, std::iter::empty(), workspace)
    }

    /// [`Plan::run_within`] with the outputs of the segments behind the first, as many as the operation has.
    pub(crate) fn run_segments<'a>(
        &self,
        stream: &Stream,
        args: Args<'a>,
        others: impl Iterator<Item = BufferMut<'a>>,
        workspace: Option<BufferMut<'a>>,
    ) -> Result<(), Error> {
        let Args { x, x_factor, w, d, c, bias, token_scale, residual, gamma, beta, workspace: _ } = args;
        let checks = Checks(self.device());
        checks.device("stream", stream.device())?;
        checks.device("weight", w.device())?;
        self.weight.check_serves(w.shape())?;
        let mut operands = Operands::new();
        use GemmOperand as O;
        let names = [O::X, O::XScales, O::XPlaneFactors, O::XSums];
        XOf { op: &self.op, rows: self.op.m, plain: self.x }.give(x, x_factor, checks, names, &mut operands)?;
        checks.view("D", d.view(), self.d)?;
        for ((operand, output), &extent) in O::OF_SEGMENTS.into_iter().zip(others).zip(&self.others) {
            checks.view(operand.name(), output.view(), extent)?;
            operands.write(operand, output);
        }
        // With `beta` 0, a C may come that is not read.
        let c = c.filter(|_| self.c.is_some() || !self.c_stated);
        let c = checks.optional("C", c, self.c, "the problem adds beta · C")?;
        let bias = checks.optional("bias", bias, self.bias, "the problem adds a bias")?;
        let token_scale =
            checks.optional("token scales", token_scale, self.token_scale, "the problem scales tokens")?;
        let residual = checks.optional("residual", residual, self.residual, "the problem adds a residual")?;
        let gamma = checks.optional("gamma", gamma, self.gamma, "the problem normalizes X with a gamma")?;
        let beta = checks.optional("beta", beta, self.beta, "the problem normalizes X with a beta")?;
        let Some(ready) = &self.ready else { return Ok(()) };
        w.give(&mut operands);
        operands.read_if_any(GemmOperand::C, c);
        operands.read_if_any(GemmOperand::Bias, bias);
        operands.read_if_any(GemmOperand::TokenScale, token_scale);
        operands.read_if_any(GemmOperand::Residual, residual);
        operands.read_if_any(GemmOperand::Gamma, gamma);
        operands.read_if_any(GemmOperand::Beta, beta);
        operands.write(GemmOperand::D, d);
        let why = "the plan keeps partial accumulators, or converted or normalized activations";
        if let Some(workspace) = checks.workspace(workspace, self.workspace_bytes(), why)? {
            operands.write(GemmOperand::Workspace, workspace);
        }
        let _span = tracing::trace_span!("launch", kernel = self.kernel_name()).entered();
        Ok(ready.sequence.run_for(&self.op, stream, operands)?)
    }
}

/// What was chosen, and the launches of a run: each with its kernel, geometry and operands.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CheckedGemm { m, out_features, k, .. } = self.op;
        write!(f, "{} for {m} x {out_features} x {k} on {}", self.kernel_name(), self.device())?;
        let Some(Ready { plan, sequence, .. }) = self.ready.as_deref() else { return Ok(()) };
        let mut given = self.op.operands();
        let workspace_bytes = self.workspace_bytes();
        if workspace_bytes > 0 {
            given.push(GemmOperand::Workspace);
        }
        let microseconds = plan.estimate * 1e6;
        writeln!(f, ", {} bytes of workspace, expected to take {microseconds:.1} µs", workspace_bytes)?;
        sequence.display_with(&given).fmt(f)
    }
}
