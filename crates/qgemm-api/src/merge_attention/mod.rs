//! Merge of partial attention results: builder and plan.

mod description;
mod plan;

pub use description::MergeAttention;
pub use plan::{MergeAttentionArgs, MergeAttentionPlan};
