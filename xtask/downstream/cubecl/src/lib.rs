//! qgemm beside CubeCL, with one cudarc.

use std::sync::Arc;

use cubecl_cuda::CudaDevice;
use cudarc::driver::CudaStream;
use qgemm_api::{Context, Device, DeviceId, DeviceKind, Error, HalError, Stream, cuda};

/// The context of the device that CubeCL uses.
///
/// # Errors
/// When it cannot be opened.
pub fn context(device: &CudaDevice) -> Result<Context, Error> {
    let id = DeviceId { kind: DeviceKind::Cuda, ordinal: device.index as u32 };
    Context::open(id)
}

/// A stream of the engine's cudarc, which is qgemm's.
///
/// # Errors
/// When it belongs to another device.
pub fn stream(device: &dyn Device, stream: Arc<CudaStream>) -> Result<Stream, HalError> {
    cuda::from_cudarc_stream(device, stream)
}
