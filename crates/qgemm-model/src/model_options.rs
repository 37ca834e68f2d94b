//! [`ModelOptions`]: how a model is opened.

use qgemm_api::PlanOptions;

use crate::precision::Precision;

/// How a model is opened: its arithmetic, and what several ranks
/// divide.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct ModelOptions {
    /// Arithmetic.
    pub precision: Precision,
    /// Expert parallelism: ranks have whole experts each, instead of
    /// a slice of every expert.
    pub expert_parallel: bool,
}

impl ModelOptions {
    /// Sets [`ModelOptions::expert_parallel`].
    pub fn expert_parallel(mut self, on: bool) -> Self {
        self.expert_parallel = on;
        self
    }

    /// States the options of a plan.
    pub(crate) fn state(&self, options: &mut PlanOptions) {
        self.precision.state(options);
        options.expert_parallel = self.expert_parallel;
    }
}

impl From<Precision> for ModelOptions {
    fn from(precision: Precision) -> Self {
        Self { precision, expert_parallel: false }
    }
}
