//! Products of two matrices in device memory: what is to be multiplied, and its plan.

mod description;
mod plan;

pub use description::Matmul;
pub use plan::{MatmulArgs, MatmulPlan};
