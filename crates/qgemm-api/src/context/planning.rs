//! What a [`Context`] plans: every operation, layers of them, and each way to run one.

use qgemm_hal::BufferRef;

use super::Context;
use crate::error::Error;
use crate::experts::{Experts, Moe, MoeLayer};
use crate::fused::{FusedPlan, FusedProblem};
use crate::gemm::{Candidate, Linear, Plan, Problem};
use crate::gradient::{Gradient, GradientPlan, GradientWeight};
use crate::norm::NormPlan;
use crate::quantization::{Quantization, QuantizationPlan, QuantizedX};
use crate::weight::Weight;

impl Context {
    /// Chooses a kernel for `problem`, makes it ready (which may compile it) and computes its workspace. A problem that this
    /// context, or a clone of it, planned before takes a lookup; the last 1024 are known.
    ///
    /// # Errors
    /// When the problem is not valid, its weight is on another device, no family serves it, or the kernel
    /// cannot be made ready.
    pub fn plan(&self, problem: &Problem) -> Result<Plan, Error> {
        self.check_weight(problem.weight().device)?;
        Plan::new(self, problem)
    }

    /// A layer for any number of tokens: `describe` states all but M of a problem with `weight`. See [`Linear`].
    ///
    /// # Errors
    /// When the problem is not valid, or is one with another weight.
    pub fn layer(&self, weight: &Weight, describe: impl FnOnce(Problem) -> Problem) -> Result<Linear, Error> {
        self.check_weight(weight.device())?;
        Linear::new(self, weight, describe(Problem::new(weight, 0)))
    }

    /// Chooses kernels for `problem` and makes them ready.
    ///
    /// # Errors
    /// As [`Context::plan`] and [`Context::plan_conversion`], and when a segment is stated that there is not.
    pub fn plan_fused(&self, problem: &FusedProblem) -> Result<FusedPlan, Error> {
        FusedPlan::new(self, problem)
    }

    /// A feed-forward layer of experts for any number of tokens, each given to `top_k` experts: `up`, a pair of gate and up or one weight
    /// an expert, and `down`; `describe` states the rest. See [`MoeLayer`].
    ///
    /// # Errors
    /// [`Error::WrongWeight`] when the experts do not fit together, and as [`Context::plan_experts`] and [`Context::plan_routing`].
    pub fn moe_layer(
        &self,
        up: &Experts,
        down: &Experts,
        top_k: usize,
        describe: impl FnOnce(Moe) -> Moe,
    ) -> Result<MoeLayer, Error> {
        MoeLayer::new(self, up, down, top_k, describe)
    }

    /// Chooses kernels for the gradient of a layer with `weight`, or with experts, by its input, and makes them ready. What was planned
    /// before is known, as with [`Context::plan`].
    ///
    /// # Errors
    /// When the gradient is not valid, no family serves it, or a kernel cannot be made ready.
    pub fn plan_gradient<'a>(
        &self,
        weight: impl Into<GradientWeight<'a>>,
        gradient: &Gradient,
    ) -> Result<GradientPlan, Error> {
        GradientPlan::new(&*self.device, self.tuned(), &self.plans, &weight.into().shape(), gradient)
    }

    /// Memory for what a run of `plan` writes: an X in codes and scales, for [`QuantizationPlan::run`].
    ///
    /// # Errors
    /// When the device is out of memory.
    pub fn allocate_x(&self, plan: &QuantizationPlan) -> Result<QuantizedX, Error> {
        QuantizedX::allocate(self, plan.op())
    }

    /// Memory for what a run of `plan` writes, whose result is quantized ([`Norm::d_format`](crate::Norm::d_format)): for [`NormArgs::quantized`].
    ///
    /// # Errors
    /// When the result is of plain numbers, or the device is out of memory.
    ///
    /// [`NormArgs::quantized`]: crate::NormArgs::quantized
    pub fn allocate_normed_x(&self, plan: &NormPlan) -> Result<QuantizedX, Error> {
        let plain = || Error::NotQuantized { got: plan.op().d.dtype.into() };
        QuantizedX::allocate(self, &plan.quantization().ok_or_else(plain)?)
    }

    /// Quantizes X as `quantization` says, on the default stream: plans, allocates and runs, for one use.
    ///
    /// ```
    /// use qgemm_api::{Context, DType, Quantization, XFormat};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let x = ctx.upload(&[0.5f32, -1.0, 0.25, 2.0])?;
    /// let quantized = ctx.quantize_x(&Quantization::new(1, 4, DType::F32, XFormat::Q8_0), &x)?;
    /// let codes: Vec<u8> = ctx.download(quantized.codes())?;
    /// assert_eq!(codes[..4].iter().map(|&code| code as i8).collect::<Vec<_>>(), [32, -64, 16, 127]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of planning, allocating and running; a format that wants a factor wants a plan's [`run`](QuantizationPlan::run).
    pub fn quantize_x<'a>(
        &self,
        quantization: &Quantization,
        x: impl Into<BufferRef<'a>>,
    ) -> Result<QuantizedX, Error> {
        let plan = self.plan_quantization(quantization)?;
        let mut quantized = self.allocate_x(&plan)?;
        let x: BufferRef<'_> = x.into();
        plan.run(&self.default_stream(), quantized.args(x))?;
        Ok(quantized)
    }

    /// Every way to run `problem` that [`Context::plan`] has the choice of, the fastest by the cost model first; none
    /// for 0 tokens. To measure how good the choice is: [`Context::plan_candidate`] makes one ready.
    ///
    /// # Errors
    /// As [`Context::plan`], but for making the kernel ready.
    pub fn candidates(&self, problem: &Problem) -> Result<Vec<Candidate>, Error> {
        self.check_weight(problem.weight().device)?;
        Candidate::all(&*self.device, self.tuned(), problem)
    }

    /// Makes the kernel of one candidate ready.
    ///
    /// # Errors
    /// When its weight is on another device, or the kernel cannot be made ready.
    pub fn plan_candidate(&self, candidate: &Candidate) -> Result<Plan, Error> {
        self.check_weight(candidate.device())?;
        Plan::of_candidate(self, candidate)
    }
}
