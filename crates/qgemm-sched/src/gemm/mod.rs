//! GEMM: kernel choice, tile partition, split-K
//! and tuned measurements.

mod avoided;
mod blocks;
mod bound;
mod cost;
mod explain;
mod partition;
pub(crate) mod processor;
mod search;
mod select;
mod tuned;

pub use avoided::AvoidedKernel;
pub use bound::{Bound, Cost};
pub use cost::estimate;
pub(crate) use cost::overlapping;
pub use explain::{Considered, Explanation, explain};
pub use partition::{Cut, Partition};
pub use search::{INVARIANT_M, Preferences};
pub use select::{candidates, choose};
pub use tuned::TunedTable;

pub(crate) use search::First;
#[cfg(test)]
pub(crate) use select::tests;
