//! Matrix product of two matrices: builder and plan.

mod description;
mod plan;

pub use description::Matmul;
pub use plan::{MatmulArgs, MatmulPlan};
