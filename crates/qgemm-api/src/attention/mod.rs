//! Means of values, weighed by how keys match queries: what is to be attended to, and its plan.

mod description;
mod plan;

pub use description::{Attention, Keys, KvStrides, Queries};
pub use plan::{AttentionArgs, AttentionPlan};
