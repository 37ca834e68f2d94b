//! Optimizers: what moves parameters against their gradient, and its plan.

mod description;
mod plan;

pub use description::{Optimizer, OptimizerStep};
pub use plan::{OptimizerArgs, OptimizerPlan};
