//! [`Plan`]: ready kernels of one problem.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::{BufferMut, BufferRef, CheckedGemm, Dense, GemmOperand, Operand, Stream};
use qgemm_sched::gemm::choose;

use super::candidate::Candidate;
use super::problem::{Problem, stored_x};
use super::sequence::prepare;
use super::x::{XOf, XRef};
use crate::context::Context;
use crate::error::Error;
use crate::normed::preferences_beside;
use crate::operand::{Checks, Extent};
use crate::plan_cache::{Cached, Ready};
use crate::planned::{Bound, Planned, Wanted};
use crate::record::{GemmSubject, PlanRecord};
use crate::setters::setters;
use crate::weight::{Weight, WeightShape};
use crate::workspace::Workspace;

/// Ready kernels of one [`Problem`], from
/// [`Context::plan`](crate::Context::plan). Its text lists the
/// launches of a run with their operands.
///
/// A plan depends on a shape, not on a weight. It runs with every
/// weight of its format, N, K and device. If the first weight
/// fits f16 ([`Weight::fits_f16`]), all others must fit, too.
#[derive(Debug)]
pub struct Plan {
    planned: Planned<CheckedGemm>,
    weight: WeightShape,
    /// Whether the problem states a C, even if `beta` is 0.
    c_stated: bool,
}

impl Deref for Plan {
    type Target = Planned<CheckedGemm>;

    fn deref(&self) -> &Self::Target {
        &self.planned
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.planned.fmt(f)
    }
}

/// Operands of one run.
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
    /// Quantization factor of X, an f32, where it was given
    /// ([`Quantization::given_factor`]).
    ///
    /// [`Quantization::given_factor`]: crate::Quantization::given_factor
    pub x_factor: Option<BufferRef<'a>>,
    /// The weight.
    pub w: &'a Weight,
    /// Output.
    pub d: BufferMut<'a>,
    /// C, when the problem adds `beta · C`.
    pub c: Option<BufferRef<'a>>,
    /// Bias of N values, when the problem adds one; 2 N for a gated
    /// pair.
    pub bias: Option<BufferRef<'a>>,
    /// Token scales, M values in f32, when the problem scales tokens.
    pub token_scale: Option<BufferRef<'a>>,
    /// The residual, when the problem adds one.
    pub residual: Option<BufferRef<'a>>,
    /// Gamma of the norm of X, K values. Like weights, gamma and beta
    /// must not be outputs of unfinished work on the stream.
    pub gamma: Option<BufferRef<'a>>,
    /// Beta of the norm of X, K values.
    pub beta: Option<BufferRef<'a>>,
    /// Workspace of at least
    /// [`Plan::workspace_bytes`](Planned::workspace_bytes), when that
    /// is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

impl<'a> Args<'a> {
    /// Operands of every run. Methods add the other operands. Callers
    /// with optional operands can set the fields.
    pub fn new(x: impl Into<XRef<'a>>, w: &'a Weight, d: impl Into<BufferMut<'a>>) -> Self {
        let (x, d) = (x.into(), d.into());
        let [x_factor, c, bias, token_scale, residual, gamma, beta] = [None; 7];
        Self { x, x_factor, w, d, c, bias, token_scale, residual, gamma, beta, workspace: None }
    }

    setters! {
        /// With the quantization factor of X: see [`Args::x_factor`].
        x_factor: BufferRef,
        /// With the C of [`Problem::c`].
        c: BufferRef,
        /// With the bias of [`Problem::bias`].
        bias: BufferRef,
        /// With the factors of [`Problem::token_scale`].
        token_scale: BufferRef,
        /// With the residual of [`Problem::residual`].
        residual: BufferRef,
        /// With the gamma of [`Problem::norm`].
        gamma: BufferRef,
        /// With the beta of [`Problem::norm`].
        beta: BufferRef,
    }

    /// With a workspace of at least [`Plan::workspace_bytes`](Planned::workspace_bytes).
    pub fn workspace(mut self, workspace: &'a mut Workspace) -> Self {
        self.workspace = Some(workspace);
        self
    }
}

impl Bound for CheckedGemm {
    fn wanted(&self, operand: GemmOperand, _: bool) -> Wanted {
        use GemmOperand as O;
        let output = |dense: &Dense| Extent::of(dense, self.m, self.out_features);
        let of_columns = |dtype: DType| Extent::of_values(dtype, self.k);
        let norm = self.norm.map(|norm| norm.function);
        let mut outputs = self.outputs().map(|(of, features, d)| (of, Extent::of(&d, self.m, features.len())));
        match operand {
            O::D => Wanted::always("D", outputs.next().map_or_else(|| output(&self.d), |(_, extent)| extent)),
            O::C => Wanted::optional("C", self.c.as_ref().map(output), "the problem adds beta · C"),
            O::Bias => {
                let extent = self.bias.map(|dtype| Extent::of_values(dtype, self.bias_len()));
                Wanted::optional("bias", extent, "the problem adds a bias")
            }
            O::TokenScale => {
                let extent = self.token_scale.then(|| Extent::of_values(DType::F32, self.m));
                Wanted::optional("token scales", extent, "the problem scales tokens")
            }
            O::Residual => {
                let extent = self.residual.as_ref().filter(|_| !self.residual_in_d).map(output);
                Wanted::optional("residual", extent, "the problem adds a residual")
            }
            O::Gamma => {
                let extent = norm.and_then(|function| function.gamma).map(of_columns);
                Wanted::optional("gamma", extent, "the problem normalizes X with a gamma")
            }
            O::Beta => {
                let extent = norm.and_then(|function| function.beta).map(of_columns);
                Wanted::optional("beta", extent, "the problem normalizes X with a beta")
            }
            O::Workspace => {
                Wanted::workspace("the plan keeps partial accumulators, or converted or normalized activations")
            }
            // Outputs of segments. The descriptions of X and of the weight
            // bind them.
            _ => {
                let extent = outputs.find(|(of, _)| *of == operand).map(|(_, extent)| extent);
                Wanted::optional(operand.name(), extent, "the problem writes several outputs")
            }
        }
    }
}

impl Plan {
    pub(crate) fn new(ctx: &Context, problem: &Problem) -> Result<Self, Error> {
        let op = problem.check()?;
        let preferences = preferences_beside(op.normed_regions(op.m, 0), problem.preferences())?;
        let key = (op, preferences);
        let (op, preferences) = &key;
        let make = || {
            let CheckedGemm { m, stored_rows, k, format, .. } = op;
            let _span = tracing::info_span!("plan", m, n = stored_rows, k, %format).entered();
            let device = ctx.device();
            let (family, plan) = choose(op, device.info(), device.catalog().gemm, preferences, ctx.tuned())?;
            let sequence = prepare(&**device, op, family, &plan)?.with_math(plan.config.math);
            Ok::<_, Error>(Ready { family, plan, sequence })
        };
        let caches = ctx.plan_caches();
        let ready = if op.m == 0 { None } else { Some(CheckedGemm::cache(caches).get_or_make(&key, make)?) };
        Ok(Self::of(ctx, problem, key.0, ready))
    }

    pub(crate) fn of_candidate(ctx: &Context, candidate: &Candidate) -> Result<Self, Error> {
        let &Candidate { ref problem, ref op, family, launch } = candidate;
        let sequence = prepare(&**ctx.device(), op, family, &launch)?.with_math(launch.config.math);
        Ok(Self::of(ctx, problem, op.clone(), Some(Arc::new(Ready { family, plan: launch, sequence }))))
    }

    fn of(ctx: &Context, problem: &Problem, op: CheckedGemm, ready: Option<Arc<Ready<CheckedGemm>>>) -> Self {
        let planned = Planned::of(ctx, op, problem.preferences().clone(), ready);
        Self { planned, weight: *problem.weight(), c_stated: problem.states_c() }
    }

    /// Hash of the chosen kernel's sources, for
    /// [`TunedTable::record`](crate::tuning::TunedTable::record).
    /// `None` for 0 tokens.
    pub fn source_hash(&self) -> Option<u64> {
        self.ready().map(|ready| ready.family.source_hash(&self.op().product(&ready.plan), &ready.plan.config))
    }

    /// Record of the launches, of other candidates and of why they
    /// lost. Each call makes a new record, which takes many times as
    /// long as planning.
    ///
    /// # Errors
    /// Planning has already found every error.
    pub fn record(&self) -> Result<PlanRecord, Error> {
        let subject = GemmSubject {
            op: self.op(),
            info: self.handle().info(),
            families: self.handle().catalog().gemm,
            preferences: self.preferences(),
            tuned: self.tuned(),
        };
        match self.ready() {
            Some(ready) => subject.of_plan(&ready.plan, &ready.sequence),
            None => subject.explain(),
        }
    }

    /// Submits the multiplication to `stream`. The API and the CUDA
    /// backend allocate nothing, wait for nothing and take no lock. A
    /// CUDA graph may capture the run. Other backends differ:
    ///
    /// - **CPU**: D is complete on return. The calling thread
    ///   computes a small product alone. A thread pool shares a
    ///   larger one: [rayon](crate::cpu::rayon)'s global pool, or
    ///   [a custom pool](crate::cpu::open_with_pool). A thread
    ///   outside the pool then waits on a mutex. The pool's queue
    ///   allocates a block about every sixtieth run. A thread
    ///   allocates scratch memory for its largest product so far.
    /// - **wgpu**: wgpu records a command, takes locks and allocates
    ///   on the host. The command goes to the queue after at most
    ///   sixteen launches. A new combination of operands gets a bind
    ///   group. The first run that reads and writes one buffer
    ///   compiles a kernel for that case.
    /// - **Emulated devices**: D is complete on return.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, on another
    /// device, or (C, bias, …) not part of the problem; when the
    /// weight differs from the planned one; or on a device error.
    /// Nothing is written then.
    pub fn run(&self, stream: &Stream, mut args: Args<'_>) -> Result<(), Error> {
        let workspace = args.workspace.take().map(Workspace::view);
        self.run_within(stream, args, workspace)
    }

    /// [`Plan::run`] with a workspace inside another buffer, zeroed
    /// before its first use.
    pub(crate) fn run_within<'a>(
        &self,
        stream: &Stream,
        args: Args<'a>,
        workspace: Option<BufferMut<'a>>,
    ) -> Result<(), Error> {
        self.run_segments(stream, args, std::iter::empty(), workspace)
    }

    /// [`Plan::run_within`] with the outputs of all further segments
    /// of the operation.
    pub(crate) fn run_segments<'a>(
        &self,
        stream: &Stream,
        args: Args<'a>,
        others: impl Iterator<Item = BufferMut<'a>>,
        workspace: Option<BufferMut<'a>>,
    ) -> Result<(), Error> {
        use GemmOperand as O;
        let op = self.op();
        Checks(self.device()).device("weight", args.w.device())?;
        self.weight.check_serves(args.w.shape())?;
        let mut run = self.start(stream)?;
        let names = [O::X, O::XScales, O::XPlaneFactors, O::XSums];
        let plain = stored_x(op).map(|x| Extent::of(&x, op.m, op.k));
        XOf { op, rows: op.m, plain }.give(args.x, args.x_factor, run.checks, names, &mut run.operands)?;
        run.write(O::D, args.d)?;
        for ((operand, output), _) in O::OF_SEGMENTS.into_iter().zip(others).zip(op.outputs().skip(1)) {
            run.write(operand, output)?;
        }
        // With `beta` 0, a C may be passed; it is not read.
        run.read(O::C, args.c.filter(|_| op.c.is_some() || !self.c_stated))?;
        let optional = [
            (O::Bias, args.bias),
            (O::TokenScale, args.token_scale),
            (O::Residual, args.residual),
            (O::Gamma, args.gamma),
            (O::Beta, args.beta),
        ];
        optional.into_iter().try_for_each(|(operand, view)| run.read(operand, view))?;
        if run.is_nothing() {
            return Ok(());
        }
        args.w.give(&mut run.operands);
        run.workspace(workspace)?;
        run.launch(stream)
    }
}
