//! [`OptimizerPlan`]: ready kernel of one optimizer.

use qgemm_formats::DType;
use qgemm_hal::{BufferMut, BufferRef, CheckedOptimizer, OptimizerLaunch, OptimizerOperand, StepFactors, Stream};
use qgemm_sched::Preferences;

use super::description::{Optimizer, OptimizerStep, step_factors};
use crate::context::Context;
use crate::error::Error;
use crate::operand::Extent;
use crate::planned::{Bound, Planned, Wanted, chosen_by_traffic, explain};
use crate::record::{Dispatch, PlanRecord, Recorded, SplitAxis};
use crate::setters::setters;

/// Ready kernels of one [`Optimizer`], from
/// [`Context::plan_optimizer`]. Its text lists the launches of a
/// run.
pub type OptimizerPlan = Planned<CheckedOptimizer>;

/// Operands of one run of an [`OptimizerPlan`]. Moments are zeros
/// before the first step.
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
    /// Parameters in f32, updated in place.
    pub weights: BufferMut<'a>,
    /// Gradient of the parameters.
    pub gradient: BufferRef<'a>,
    /// Result of [`OptimizerPlan::step`], in device memory: 16 bytes.
    pub step: BufferRef<'a>,
    /// First moments in f32, for rules with moments.
    pub moment1: Option<BufferMut<'a>>,
    /// Second moments in f32, for AdamW.
    pub moment2: Option<BufferMut<'a>>,
    /// Copy of the parameters in 16 bits, an output, where the
    /// optimizer makes one.
    pub copy: Option<BufferMut<'a>>,
}

impl<'a> OptimizerArgs<'a> {
    /// Operands of every run. Methods add the other operands. Callers
    /// with optional operands can set the fields.
    pub fn new(
        weights: impl Into<BufferMut<'a>>,
        gradient: impl Into<BufferRef<'a>>,
        step: impl Into<BufferRef<'a>>,
    ) -> Self {
        let (weights, gradient, step) = (weights.into(), gradient.into(), step.into());
        Self { weights, gradient, step, moment1: None, moment2: None, copy: None }
    }

    setters! {
        /// With first moments, the only moments of SGD with momentum.
        moment1: BufferMut,
        /// With second moments.
        moment2: BufferMut,
        /// With the copy.
        copy: BufferMut,
    }
}

impl Context {
    /// Chooses a kernel for `optimizer` and makes it ready. A known
    /// problem costs a lookup, as with [`Context::plan`].
    ///
    /// # Errors
    /// When the optimizer is invalid or no family serves it, or when
    /// the kernel cannot be prepared.
    pub fn plan_optimizer(&self, optimizer: &Optimizer) -> Result<OptimizerPlan, Error> {
        Planned::new(self, optimizer.check()?, Preferences::default())
    }

    /// Record of the choice of [`Context::plan_optimizer`]: see
    /// [`Context::explain`].
    ///
    /// # Errors
    /// When the optimizer is invalid.
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
    /// Parameters of a step, for its run to read from device memory.
    /// Before each replay of a graph, write new ones there.
    ///
    /// # Errors
    /// When the step has number 0, or a parameter is not finite.
    pub fn step(&self, step: &OptimizerStep) -> Result<[f32; 4], Error> {
        step_factors(&self.op().rule, step)
    }

    /// Submits the step to `stream`. A run allocates nothing, waits
    /// for nothing and takes no lock. A CUDA graph may capture it.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, unexpected
    /// or on another device; or on a device error. Nothing is written
    /// then.
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
