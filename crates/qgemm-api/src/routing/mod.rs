//! Router top-k and expert lists: builder and plan.

mod description;
mod plan;

pub use description::Routing;
pub use plan::{RoutingArgs, RoutingLists, RoutingPlan};
