//! Optimizer step (SGD, AdamW): builder and plan.

mod description;
mod plan;

pub use description::{Optimizer, OptimizerStep};
pub use plan::{OptimizerArgs, OptimizerPlan};
