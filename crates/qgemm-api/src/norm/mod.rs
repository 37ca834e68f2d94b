//! RMSNorm and LayerNorm: builder and plan.

mod description;
mod plan;

pub use description::Norm;
pub(crate) use description::{check_eps, check_function};
pub use plan::{NormArgs, NormPlan};
