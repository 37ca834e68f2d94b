//! GEMM: kernel choice, tile partition, split-K
//! and tuned measurements.

mod avoided;
mod blocks;
mod cost;
mod explain;
mod partition;
pub(crate) mod processor;
mod select;
mod tuned;

pub use avoided::AvoidedKernel;
pub(crate) use cost::overlapping;
pub use cost::{Bound, Cost, estimate};
pub use explain::{Considered, Explanation, explain};
pub use partition::{Cut, Partition};
pub use select::{INVARIANT_M, Preferences, candidates, choose};
pub use tuned::TunedTable;

pub(crate) use select::First;
#[cfg(test)]
pub(crate) use select::tests;
