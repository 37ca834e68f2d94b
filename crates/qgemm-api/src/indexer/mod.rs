//! Sparse-attention indexer: builder and plan.

mod description;
mod plan;

pub use description::Indexer;
pub(crate) use description::format_names;
pub use plan::{IndexerArgs, IndexerPlan};
