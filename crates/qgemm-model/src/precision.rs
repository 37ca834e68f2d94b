//! Arithmetic of a model: types of activations, rounding of X.

use qgemm_api::{DType, PlanOptions, Problem, XPrecision};

/// Arithmetic of a model.
#[derive(Clone, Copy, Debug)]
pub struct Precision {
    /// Type of activations between operations. The residual stream and logits are f32.
    pub activations: DType,
    /// Permission to round X of products further.
    pub x_precision: XPrecision,
    /// Logits of a session do not depend on the other sessions of a step.
    pub batch_invariant: bool,
}

impl Default for Precision {
    fn default() -> Self {
        Self { activations: DType::F16, x_precision: XPrecision::default(), batch_invariant: false }
    }
}

impl Precision {
    /// States the arithmetic of a plan.
    pub(crate) fn state(&self, options: &mut PlanOptions) {
        (options.x_dtype, options.x_precision) = (self.activations, self.x_precision);
        options.batch_invariant = self.batch_invariant;
    }

    /// States the arithmetic of a product.
    pub(crate) fn of(&self, problem: Problem) -> Problem {
        problem.x_precision(self.x_precision).batch_invariant(self.batch_invariant)
    }
}
