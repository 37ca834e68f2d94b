//! Layers of experts: their weights, products of rows with the experts that they are given to, and plans of those.

mod plan;
mod problem;
mod weights;

pub use plan::{ExpertArgs, ExpertPlan};
pub use problem::ExpertProblem;
pub use weights::Experts;
