//! GEMM with a quantized weight: problem, plan, candidates, and layers with a
//! plan per number of tokens.

mod candidate;
mod layer;
mod linear;
mod plan;
mod problem;
mod sequence;
mod x;

pub use candidate::Candidate;
pub(crate) use layer::LayerPlans;
pub use layer::Linear;
pub use plan::{Args, Plan};
pub use problem::Problem;
pub(crate) use problem::stored_x;
pub(crate) use x::XOf;
pub use x::XRef;
