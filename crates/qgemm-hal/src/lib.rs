//! The hardware abstraction layer: devices, capabilities, memory, streams, events, the traits that a backend
//! implements, and the parameter ABI shared with kernels. Knows nothing of what a format means or of which
//! kernel to choose.
//!
//! # Contract
//! Arguments have been validated by `qgemm-api`; below it a violated invariant is a bug of ours. Errors cover
//! what a caller cannot foresee: a missing driver, exhausted memory, a lost device.
#![deny(missing_docs)]

pub mod abi;
mod buffer;
mod caps;
mod device;
mod error;
mod family;
mod host;
mod host_memory;
mod host_stream;
mod mapped_file;
pub mod noop;
mod op;
mod pool;
mod work;
mod workspace_layout;

pub use buffer::{Buffer, BufferMut, BufferRef, RawBuffer};
pub use caps::{DeviceId, DeviceInfo, DeviceKind, Math, Variant};
pub use device::{Device, Event, RawEvent, RawStream, Stream};
pub use error::{HalError, Unsupported};
pub use family::{GemmArgs, Kernel, KernelFamily, LaunchPlan, Schedule, StagedX, StreamK, TileConfig, WeightArgs};
pub use host::{Host, SimdLevel, read_bandwidth};
pub use host_memory::HostMemory;
pub use host_stream::{HostEvent, HostStream};
pub use mapped_file::MappedFile;
pub use op::{Activation, CheckedGemm, Dense, XRounding};
pub use pool::{BufferPool, PoolStats, PooledBuffer};
pub use work::Piece;
pub use workspace_layout::{StagedLayout, WorkspaceLayout};
