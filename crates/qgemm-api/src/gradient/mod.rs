//! Gradients through a packed weight: what is to be computed, and its plan.

mod description;
mod explain;
mod plan;

pub use description::Gradient;
pub use plan::{GradientArgs, GradientPlan};
