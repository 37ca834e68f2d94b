//! Short causal depthwise convolution: builder and plan.

mod description;
mod plan;

pub use description::ShortConv;
pub use plan::{ShortConvArgs, ShortConvPlan};
