//! Launching a kernel by its specification, for user kernels and
//! for kernels outside the families.

use qgemm_hal::{BufferRef, Device, Geometry, HalError, Stream};

use crate::function::Start;
use crate::gpu::Gpu;
use crate::memory;
use crate::spec::KernelSpec;
use crate::target::Target;

/// Launches the kernel `spec` on `stream` in stream order, with `params`
/// as its single by-value parameter.
///
/// It is compiled for the device, or for exactly `target`: with
/// PTX of an older chip the device runs that chip's instructions.
///
/// # Errors
/// [`HalError::WrongDevice`] when `device` is not a CUDA device or the
/// stream belongs to another one, [`HalError::Compile`],
/// [`HalError::KernelUnavailable`], or a driver error.
///
/// # Safety
/// `params` must have the layout and length of the kernel's
/// parameter. Its addresses must be memory on this device that is
/// as large as the kernel expects, that nothing else writes
/// meanwhile, and that stays allocated until the kernel is done. With
/// these parameters and this geometry, the kernel must stay within
/// that memory and its shared memory.
pub unsafe fn launch_spec(
    device: &dyn Device,
    stream: &Stream,
    spec: &KernelSpec,
    target: Option<Target>,
    geometry: Geometry,
    params: &[u8],
) -> Result<(), HalError> {
    let gpu = Gpu::of(device)?;
    let function = match target {
        Some(target) => gpu.kernel_for(spec, target)?,
        None => gpu.kernel(spec)?,
    };
    let _span = tracing::trace_span!("launch", kernel = spec.name).entered();
    let Geometry { grid, threads, shared_bytes } = geometry;
    // SAFETY: passed on to the caller; the
    // launch is in stream order.
    unsafe { function.launch(stream, grid, threads, shared_bytes, params, Start::InOrder) }
}

/// Device address of the first byte of `view`, for kernel parameters.
///
/// # Errors
/// [`HalError::WrongDevice`] when the view is not memory of `device`.
pub fn device_address(device: &dyn Device, view: BufferRef<'_>) -> Result<u64, HalError> {
    memory::device_address(device.info().id, view, "the buffer")
}
