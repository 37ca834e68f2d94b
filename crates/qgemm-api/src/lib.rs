//! Quantized matrix multiplication: `D = alpha · X·Wᵀ + beta · C + bias`, with `W` quantized.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod backends;
mod context;
mod error;
mod linear;
mod plan;
mod problem;
mod quantize;
mod weight;
mod workspace;

pub use backends::{DeviceListing, devices};
pub use context::Context;
pub use error::Error;
pub use plan::{Args, Plan};
pub use problem::Problem;
pub use quantize::quantize;
pub use weight::{Weight, WeightOrder};
pub use workspace::Workspace;

pub use qgemm_formats::prepack::PackClass;
pub use qgemm_formats::{DType, Format, FormatError, HostWeight, SharedBytes};
pub use qgemm_hal::{
    Buffer, BufferMut, BufferRef, CheckedGemm, Device, DeviceId, DeviceInfo, DeviceKind, Event, HalError, LaunchPlan,
    Stream, TileConfig,
};
