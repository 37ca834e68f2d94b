//! Linear attention: builder and plan.

mod description;
mod plan;

pub use description::{Decay, LinearAttention};
pub use plan::{LinearAttentionArgs, LinearAttentionPlan};
