//! Plan records without preparing kernels.

use crate::context::Context;
use crate::described::DescribedWeight;
use crate::error::Error;
use crate::gemm::Problem;
use crate::gradient::{Gradient, GradientWeight, ThroughShape};
use crate::record::{GemmSubject, PlanRecord};

impl Context {
    /// Record of the choice of [`Context::plan`] for `problem`, with
    /// other candidates and reasons. Nothing is compiled or loaded.
    /// An unserved problem is no error: the record has the reasons.
    ///
    /// # Errors
    /// When the problem is invalid, its weight is on another device,
    /// or the requested family does not exist.
    pub fn explain(&self, problem: &Problem) -> Result<PlanRecord, Error> {
        self.record_of(problem, |subject| subject.explain_with_permissions())
    }

    /// [`Context::explain`] without permissions, for plans of many products.
    pub(crate) fn explain_choice(&self, problem: &Problem) -> Result<PlanRecord, Error> {
        self.record_of(problem, |subject| subject.explain())
    }

    fn record_of(
        &self,
        problem: &Problem,
        record: impl FnOnce(&GemmSubject<'_>) -> Result<PlanRecord, Error>,
    ) -> Result<PlanRecord, Error> {
        self.check_weight(problem.weight().device)?;
        let device = self.device();
        record(&GemmSubject {
            op: &problem.check()?,
            info: device.info(),
            families: device.catalog().gemm,
            preferences: problem.preferences(),
            tuned: self.tuned(),
        })
    }

    /// Record of the choice of [`Context::plan_gradient`]: see
    /// [`Context::explain`]. It describes the product with the first
    /// part of the weight. Its prologue decodes that part.
    ///
    /// # Errors
    /// When the gradient is invalid.
    pub fn explain_gradient<'a>(
        &self,
        weight: impl Into<GradientWeight<'a>>,
        gradient: &Gradient,
    ) -> Result<PlanRecord, Error> {
        self.explain_gradient_by(&weight.into().shape(), gradient)
    }

    /// Gradient record for a weight that is not loaded
    /// ([`Context::describe_weight`]).
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
}
