//! Products of activations and a weight: the problem, its plan, every other way to run it, and the one-line layer.

mod candidate;
mod linear;
mod plan;
mod problem;

pub use candidate::Candidate;
pub use plan::{Args, Plan};
pub use problem::Problem;
