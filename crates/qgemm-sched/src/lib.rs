//! The scheduler: picks a kernel family and config for
//! an operation, splits the work into tiles and K
//! ranges, and sizes the workspace.
//!
//! Pure: it knows descriptions of devices and kernels, never a device.
//!
//! Each operation has a module with a `choose` function:
//!
//! - [`gemm::choose`] uses tuned configs ([`TunedTable`])
//!   first, then the cost model.
//! - [`convert::choose`], [`unpack::choose`], [`norm::choose`],
//!   [`kv_append::choose`], [`routing::choose`], [`quantize::choose`] and
//!   [`dequantize::choose`] pick the family that moves the bytes fastest.
//! - [`experts::choose`] assumes that all experts have the same load.
//! - [`matmul::choose`] also splits K.
//! - [`attention::choose`] and [`indexer::choose`] weigh
//!   both traffic and arithmetic.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod attention;
mod candidates;
pub mod convert;
pub mod dequantize;
mod error;
pub mod experts;
mod families;
pub mod gemm;
pub mod indexer;
pub mod kv_append;
pub mod matmul;
mod measured;
pub mod norm;
pub mod optimizer;
pub mod quantize;
pub mod routing;
pub mod unpack;

pub use candidates::{Candidates, Offered};
pub use error::{Refusal, SchedError, TunedError};
pub use families::wanted_families;
pub use gemm::{AvoidedKernel, Bound, Cost, Cut, INVARIANT_M, Partition, Preferences, TunedTable, estimate};
pub use measured::Measured;
