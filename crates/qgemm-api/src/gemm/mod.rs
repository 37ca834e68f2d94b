//! Products of activations and a weight: the problem, its plan, every other way to run it, the layer that plans by itself,
//! and the one-line layer.

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
