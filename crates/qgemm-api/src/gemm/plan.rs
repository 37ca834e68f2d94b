//! [`Plan`]: kernels made ready for one problem.

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
use crate::weight::{Weight, WeightShape};
use crate::workspace::Workspace;

/// Kernels chosen and made ready for one [`Problem`]; made by [`Context::plan`](crate::Context::plan). Its text says what a run
/// launches, and what each launch reads and writes.
///
/// A plan belongs to a shape, not to a weight: it runs with every weight that has the format, N, K and device
/// of the one it was made from; where that one's values are fit for f16 ([`Weight::fits_f16`]), theirs must be, too.
#[derive(Debug)]
pub struct Plan {
    planned: Planned<CheckedGemm>,
    weight: WeightShape,
    /// Whether the problem names a C, read or (with `beta` 0) not.
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
    /// At least [`Plan::workspace_bytes`](Planned::workspace_bytes), when that is not 0.
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
            // Outputs of segments; X and the weight are bound by what describes them.
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

    /// A number that changes with the sources of the chosen kernel, for
    /// [`TunedTable::record`](crate::tuning::TunedTable::record); `None` for 0 tokens.
    pub fn source_hash(&self) -> Option<u64> {
        self.ready().map(|ready| ready.family.source_hash(&self.op().product(&ready.plan), &ready.plan.config))
    }

    /// What will run, what else there was, and why it was not taken. Made anew by each call, which takes many times as long as to
    /// plan.
    ///
    /// # Errors
    /// None that planning has not found before.
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
        // With `beta` 0, a C may come that is not read.
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
