//! What a context would choose, and why, without making anything ready.

use qgemm_hal::DeviceInfo;
use qgemm_sched::{Candidates, attention, experts, indexer, matmul, memory_bound};

use crate::attention::Attention;
use crate::context::Context;
use crate::convert::Conversion;
use crate::described::DescribedWeight;
use crate::error::Error;
use crate::experts::ExpertProblem;
use crate::gemm::Problem;
use crate::gradient::{Gradient, GradientWeight, ThroughShape};
use crate::indexer::Indexer;
use crate::kv_append::KvAppend;
use crate::matmul::Matmul;
use crate::norm::Norm;
use crate::optimizer::Optimizer;
use crate::quantization::Quantization;
use crate::record::{GemmSubject, PlanRecord, Recorded, record};
use crate::routing::Routing;

impl Context {
    /// What [`Context::plan`] would choose for `problem`, what else there is, and why. Compiles nothing and loads nothing. That no
    /// family serves it is no error: the record has the reasons.
    ///
    /// # Errors
    /// When the problem is not valid, its weight is on another device, or the family asked for does not exist.
    pub fn explain(&self, problem: &Problem) -> Result<PlanRecord, Error> {
        self.check_weight(problem.weight().device)?;
        let device = self.device();
        let subject = GemmSubject {
            op: &problem.check()?,
            info: device.info(),
            families: device.catalog().gemm,
            preferences: problem.preferences(),
            tuned: self.tuned(),
        };
        subject.explain()
    }

    /// What [`Context::plan_experts`] would choose: see [`Context::explain`].
    ///
    /// # Errors
    /// When the problem is not valid, or its experts are on another device.
    pub fn explain_experts(&self, problem: &ExpertProblem) -> Result<PlanRecord, Error> {
        self.check_weight(problem.shape().each.device)?;
        let (op, device) = (problem.check()?, self.device());
        let (families, preferences) = (device.catalog().experts, problem.preferences());
        let all = || experts::candidates(&op, device.info(), families, preferences, self.tuned());
        Ok(explained(&op, device.info(), all))
    }

    /// What [`Context::plan_conversion`] would choose: see [`Context::explain`].
    ///
    /// # Errors
    /// When the conversion is not valid.
    pub fn explain_conversion(&self, conversion: &Conversion) -> Result<PlanRecord, Error> {
        let (op, device) = (conversion.check()?, self.device());
        Ok(explained(&op, device.info(), || memory_bound::candidates(&op, device.info(), device.catalog().convert)))
    }

    /// What [`Context::plan_routing`] would choose: see [`Context::explain`].
    ///
    /// # Errors
    /// When the routing is not valid.
    pub fn explain_routing(&self, routing: &Routing) -> Result<PlanRecord, Error> {
        let (op, device) = (routing.check()?, self.device());
        Ok(explained(&op, device.info(), || memory_bound::candidates(&op, device.info(), device.catalog().routing)))
    }

    /// What [`Context::plan_matmul`] would choose: see [`Context::explain`].
    ///
    /// # Errors
    /// When the product is not valid.
    pub fn explain_matmul(&self, product: &Matmul) -> Result<PlanRecord, Error> {
        let (op, device) = (product.check()?, self.device());
        Ok(explained(&op, device.info(), || {
            matmul::candidates(&op, device.info(), device.catalog().matmul, self.tuned())
        }))
    }

    /// What [`Context::plan_gradient`] would choose: see [`Context::explain`]. The record is of the product with the first part of the
    /// weight, and its prologue what decodes that.
    ///
    /// # Errors
    /// When the gradient is not valid.
    pub fn explain_gradient<'a>(
        &self,
        weight: impl Into<GradientWeight<'a>>,
        gradient: &Gradient,
    ) -> Result<PlanRecord, Error> {
        self.explain_gradient_by(&weight.into().shape(), gradient)
    }

    /// The same of a weight that need not be there ([`Context::describe_weight`]).
    ///
    /// # Errors
    /// As [`Context::explain_gradient`].
    pub fn explain_gradient_of(&self, weight: &DescribedWeight, gradient: &Gradient) -> Result<PlanRecord, Error> {
        self.explain_gradient_by(&(*weight.shape()).into(), gradient)
    }

    pub(crate) fn explain_gradient_by(&self, weight: &ThroughShape, gradient: &Gradient) -> Result<PlanRecord, Error> {
        self.check_weight(weight.each().device)?;
        let device = self.device();
        gradient.explain(weight, device.info(), &device.catalog(), self.tuned())
    }

    /// What [`Context::plan_attention`] would choose: see [`Context::explain`].
    ///
    /// # Errors
    /// When the attention is not valid, or the family asked for does not exist.
    pub fn explain_attention(&self, problem: &Attention) -> Result<PlanRecord, Error> {
        let (op, device) = (problem.check()?, self.device());
        let families = problem.families(device.info(), device.catalog().attention)?;
        Ok(explained(&op, device.info(), || attention::candidates(&op, device.info(), &families)))
    }

    /// What [`Context::plan_norm`] would choose: see [`Context::explain`].
    ///
    /// # Errors
    /// When the norm is not valid.
    pub fn explain_norm(&self, problem: &Norm) -> Result<PlanRecord, Error> {
        let (op, device) = (problem.check()?, self.device());
        Ok(explained(&op, device.info(), || memory_bound::candidates(&op, device.info(), device.catalog().norm)))
    }

    /// What [`Context::plan_optimizer`] would choose: see [`Context::explain`].
    ///
    /// # Errors
    /// When the optimizer is not valid.
    pub fn explain_optimizer(&self, problem: &Optimizer) -> Result<PlanRecord, Error> {
        let (op, device) = (problem.check()?, self.device());
        Ok(explained(&op, device.info(), || memory_bound::candidates(&op, device.info(), device.catalog().optimizer)))
    }

    /// What [`Context::plan_kv_append`] would choose: see [`Context::explain`].
    ///
    /// # Errors
    /// When it is not valid.
    pub fn explain_kv_append(&self, append: &KvAppend) -> Result<PlanRecord, Error> {
        let (op, device) = (append.check()?, self.device());
        Ok(explained(&op, device.info(), || memory_bound::candidates(&op, device.info(), device.catalog().kv_append)))
    }

    /// What [`Context::plan_indexer`] would choose: see [`Context::explain`].
    ///
    /// # Errors
    /// When the indexer is not valid.
    pub fn explain_indexer(&self, problem: &Indexer) -> Result<PlanRecord, Error> {
        let (op, device) = (problem.check()?, self.device());
        Ok(explained(&op, device.info(), || indexer::candidates(&op, device.info(), device.catalog().indexer)))
    }

    /// What [`Context::plan_quantization`] would choose: see [`Context::explain`].
    ///
    /// # Errors
    /// When the quantization is not valid.
    pub fn explain_quantization(&self, quantization: &Quantization) -> Result<PlanRecord, Error> {
        let (op, device) = (quantization.check()?, self.device());
        Ok(explained(&op, device.info(), || memory_bound::candidates(&op, device.info(), device.catalog().quantize)))
    }
}

/// The record of `op`; families are asked where there is something to launch.
fn explained<'f, O: Recorded>(op: &O, info: &DeviceInfo, candidates: impl FnOnce() -> Candidates<'f, O>) -> PlanRecord {
    if !op.is_nothing() {
        return record(op, info, &candidates());
    }
    let none = Candidates { offered: Vec::new(), refusals: Vec::new() };
    PlanRecord { why: "there is nothing to compute: nothing is launched".into(), ..record(op, info, &none) }
}
