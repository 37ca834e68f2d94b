//! RMSNorm and LayerNorm of rows: what is to be normalized, and its plan.

mod description;
mod plan;

pub use description::Norm;
pub(crate) use description::check_function;
pub use plan::{NormArgs, NormPlan};
