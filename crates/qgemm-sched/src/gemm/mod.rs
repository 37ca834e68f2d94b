//! Products: which kernel, how its tiles and their K are shared, and what was measured.

mod cost;
mod partition;
pub(crate) mod processor;
mod select;
mod tuned;

pub use cost::estimate;
pub use partition::{Cut, Partition};
pub use select::{INVARIANT_M, Preferences, candidates, choose};
pub use tuned::TunedTable;

#[cfg(test)]
pub(crate) use select::tests;
