//! Gradients through a packed weight: builder and plan.

mod description;
mod explain;
mod part;
mod plan;
mod through;

pub use description::Gradient;
pub(crate) use part::GradientInputs;
pub use plan::{GradientArgs, GradientPlan};
pub use through::GradientWeight;
pub(crate) use through::ThroughShape;
