//! The sparse indexer: how well keys match queries, and which match best. What is to be done, and its plan.

mod description;
mod plan;

pub use description::Indexer;
pub(crate) use description::format_names;
pub use plan::{IndexerArgs, IndexerPlan};
