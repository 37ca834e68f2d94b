//! CUDA backend of qgemm: NVIDIA GPUs from Volta on, through
//! the driver API only. It provides kernels and launches
//! them, but does not choose one.
//!
//! On a machine without a driver or a GPU, [`open`] and
//! [`devices`] return errors and never panic. Kernels come from a prebuilt
//! bundle (`QGEMM_KERNELS`, or embedded by the feature `embed-kernels`),
//! from the disk cache (`QGEMM_CACHE`), or from NVRTC (`QGEMM_NVRTC`, else
//! the usual install locations of CUDA and Python).
#![deny(missing_docs)]

mod address_space;
mod arch;
mod artifact;
mod binary;
pub mod build;
mod bundle;
mod cache;
mod chip;
mod device;
#[cfg(test)]
mod device_tests;
mod driver;
mod families;
mod function;
mod gpu;
mod graph;
mod hash;
mod installation;
mod jit;
mod launch;
mod memory;
pub mod nccl;
mod nvrtc;
mod private;
mod probe;
mod replace;
pub mod source;
mod spec;
mod store;
mod stream;
mod target;
mod tensor_map;
mod timeline;

use std::ffi::c_void;
use std::sync::Arc;

use qgemm_hal::{Buffer, Device, DeviceInfo, HalError, Stream};

pub use address_space::AddressSpace;
pub use arch::fragment_layout;
pub use artifact::{Artifact, Resources};
pub use bundle::{BUNDLES_VARIABLE, Bundle, BundleError, EMBED_VARIABLE, EXTENSION as BUNDLE_EXTENSION};
pub use cache::{CACHE_VARIABLE, cache_folder};
pub use chip::ChipNumbers;
/// Driver bindings, for callers that pass their own streams.
pub use cudarc;
pub use families::{
    Addresses, CATALOG, CudaOperation, KernelLaunch, LaunchParams, MakeKernel, Repack, RepackLaunch, all_kernels,
    ask_registers, manifest, repack_bandwidth,
};
pub use graph::{Graph, LentGraph, capture, capture_lent, capture_with};
pub use hash::Sha256Hash;
pub use installation::{BundleContents, CacheFolder, Compiler, Installation, installation};
pub use launch::{device_address, launch_spec};
pub use nvrtc::NvrtcError;
pub use private::{make_private_folder, read_private};
pub use probe::{copy_bandwidth, read_bandwidth};
pub use qgemm_hal::Geometry;
pub use spec::KernelSpec;
pub use target::Target;
pub use tensor_map::{EncodedMap, MOST_DIMENSIONS, MapElement, MapSwizzle, TileMap};
pub use timeline::{CUPTI_VARIABLE, TimelineEntry, record_timeline};

use device::CudaDevice;
use gpu::Gpu;
use memory::CudaBuffer;
use stream::CudaStream;

/// All supported CUDA devices, without opening one. Chips
/// older than Volta are left out.
///
/// # Errors
/// [`HalError::NoDevice`] when there is no driver or no such device,
/// [`HalError::Unsupported`] when `QGEMM_VARIANT` requests a variant that a
/// device does not run, or a driver error.
pub fn devices() -> Result<Vec<DeviceInfo>, HalError> {
    let count = driver::device_count()?;
    let mut found = Vec::new();
    let mut too_old = Vec::new();
    for ordinal in 0..count {
        match chip::read(ordinal) {
            Ok(chip) => found.push(chip.info),
            Err(HalError::NoDevice { why, .. }) => too_old.push(why),
            Err(other) => return Err(other),
        }
    }
    if found.is_empty() {
        let why = match too_old.first() {
            Some(why) => why.clone(),
            None => "the NVIDIA driver sees no device".into(),
        };
        return Err(HalError::NoDevice { device: "cuda".into(), why });
    }
    Ok(found)
}

/// Opens device `ordinal`. Its primary context is shared with all
/// other CUDA code of the process.
///
/// # Errors
/// [`HalError::NoDevice`] when there is no driver, no such device, or its
/// chip is older than Volta; [`HalError::Unsupported`] for a wrong
/// `QGEMM_VARIANT`; or a driver error.
pub fn open(ordinal: u32) -> Result<Arc<dyn Device>, HalError> {
    Ok(Arc::new(CudaDevice::open(ordinal)?))
}

/// Wraps `len` caller-owned bytes at `address` without
/// copying. They are never freed here. The element type is unknown: plans
/// accept the buffer for any operand, unless [`Buffer::typed`] states a type.
///
/// # Errors
/// [`HalError::WrongDevice`] when `device` is not a CUDA device.
///
/// # Safety
/// The bytes must be device memory (from `cuMemAlloc`, the runtime,
/// PyTorch, cudarc …) accessible from the primary context of
/// `device`. They must be aligned to the element type they are
/// used as, and stay allocated until the buffer is dropped and
/// all work that uses it is done.
pub unsafe fn wrap_device_ptr(device: &dyn Device, address: u64, len: usize) -> Result<Buffer, HalError> {
    let context = Gpu::of(device)?.context();
    // SAFETY: passed on to the caller.
    Ok(unsafe { CudaBuffer::wrap(context, address, len) }.into_buffer())
}

/// Wraps the caller's `CUstream` (or `cudaStream_t`), which is never
/// destroyed here. The handles 0 (legacy default stream), 1, and 2
/// (per-thread default stream) are accepted too.
///
/// # Errors
/// [`HalError::WrongDevice`] when `device` is not a CUDA device.
///
/// # Safety
/// `stream` must be a stream of the primary context of `device`,
/// and must outlive the returned object.
pub unsafe fn wrap_stream(device: &dyn Device, stream: *mut c_void) -> Result<Stream, HalError> {
    let context = Gpu::of(device)?.context();
    // SAFETY: passed on to the caller.
    Ok(unsafe { CudaStream::wrap(context, stream.cast()) }.into_stream())
}

/// Wraps a cudarc stream and keeps it alive.
///
/// # Errors
/// [`HalError::WrongDevice`] when the stream is not of the
/// primary context of `device`.
pub fn from_cudarc_stream(device: &dyn Device, stream: Arc<cudarc::driver::CudaStream>) -> Result<Stream, HalError> {
    let context = Gpu::of(device)?.context();
    Ok(CudaStream::from_cudarc(context, stream)?.into_stream())
}
