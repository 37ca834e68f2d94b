//! Launching a kernel by its specification, outside of families: for kernels of one's own, and for those that no family
//! schedules.

use qgemm_hal::{BufferRef, Device, Geometry, HalError, Stream};

use crate::function::Start;
use crate::gpu::Gpu;
use crate::memory;
use crate::spec::KernelSpec;
use crate::target::Target;

/// Submits the kernel `spec` to `stream`, with `params` as its one by-value parameter, after all earlier work of the
/// stream. It is compiled for the device, or for exactly `target`: PTX of an older chip makes the device run that chip's
/// instructions.
///
/// # Errors
/// [`HalError::WrongDevice`] when `device` is no CUDA device or the stream is another's, [`HalError::Compile`],
/// [`HalError::KernelUnavailable`], or a driver error.
///
/// # Safety
/// `params` must be laid out as the kernel's parameter and as long; the addresses in it must be of memory on this device
/// that is as large as the kernel expects, that nothing else writes meanwhile, and that stays allocated until the kernel
/// is done. The kernel must stay within that memory and its shared memory for these parameters and this geometry.
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
    // SAFETY: passed on to the caller; the launch is in the order of the stream.
    unsafe { function.launch(stream, grid, threads, shared_bytes, params, Start::InOrder) }
}

/// The address by which kernels on `device` know the first byte of `view`.
///
/// # Errors
/// [`HalError::WrongDevice`] when the view is not of memory on `device`.
pub fn device_address(device: &dyn Device, view: BufferRef<'_>) -> Result<u64, HalError> {
    memory::device_address(device.info().id, view, "the buffer")
}
