//! [`OptimizerPlan`]: a kernel made ready for one optimizer.

use std::fmt;
use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::{
    BufferMut, BufferRef, CheckedOptimizer, Device, DeviceId, KernelId, LaunchSequence, Operands, Operation,
    OptimizerLaunch, OptimizerOperand, StepFactors, Stream,
};
use qgemm_sched::memory_bound::choose;

use super::description::{Optimizer, OptimizerStep, step_factors};
use crate::error::Error;
use crate::operand::{Checks, Extent};
use crate::plan_cache::{PlanCaches, Ready};

/// A kernel chosen and made ready for one [`Optimizer`]; made by [`Context::plan_optimizer`](crate::Context::plan_optimizer). Its text says
/// what a run launches.
#[derive(Debug)]
pub struct OptimizerPlan {
    op: CheckedOptimizer,
    device: DeviceId,
    /// `None` where there are no parameters.
    ready: Option<Arc<Ready<CheckedOptimizer>>>,
}

/// What one run of an [`OptimizerPlan`] reads and writes. Moments are zeros before the first step.
///
/// ```
/// use qgemm_api::{Context, DType, Optimizer, OptimizerArgs, OptimizerStep};
///
/// let ctx = Context::open("cpu")?;
/// let plan = ctx.plan_optimizer(&Optimizer::sgd(2).copy(DType::BF16))?;
/// let mut weights = ctx.upload(&[1.0f32, -1.0])?;
/// let mut copy = ctx.allocate(2 * 2)?;
/// let gradient = ctx.upload(&[0.5f32, 0.0])?;
/// let step = ctx.upload(&plan.step(&OptimizerStep::new(1, 0.5).weight_decay(0.5))?)?;
/// plan.run(&ctx.default_stream(), OptimizerArgs::new(&mut weights, &gradient, &step).copy(&mut copy))?;
/// assert_eq!(ctx.download::<f32>(&weights)?, [0.5, -0.75]);
/// assert_eq!(DType::BF16.decode(&ctx.download(&copy)?), [0.5, -0.75]);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct OptimizerArgs<'a> {
    /// The parameters, in f32; moved.
    pub weights: BufferMut<'a>,
    /// Their gradient.
    pub gradient: BufferRef<'a>,
    /// What [`OptimizerPlan::step`] makes, in device memory: 16 bytes.
    pub step: BufferRef<'a>,
    /// The first moments, in f32, of rules that have some.
    pub moment1: Option<BufferMut<'a>>,
    /// The second moments, in f32, of AdamW.
    pub moment2: Option<BufferMut<'a>>,
    /// Written: the parameters in 16 bits, where the optimizer makes a copy.
    pub copy: Option<BufferMut<'a>>,
}

impl<'a> OptimizerArgs<'a> {
    /// What every run has. Methods add the other operands, and where they are optional to the caller, too, the fields can be set.
    pub fn new(
        weights: impl Into<BufferMut<'a>>,
        gradient: impl Into<BufferRef<'a>>,
        step: impl Into<BufferRef<'a>>,
    ) -> Self {
        let (weights, gradient, step) = (weights.into(), gradient.into(), step.into());
        Self { weights, gradient, step, moment1: None, moment2: None, copy: None }
    }

    /// With first moments: of SGD with momentum the only ones.
    pub fn moment1(mut self, moments: impl Into<BufferMut<'a>>) -> Self {
        self.moment1 = Some(moments.into());
        self
    }

    /// With second moments.
    pub fn moment2(mut self, moments: impl Into<BufferMut<'a>>) -> Self {
        self.moment2 = Some(moments.into());
        self
    }

    /// With the copy.
    pub fn copy(mut self, copy: impl Into<BufferMut<'a>>) -> Self {
        self.copy = Some(copy.into());
        self
    }
}

impl OptimizerPlan {
    pub(crate) fn new(device: &dyn Device, caches: &PlanCaches, optimizer: &Optimizer) -> Result<Self, Error> {
        let op = optimizer.check()?;
        let make = || {
            let CheckedOptimizer { len, rule, gradient, .. } = op;
            let _span = tracing::info_span!("plan", len, rule = %rule.kind(), %gradient).entered();
            let (family, plan) = choose(&op, device.info(), device.catalog().optimizer)?;
            Ok::<_, Error>(Ready { family, plan, sequence: family.prepare(device, &op, &plan)? })
        };
        let ready = if op.is_nothing() { None } else { Some(caches.optimizer.get_or_make(&op, make)?) };
        Ok(Self { device: device.info().id, ready, op })
    }

    /// The numbers of a step, as the run of it finds them in device memory. Where a graph is replayed, they are written there before each
    /// replay.
    ///
    /// # Errors
    /// When the step is numbered 0, or a number is not finite.
    pub fn step(&self, step: &OptimizerStep) -> Result<[f32; 4], Error> {
        step_factors(&self.op.rule, step)
    }

    /// Name of the chosen kernel; `none` where there are no parameters.
    pub fn kernel_name(&self) -> &str {
        self.sequence().map_or("none", LaunchSequence::name)
    }

    /// Identity of the chosen kernel; `None` where there are no parameters.
    pub fn kernel_id(&self) -> Option<KernelId> {
        self.launch().map(|plan| plan.config.kernel)
    }

    /// The chosen configuration; `None` where there are no parameters.
    pub fn launch(&self) -> Option<&OptimizerLaunch> {
        self.ready.as_ref().map(|ready| &ready.plan)
    }

    /// The kernels that a run launches, in order; `None` where there are no parameters.
    pub fn sequence(&self) -> Option<&LaunchSequence> {
        self.ready.as_ref().map(|ready| &ready.sequence)
    }

    /// The validated operation.
    pub fn op(&self) -> &CheckedOptimizer {
        &self.op
    }

    /// Bytes that a run must move at least: those it reads and those it writes, once each.
    pub fn bytes(&self) -> f64 {
        self.op.traffic()
    }

    /// The device that the plan is for.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Submits the step to `stream`. Allocates nothing, waits for nothing and takes no lock, so it may be captured in a CUDA graph.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, on another device or not part of the rule, or a device error. Nothing has been
    /// written then.
    pub fn run(&self, stream: &Stream, args: OptimizerArgs<'_>) -> Result<(), Error> {
        use OptimizerOperand as O;
        let OptimizerArgs { weights, gradient, step, moment1, moment2, copy } = args;
        let CheckedOptimizer { len, rule, gradient: dtype, copy: copy_dtype } = self.op;
        let checks = Checks(self.device);
        checks.device("stream", stream.device())?;
        let in_f32 = Extent::of_values(DType::F32, len);
        let moments = rule.kind().moments();
        let why = "the rule has such moments";
        checks.view("parameters", weights.view(), in_f32)?;
        checks.view("gradient", gradient, Extent::of_values(dtype, len))?;
        checks.view("step", step, Extent::of_values(DType::F32, StepFactors::BYTES / DType::F32.bytes()))?;
        let moment1 = checks.optional("first moments", moment1, (moments > 0).then_some(in_f32), why)?;
        let moment2 = checks.optional("second moments", moment2, (moments > 1).then_some(in_f32), why)?;
        let of_copy = copy_dtype.map(|dtype| Extent::of_values(dtype, len));
        let copy = checks.optional("copy", copy, of_copy, "the optimizer makes one")?;
        let Some(ready) = &self.ready else { return Ok(()) };
        let mut operands = Operands::new();
        operands.read(O::Gradient, gradient);
        operands.read(O::Step, step);
        operands.write(O::Weights, weights);
        for (operand, written) in [(O::Moment1, moment1), (O::Moment2, moment2), (O::Copy, copy)] {
            if let Some(written) = written {
                operands.write(operand, written);
            }
        }
        let _span = tracing::trace_span!("launch", kernel = self.kernel_name()).entered();
        Ok(ready.sequence.run_for(&self.op, stream, operands)?)
    }
}

/// What was chosen, and the launches of a run: each with its kernel, geometry and operands.
impl fmt::Display for OptimizerPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {} parameters on {}", self.kernel_name(), self.op.len, self.device)?;
        let Some(Ready { plan, sequence, .. }) = self.ready.as_deref() else { return Ok(()) };
        writeln!(f, ", expected to take {:.1} µs", plan.estimate * 1e6)?;
        sequence.display_with(&self.op.operands()).fmt(f)
    }
}
