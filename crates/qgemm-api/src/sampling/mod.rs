//! Sampling of tokens from logits: builder, plan and faults of rows.

mod description;
mod fault;
mod plan;

pub use description::Sampling;
pub use fault::SamplingFault;
pub use plan::{EarlierArgs, SampledLogProbabilities, SamplingArgs, SamplingPlan};
