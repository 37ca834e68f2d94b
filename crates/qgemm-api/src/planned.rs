//! [`Planned`]: ready kernels of one operation. Plans of every
//! operation share its accessors, cache, record and run.

use std::fmt;
use std::sync::Arc;

use qgemm_hal::{
    BufferMut, BufferRef, Device, DeviceId, DeviceInfo, Families, Family, KernelId, LaunchSequence, Math, Operand,
    Operands, Operation, Portion, Stream,
};
use qgemm_sched::{Candidates, Offered, Preferences, SchedError, TunedTable};

use crate::context::Context;
use crate::error::Error;
use crate::operand::{Checks, Extent, zero};
use crate::plan_cache::{Cached, PlanCaches, Ready};
use crate::record::{PlanRecord, Recorded, record};

/// Ready kernels of one operation, from a `plan_…` method of
/// [`Context`]. Its text lists the launches of a run. An
/// operation without tokens, rows or columns has a plan without
/// launches.
#[derive(Debug)]
pub struct Planned<O: Operation> {
    op: O,
    device: Arc<dyn Device>,
    tuned: Arc<TunedTable>,
    preferences: Preferences,
    /// Bit mask of the used slots of [`Operation::operands`].
    used: u32,
    /// `None` where there is nothing to compute.
    ready: Option<Arc<Ready<O>>>,
}

/// Choice and preparation of an operation's kernels.
pub(crate) trait Chosen: Cached + Recorded {
    /// Candidates of the operation among `families`, fastest first.
    ///
    /// # Errors
    /// When the requested family does not exist.
    fn candidates(
        &self,
        info: &DeviceInfo,
        families: Families<Self>,
        preferences: &Preferences,
        tuned: &TunedTable,
    ) -> Result<Candidates<'static, Self>, SchedError>;

    /// Ready launches of a plan.
    ///
    /// # Errors
    /// When a kernel cannot be made ready.
    fn prepare(
        &self,
        device: &dyn Device,
        family: &'static dyn Family<Self>,
        plan: &Self::Plan,
    ) -> Result<LaunchSequence, Error> {
        Ok(family.prepare(device, self, plan)?)
    }
}

/// [`Chosen`] for memory-bound operations.
macro_rules! chosen_by_traffic {
    ($op:ty) => {
        impl $crate::planned::Chosen for $op {
            fn candidates(
                &self,
                info: &qgemm_hal::DeviceInfo,
                families: qgemm_hal::Families<Self>,
                _: &qgemm_sched::Preferences,
                _: &qgemm_sched::TunedTable,
            ) -> Result<qgemm_sched::Candidates<'static, Self>, qgemm_sched::SchedError> {
                Ok(qgemm_sched::memory_bound::candidates(self, info, families))
            }
        }
    };
}
pub(crate) use chosen_by_traffic;

impl<O: Operation> Planned<O> {
    /// Plan of ready launches; `None` where there is nothing to
    /// compute.
    pub(crate) fn of(ctx: &Context, op: O, preferences: Preferences, ready: Option<Arc<Ready<O>>>) -> Self {
        let used = op.operands().into_iter().fold(0, |used, operand| used | 1 << operand.slot());
        Self { op, device: Arc::clone(ctx.device()), tuned: Arc::clone(ctx.tuned()), preferences, used, ready }
    }

    /// Bytes of workspace that a run needs; 0 for most plans.
    pub fn workspace_bytes(&self) -> usize {
        self.launch().map_or(0, |plan| self.op.workspace_bytes(plan))
    }

    /// Name of the chosen kernels, such as `gemm_nt_q4_k_f16`; `none`
    /// where there is nothing to compute.
    pub fn kernel_name(&self) -> &str {
        self.sequence().map_or("none", LaunchSequence::name)
    }

    /// Identity of the chosen kernel, the first of several; `None`
    /// where there is nothing to compute.
    pub fn kernel_id(&self) -> Option<KernelId> {
        self.launch().map(|plan| self.op.kernel_id(plan))
    }

    /// Chosen config with its launch geometry; `None` where there is
    /// nothing to compute.
    pub fn launch(&self) -> Option<&O::Plan> {
        self.ready.as_ref().map(|ready| &ready.plan)
    }

    /// Kernels of a run, in launch order; `None` where there is
    /// nothing to compute.
    pub fn sequence(&self) -> Option<&LaunchSequence> {
        self.ready.as_ref().map(|ready| &ready.sequence)
    }

    /// Hash of the chosen kernel's sources, for
    /// [`TunedTable::record`](crate::tuning::TunedTable::record).
    /// `None` where there is nothing to compute.
    pub fn source_hash(&self) -> Option<u64> {
        self.ready.as_ref().map(|ready| ready.family.source_hash(&self.op, O::config(&ready.plan)))
    }

    /// Matrix instructions that the kernel leaves unused: FMA bounds
    /// it, although the device multiplies the problem's types by them.
    /// `None` for most plans; `explain` says which families refused.
    pub fn unused_math(&self) -> Option<Math> {
        self.launch().and_then(|plan| self.op.unused_math(plan, self.device.info()))
    }

    /// The validated operation.
    pub fn op(&self) -> &O {
        &self.op
    }

    /// Minimum memory traffic of a run, in bytes. Each operand counts
    /// once, and sequences have their maximum length.
    pub fn bytes(&self) -> f64 {
        self.op.traffic()
    }

    /// Multiply-adds of a run, with sequences of maximum length.
    pub fn macs(&self) -> f64 {
        self.op.macs()
    }

    /// Floating-point operations of a run: two per multiply-add.
    pub fn flops(&self) -> f64 {
        2.0 * self.op.macs()
    }

    /// Device of the plan.
    pub fn device(&self) -> DeviceId {
        self.device.info().id
    }

    pub(crate) fn handle(&self) -> &Arc<dyn Device> {
        &self.device
    }

    pub(crate) fn ready(&self) -> Option<&Ready<O>> {
        self.ready.as_deref()
    }

    pub(crate) fn preferences(&self) -> &Preferences {
        &self.preferences
    }

    pub(crate) fn tuned(&self) -> &TunedTable {
        &self.tuned
    }
}

#[expect(private_bounds, reason = "operations implement it in this crate alone")]
impl<O: Chosen> Planned<O> {
    /// Chooses kernels and makes them ready, or finds a cached plan.
    pub(crate) fn new(ctx: &Context, op: O, preferences: Preferences) -> Result<Self, Error> {
        if op.is_nothing() {
            return Ok(Self::of(ctx, op, preferences, None));
        }
        let key = (op, preferences);
        let ready = ready(&**ctx.device(), ctx.tuned(), ctx.plan_caches(), &key)?;
        let (op, preferences) = key;
        Ok(Self::of(ctx, op, preferences, Some(ready)))
    }

    /// The plan of one candidate.
    pub(crate) fn of_candidate(ctx: &Context, op: &O, candidate: &Offered<'static, O>) -> Result<Self, Error> {
        let ready = Ready::prepare(&**ctx.device(), op, candidate.family, candidate.plan.clone())?;
        Ok(Self::of(ctx, op.clone(), Preferences::default(), Some(Arc::new(ready))))
    }

    /// Plans of all candidates, fastest first by the cost model.
    /// Empty where there is nothing to compute.
    pub(crate) fn of_candidates(ctx: &Context, op: &O, preferences: &Preferences) -> Result<Vec<Self>, Error> {
        let candidates = candidates(ctx, op, preferences)?;
        candidates.offered.iter().map(|candidate| Self::of_candidate(ctx, op, candidate)).collect()
    }

    /// Record of the launches, of other candidates and of why they
    /// lost. Each call makes a new record, which takes many times as
    /// long as planning.
    ///
    /// # Errors
    /// Planning has already found every error.
    pub fn record(&self) -> Result<PlanRecord, Error> {
        let families = O::families(&self.device.catalog());
        let ask = || self.op.candidates(self.device.info(), families, &self.preferences, &self.tuned);
        explained(&self.op, self.device.info(), ask)
    }
}

/// Chooses kernels for an operation and makes them ready, or
/// finds a cached plan.
pub(crate) fn ready<O: Chosen>(
    device: &dyn Device,
    tuned: &TunedTable,
    caches: &PlanCaches,
    key: &(O, Preferences),
) -> Result<Arc<Ready<O>>, Error> {
    O::cache(caches).get_or_make(key, || {
        let (op, preferences) = key;
        let _span = tracing::info_span!("plan", operation = O::NAME, problem = op.describe()).entered();
        let (info, families) = (device.info(), O::families(&device.catalog()));
        let (family, plan) = op.candidates(info, families, preferences, tuned)?.best(op, info)?;
        if let Some(math) = op.unused_math(&plan, info) {
            let (kernel, math) = (op.kernel_id(&plan).to_string(), math.name());
            tracing::warn!(kernel, math, "slow path: FMA bounds the kernel, matrix instructions are unused");
        }
        Ready::prepare(device, op, family, plan)
    })
}

/// Candidates of an operation; empty where there is nothing to
/// compute.
pub(crate) fn candidates<O: Chosen>(
    ctx: &Context,
    op: &O,
    preferences: &Preferences,
) -> Result<Candidates<'static, O>, Error> {
    if op.is_nothing() {
        return Ok(Candidates { offered: Vec::new(), refusals: Vec::new() });
    }
    Ok(op.candidates(ctx.info(), O::families(&ctx.device().catalog()), preferences, ctx.tuned())?)
}

/// Plan record of `op`, without preparing kernels.
pub(crate) fn explain<O: Chosen>(ctx: &Context, op: &O, preferences: &Preferences) -> Result<PlanRecord, Error> {
    let families = O::families(&ctx.device().catalog());
    explained(op, ctx.info(), || op.candidates(ctx.info(), families, preferences, ctx.tuned()))
}

/// Plan record of `op`. Families are queried where there is
/// something to launch.
fn explained<'f, O: Recorded>(
    op: &O,
    info: &DeviceInfo,
    candidates: impl FnOnce() -> Result<Candidates<'f, O>, SchedError>,
) -> Result<PlanRecord, Error> {
    if !op.is_nothing() {
        return Ok(record(op, info, &candidates()?));
    }
    let none = Candidates { offered: Vec::new(), refusals: Vec::new() };
    let why = "there is nothing to compute: nothing is launched".into();
    Ok(PlanRecord { why, ..record(op, info, &none) })
}

/// Requirements on an operand's buffer.
pub(crate) struct Wanted {
    name: &'static str,
    /// `None` where the operation has no such operand.
    extent: Option<Extent>,
    /// Reason for an optional operand.
    why: &'static str,
}

impl Wanted {
    /// An operand that every run has.
    pub(crate) fn always(name: &'static str, extent: Extent) -> Self {
        Self { name, extent: Some(extent), why: "every run has it" }
    }

    /// Operand that exists for the reason `why`, where `extent` is
    /// some.
    pub(crate) fn optional(name: &'static str, extent: Option<Extent>, why: &'static str) -> Self {
        Self { name, extent, why }
    }

    /// Workspace, whose size the plan knows. `why` is its reason.
    pub(crate) fn workspace(why: &'static str) -> Self {
        Self { name: "workspace", extent: None, why }
    }
}

/// Operation whose operands the API binds to buffers.
pub(crate) trait Bound: Operation {
    /// Requirements on an operand's buffer. `used` tells whether
    /// [`Operation::operands`] contains the operand.
    fn wanted(&self, operand: Self::Operand, used: bool) -> Wanted;
}

/// One run of a plan: checks all buffers, then launches.
pub(crate) struct Run<'p, 'a, O: Operation> {
    planned: &'p Planned<O>,
    /// Planned operation, or the operation of some of its tokens.
    op: &'p O,
    pub checks: Checks,
    pub operands: Operands<'a>,
}

#[expect(private_bounds, reason = "operations implement it in this crate alone")]
impl<O: Bound> Planned<O> {
    /// Begins a run on `stream`.
    pub(crate) fn start(&self, stream: &Stream) -> Result<Run<'_, '_, O>, Error> {
        self.start_portion(stream, &self.op, None)
    }

    /// Begins a run of `op`, a portion of the plan's operation.
    pub(crate) fn start_portion<'p, 'a>(
        &'p self,
        stream: &Stream,
        op: &'p O,
        portion: Option<Portion>,
    ) -> Result<Run<'p, 'a, O>, Error> {
        let checks = Checks(self.device());
        checks.device("stream", stream.device())?;
        let mut operands = Operands::new();
        operands.take_portion(portion);
        Ok(Run { planned: self, op, checks, operands })
    }
}

impl<'a, O: Bound> Run<'_, 'a, O> {
    fn wanted(&self, operand: O::Operand) -> Wanted {
        self.op.wanted(operand, self.planned.used >> operand.slot() & 1 == 1)
    }

    /// Binds an input buffer.
    pub fn read(&mut self, operand: O::Operand, view: impl Into<Option<BufferRef<'a>>>) -> Result<(), Error> {
        let Wanted { name, extent, why } = self.wanted(operand);
        let view = self.checks.optional(name, view.into(), extent, why)?;
        if let Some(view) = view {
            self.operands.read(operand, view);
        }
        Ok(())
    }

    /// Binds an output buffer.
    pub fn write(&mut self, operand: O::Operand, view: impl Into<Option<BufferMut<'a>>>) -> Result<(), Error> {
        let Wanted { name, extent, why } = self.wanted(operand);
        let view = self.checks.optional(name, view.into(), extent, why)?;
        if let Some(view) = view {
            self.operands.write(operand, view);
        }
        Ok(())
    }

    /// Binds the workspace, if the plan needs one.
    pub fn workspace(&mut self, workspace: Option<BufferMut<'a>>) -> Result<(), Error> {
        let Some(operand) = O::WORKSPACE else { return Ok(()) };
        let why = self.wanted(operand).why;
        if let Some(workspace) = self.checks.workspace(workspace, self.planned.workspace_bytes(), why)? {
            self.operands.write(operand, workspace);
        }
        Ok(())
    }

    /// Whether nothing is launched.
    pub fn is_nothing(&self) -> bool {
        self.planned.ready.is_none() || self.op.is_nothing()
    }

    /// Zeros an output buffer, as the result of a run without
    /// launches.
    pub fn zero(&mut self, stream: &Stream, operand: O::Operand) -> Result<(), Error> {
        let extent = self.wanted(operand).extent;
        zero(&*self.planned.device, stream, self.operands.take_mut(operand), extent)
    }

    /// Submits the launches, if any.
    pub fn launch(self, stream: &Stream) -> Result<(), Error> {
        let Some(ready) = self.planned.ready.as_ref().filter(|_| !self.op.is_nothing()) else { return Ok(()) };
        let _span = tracing::trace_span!("launch", kernel = ready.sequence.name()).entered();
        Ok(ready.sequence.run_for(self.op, stream, self.operands)?)
    }
}

/// Launches of a run, with kernel, geometry and operands.
impl<O: Operation> fmt::Display for Planned<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {} on {}", self.kernel_name(), self.op.describe(), self.device())?;
        let Some(ready) = self.ready() else { return f.write_str(", nothing to do") };
        let mut given = self.op.operands();
        let bytes = self.workspace_bytes();
        if let Some(workspace) = O::WORKSPACE.filter(|_| bytes > 0) {
            given.push(workspace);
        }
        if O::WORKSPACE.is_some() {
            write!(f, ", {bytes} bytes of workspace")?;
        }
        writeln!(f, ", expected to take {:.1} µs", O::estimate(&ready.plan) * 1e6)?;
        ready.sequence.display_with(&given).fmt(f)
    }
}
