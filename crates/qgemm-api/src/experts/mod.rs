//! Mixture of experts: weights, problems, MoE layers.

mod layer;
mod moe;
mod plan;
mod problem;
mod weights;

pub use layer::{MoeArgs, MoeLayer, MoePlan, MoeSource, MoeWorkspace};
pub use moe::Moe;
pub use plan::{ExpertArgs, ExpertPlan, expert_lists};
pub use problem::ExpertProblem;
pub use weights::Experts;
pub(crate) use weights::ExpertsShape;
