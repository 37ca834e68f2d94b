//! The scheduler: picks a kernel family and config for
//! an operation, splits the work into tiles and K
//! ranges, and sizes the workspace.
//!
//! Pure: it knows descriptions of devices and kernels, never a device.
//!
//! `choose` functions pick a family and its config:
//!
//! - [`gemm::choose`] uses tuned configs ([`TunedTable`])
//!   first, then the cost model.
//! - [`memory_bound::choose`] picks the family that moves the bytes
//!   of a [`MemoryBound`](qgemm_hal::MemoryBound) operation fastest.
//! - [`experts::choose`] assumes that all experts have the same load.
//! - [`matmul::choose`] also splits K.
//! - [`attention::choose`] and [`indexer::choose`] weigh
//!   both traffic and arithmetic.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod attention;
mod candidates;
mod error;
pub mod experts;
mod families;
pub mod gemm;
pub mod indexer;
pub mod matmul;
mod measured;
pub mod memory_bound;

pub use candidates::{Candidates, Offered};
pub use error::{Refusal, SchedError, TunedError};
pub use families::wanted_families;
pub use gemm::{AvoidedKernel, Bound, Cost, Cut, INVARIANT_M, Partition, Preferences, TunedTable, estimate};
pub use measured::Measured;
