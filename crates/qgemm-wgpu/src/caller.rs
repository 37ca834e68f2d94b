//! Devices and buffers that the caller made: an engine that uses wgpu itself shares them with qgemm.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use qgemm_hal::{Buffer, Device, DeviceId, DeviceKind, HalError};
use wgpu::{BufferUsages, Features};

use crate::adapter::{CooperativeMatrices, adapter_of, info, missing};
use crate::device::WgpuDevice;
use crate::memory::WgpuBuffer;
use crate::shared::{Owner, Shared};

/// Ordinal of the first caller's device: those below are adapters.
const FIRST_ORDINAL: u32 = 1000;
static NEXT_ORDINAL: AtomicU32 = AtomicU32::new(FIRST_ORDINAL);

/// qgemm on a device that the caller opened, called `wgpu:1000` and up.
///
/// It must have been opened with [`Features::IMMEDIATES`](wgpu::Features::IMMEDIATES), a `max_immediate_size` of 96
/// and nine `max_storage_buffers_per_shader_stage`. Subgroups and timestamps (inside encoders) are used where they were
/// asked for, too; limits are those that the device was opened with, so ask for what the adapter has. With the cargo
/// feature `experimental-cooperative-matrix`, so are matrix instructions, which take `EXPERIMENTAL_COOPERATIVE_MATRIX`,
/// `SHADER_F16` and `SUBGROUP`.
///
/// Every launch is submitted to `queue` at once, so work that the caller submits afterwards sees its results. The
/// device's callbacks stay the caller's: where [`set_device_lost_callback`](wgpu::Device::set_device_lost_callback)
/// reports a loss, tell qgemm with [`report_loss`].
///
/// # Errors
/// [`HalError::Unsupported`], naming the feature or limit to ask for, or a driver error.
pub fn from_device(device: &wgpu::Device, queue: &wgpu::Queue) -> Result<Arc<dyn Device>, HalError> {
    let ordinal = NEXT_ORDINAL.fetch_add(1, Ordering::Relaxed);
    let id = DeviceId { kind: DeviceKind::Wgpu, ordinal };
    if let Some(lack) = missing(device.features(), &device.limits()) {
        return Err(HalError::Unsupported { device: id, what: "the caller's device".into(), why: lack.advice.into() });
    }
    let features = device.features();
    let matrices = match features.contains(Features::EXPERIMENTAL_COOPERATIVE_MATRIX) {
        true => adapter_of(device).and_then(|adapter| CooperativeMatrices::of(&adapter, features)),
        false => None,
    };
    let info = info(id, device.adapter_info(), &device.limits(), features, matrices);
    let shared = Shared::new(id, device.clone(), queue.clone(), matrices, Owner::Caller)?;
    Ok(Arc::new(WgpuDevice::new(info, shared)))
}

/// Makes every later call on a [caller's device](from_device) an error that says `reason`: for the caller's own
/// callback.
///
/// # Errors
/// [`HalError::WrongDevice`] when `device` is none of this backend.
pub fn report_loss(device: &dyn Device, reason: &str) -> Result<(), HalError> {
    shared_of(device)?.lose(reason.to_owned());
    Ok(())
}

/// A buffer of the caller's as one of qgemm's, without a copy: all of it, and for as long as either is used. What it holds is not known,
/// so plans take it for operands of any element type; [`Buffer::typed`] states one, which plans then check.
///
/// It needs [`BufferUsages::STORAGE`] and a size that is a multiple of 4; to upload to it, fill it or download from it,
/// the usages for copies, too. Alignment is that of [views](Buffer::slice) within the buffer. wgpu orders the work of
/// both sides that was submitted to the queue.
///
/// # Errors
/// [`HalError::Unsupported`] saying what to change, or [`HalError::WrongDevice`] when `device` is none of this backend
/// or `buffer` is another device's of the same [`wgpu::Instance`]. wgpu cannot tell objects of several instances apart.
pub fn wrap_buffer(device: &dyn Device, buffer: &wgpu::Buffer) -> Result<Buffer, HalError> {
    let shared = shared_of(device)?;
    let refused = |what: &str, why: String| HalError::Unsupported { device: shared.id, what: what.into(), why };
    if !buffer.usage().contains(BufferUsages::STORAGE) {
        let why = format!("its usages are {:?}: add BufferUsages::STORAGE", buffer.usage());
        return Err(refused("wrapping a buffer that shaders cannot read", why));
    }
    let len = usize::try_from(buffer.size()).ok().filter(|&len| len > 0 && len.is_multiple_of(4));
    let Some(len) = len else {
        let why = format!("it has {} bytes: make it a multiple of 4, and not 0", buffer.size());
        return Err(refused("wrapping a buffer that is no whole words", why));
    };
    if !shared.owns(buffer)? {
        return Err(HalError::WrongDevice { device: shared.id, what: "the buffer to wrap" });
    }
    Ok(WgpuBuffer::wrap(shared, buffer.clone(), len))
}

/// What the objects of `device`, which must be of this backend, share.
pub(crate) fn shared_of(device: &dyn Device) -> Result<&Arc<Shared>, HalError> {
    match device.as_any().downcast_ref::<WgpuDevice>() {
        Some(device) => Ok(&device.shared),
        None => Err(HalError::WrongDevice { device: device.info().id, what: "a device that is not of wgpu" }),
    }
}
