//! The scheduler: picks a kernel family and configuration for an operation, cuts the work into tiles and
//! K ranges, and sizes the workspace. Pure: it knows descriptions of devices and kernels, never a device.
//!
//! [`choose`] is the entry point: tuned configurations ([`TunedTable`]) first, then the cost model.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod cost;
mod error;
mod partition;
mod select;
mod tuned;

pub use cost::estimate;
pub use error::{Refusal, SchedError, TunedError};
pub use partition::{Cut, Partition};
pub use qgemm_hal::WorkspaceLayout;
pub use select::{INVARIANT_M, Preferences, candidates, choose};
pub use tuned::TunedTable;
