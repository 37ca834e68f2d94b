//! The scheduler: picks a kernel family and configuration for an operation, cuts the work into tiles and
//! K ranges, and sizes the workspace. Pure: it knows descriptions of devices and kernels, never a device.
//!
//! A module an operation. [`gemm::choose`] takes tuned configurations ([`TunedTable`]) first, then the cost model;
//! [`convert::choose`], [`unpack::choose`], [`norm::choose`], [`kv_append::choose`], [`routing::choose`], [`quantize::choose`] and [`dequantize::choose`] the family that moves the bytes in the least time; [`experts::choose`] what suits
//! experts of equal load; [`matmul::choose`] also cuts K;
//! [`attention::choose`] and [`indexer::choose`] what moves and multiplies in the least time.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod attention;
mod candidates;
pub mod convert;
pub mod dequantize;
mod error;
pub mod experts;
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

pub use candidates::{Candidates, Offered, wanted_families};
pub use error::{Refusal, SchedError, TunedError};
pub use gemm::{AvoidedKernel, Bound, Cost, Cut, INVARIANT_M, Partition, Preferences, TunedTable, estimate};
pub use measured::Measured;
