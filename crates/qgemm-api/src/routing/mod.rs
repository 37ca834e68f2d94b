//! The experts of tokens, and the tokens of experts: what is to be routed, and its plan.

mod description;
mod plan;

pub use description::Routing;
pub use plan::{RoutingArgs, RoutingLists, RoutingPlan};
