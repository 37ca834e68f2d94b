//! [`OptimizerPlan`]: a kernel made ready for one optimizer.

use qgemm_formats::DType;
use qgemm_hal::{BufferMut, BufferRef, CheckedOptimizer, OptimizerLaunch, OptimizerOperand, StepFactors, Stream};
use qgemm_sched::Preferences;

use super::description::{Optimizer, OptimizerStep, step_factors};
use crate::context::Context;
use crate::error::Error;
use crate::operand::Extent;
use crate::planned::{Bound, Planned, Wanted, chosen_by_traffic, explain};
use crate::record::{Dispatch, PlanRecord, Recorded, SplitAxis};

/// Kernels chosen and made ready for one [`Optimizer`]; made by [`Context::plan_optimizer`]. Its text says what a run launches.
pub type OptimizerPlan = Planned<CheckedOptimizer>;

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

impl Context {
    /// Chooses a kernel for `optimizer` and makes it ready. What was planned before is known, as with [`Context::plan`].
    ///
    /// # Errors
    /// When the optimizer is not valid, no family serves it, or the kernel cannot be made ready.
    pub fn plan_optimizer(&self, optimizer: &Optimizer) -> Result<OptimizerPlan, Error> {
        Planned::new(self, optimizer.check()?, Preferences::default())
    }

    /// What [`Context::plan_optimizer`] would choose: see [`Context::explain`].
    ///
    /// # Errors
    /// When the optimizer is not valid.
    pub fn explain_optimizer(&self, problem: &Optimizer) -> Result<PlanRecord, Error> {
        explain(self, &problem.check()?, &Preferences::default())
    }
}

chosen_by_traffic!(CheckedOptimizer);

impl Recorded for CheckedOptimizer {
    fn dispatch(&self, _: &OptimizerLaunch) -> Dispatch {
        Dispatch::along(SplitAxis::Range, 1)
    }
}

impl Bound for CheckedOptimizer {
    fn wanted(&self, operand: OptimizerOperand, _: bool) -> Wanted {
        use OptimizerOperand as O;
        let in_f32 = Extent::of_values(DType::F32, self.len);
        let moments = self.rule.kind().moments();
        let why = "the rule has such moments";
        match operand {
            O::Weights => Wanted::always("parameters", in_f32),
            O::Gradient => Wanted::always("gradient", Extent::of_values(self.gradient, self.len)),
            O::Step => Wanted::always("step", Extent::of_values(DType::F32, StepFactors::BYTES / DType::F32.bytes())),
            O::Moment1 => Wanted::optional("first moments", (moments > 0).then_some(in_f32), why),
            O::Moment2 => Wanted::optional("second moments", (moments > 1).then_some(in_f32), why),
            O::Copy => {
                let extent = self.copy.map(|dtype| Extent::of_values(dtype, self.len));
                Wanted::optional("copy", extent, "the optimizer makes one")
            }
        }
    }
}

impl OptimizerPlan {
    /// The numbers of a step, as the run of it finds them in device memory. Where a graph is replayed, they are written there before each
    /// replay.
    ///
    /// # Errors
    /// When the step is numbered 0, or a number is not finite.
    pub fn step(&self, step: &OptimizerStep) -> Result<[f32; 4], Error> {
        step_factors(&self.op().rule, step)
    }

    /// Submits the step to `stream`. Allocates nothing, waits for nothing and takes no lock, so it may be captured in a CUDA graph.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, on another device or not part of the rule, or a device error. Nothing has been
    /// written then.
    pub fn run(&self, stream: &Stream, args: OptimizerArgs<'_>) -> Result<(), Error> {
        use OptimizerOperand as O;
        let OptimizerArgs { weights, gradient, step, moment1, moment2, copy } = args;
        let mut run = self.start(stream)?;
        run.write(O::Weights, weights)?;
        run.read(O::Gradient, gradient)?;
        run.read(O::Step, step)?;
        run.write(O::Moment1, moment1)?;
        run.write(O::Moment2, moment2)?;
        run.write(O::Copy, copy)?;
        run.launch(stream)
    }
}
