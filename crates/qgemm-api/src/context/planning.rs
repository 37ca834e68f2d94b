//! Plans from a [`Context`]: every operation, layers, and every
//! candidate.

use qgemm_hal::BufferRef;

use super::Context;
use crate::error::Error;
use crate::experts::{Experts, Moe, MoeLayer};
use crate::fused::{FusedPlan, FusedProblem};
use crate::gemm::{Candidate, Linear, Plan, Problem};
use crate::gradient::{Gradient, GradientPlan, GradientWeight, ThroughShape};
use crate::norm::NormPlan;
use crate::quantization::{Quantization, QuantizationPlan, QuantizedX};
use crate::weight::Weight;

impl Context {
    /// Chooses a kernel for `problem` and makes it ready, by
    /// compilation if necessary. A problem that this context, or a
    /// clone of it, has planned costs a lookup. The cache holds the
    /// last 1024.
    ///
    /// # Errors
    /// When the problem is invalid, its weight is on another device
    /// or no family serves it; or when the kernel cannot be prepared.
    pub fn plan(&self, problem: &Problem) -> Result<Plan, Error> {
        self.check_weight(problem.weight().device)?;
        Plan::new(self, problem)
    }

    /// Layer for any number of tokens. `describe` states all but M of
    /// a problem with `weight`. See [`Linear`].
    ///
    /// # Errors
    /// When the problem is invalid, or has another weight.
    pub fn layer(&self, weight: &Weight, describe: impl FnOnce(Problem) -> Problem) -> Result<Linear, Error> {
        self.check_weight(weight.device())?;
        Linear::new(self, weight, describe(Problem::new(weight, 0)))
    }

    /// Chooses kernels for `problem` and makes them ready.
    ///
    /// # Errors
    /// As [`Context::plan`] and [`Context::plan_conversion`], and
    /// when a stated segment does not exist.
    pub fn plan_fused(&self, problem: &FusedProblem) -> Result<FusedPlan, Error> {
        FusedPlan::new(self, problem)
    }

    /// MoE layer for any number of tokens, with `top_k` experts each.
    /// `up` has a gated pair or one weight per expert. `describe`
    /// states the rest. See [`MoeLayer`].
    ///
    /// # Errors
    /// [`Error::WrongWeight`] when `up` and `down` do not fit
    /// together. Also as [`Context::plan_experts`] and
    /// [`Context::plan_routing`].
    pub fn moe_layer(
        &self,
        up: &Experts,
        down: &Experts,
        top_k: usize,
        describe: impl FnOnce(Moe) -> Moe,
    ) -> Result<MoeLayer, Error> {
        MoeLayer::new(self, up, down, top_k, describe)
    }

    /// Chooses kernels for the input gradient of a layer or experts.
    /// A known problem costs a lookup, as with [`Context::plan`].
    ///
    /// # Errors
    /// When the gradient is invalid or no family serves it, or when a
    /// kernel cannot be prepared.
    pub fn plan_gradient<'a>(
        &self,
        weight: impl Into<GradientWeight<'a>>,
        gradient: &Gradient,
    ) -> Result<GradientPlan, Error> {
        self.plan_gradient_by(&weight.into().shape(), gradient)
    }

    /// [`Context::plan_gradient`] through a weight of a shape.
    pub(crate) fn plan_gradient_by(&self, weight: &ThroughShape, gradient: &Gradient) -> Result<GradientPlan, Error> {
        GradientPlan::new(&*self.device, self.tuned(), &self.plans, weight, gradient)
    }

    /// Memory for the codes and scales of an X, for
    /// [`QuantizationPlan::run`].
    ///
    /// # Errors
    /// When the device is out of memory.
    pub fn allocate_x(&self, plan: &QuantizationPlan) -> Result<QuantizedX, Error> {
        QuantizedX::allocate(self, plan.op())
    }

    /// Memory for the quantized output of a norm
    /// ([`Norm::d_format`](crate::Norm::d_format)), for
    /// [`NormArgs::quantized`].
    ///
    /// # Errors
    /// When the output is not quantized, or the device is out of
    /// memory.
    ///
    /// [`NormArgs::quantized`]: crate::NormArgs::quantized
    pub fn allocate_normed_x(&self, plan: &NormPlan) -> Result<QuantizedX, Error> {
        let plain = || Error::NotQuantized { got: plan.op().d.dtype.into() };
        QuantizedX::allocate(self, &plan.quantization().ok_or_else(plain)?)
    }

    /// Quantizes X as `quantization` says, on the default stream.
    /// Plans, allocates and runs, for one use.
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
    /// Errors of planning, allocating and running. A format with a
    /// given factor needs a plan's [`run`](QuantizationPlan::run).
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

    /// Candidates of [`Context::plan`] for `problem`, fastest first
    /// by the cost model. Empty for 0 tokens. For measurements of the
    /// choice: [`Context::plan_candidate`] makes one ready.
    ///
    /// # Errors
    /// As [`Context::plan`], except for preparing the kernel.
    pub fn candidates(&self, problem: &Problem) -> Result<Vec<Candidate>, Error> {
        self.check_weight(problem.weight().device)?;
        Candidate::all(&*self.device, self.tuned(), problem)
    }

    /// Makes the kernel of one candidate ready.
    ///
    /// # Errors
    /// When its weight is on another device, or the kernel cannot be
    /// made ready.
    pub fn plan_candidate(&self, candidate: &Candidate) -> Result<Plan, Error> {
        self.check_weight(candidate.device())?;
        Plan::of_candidate(self, candidate)
    }
}
