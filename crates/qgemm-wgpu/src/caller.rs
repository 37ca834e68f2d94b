//! Caller-owned devices and buffers, for engines that use wgpu
//! themselves and share them with qgemm.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use qgemm_hal::{Buffer, Device, DeviceId, DeviceKind, HalError};
use wgpu::{BufferUsages, Features};

use crate::adapter::{CooperativeMatrices, adapter_of, info, missing};
use crate::device::WgpuDevice;
use crate::memory::WgpuBuffer;
use crate::shared::{Owner, Shared};

/// Ordinal of the first caller-owned device; smaller ordinals are adapters.
const FIRST_ORDINAL: u32 = 1000;
static NEXT_ORDINAL: AtomicU32 = AtomicU32::new(FIRST_ORDINAL);

/// qgemm on a caller-owned device, named `wgpu:1000` and up.
///
/// It must have been opened with
/// [`Features::IMMEDIATES`](wgpu::Features::IMMEDIATES), a
/// `max_immediate_size` of 96 and nine
/// `max_storage_buffers_per_shader_stage`. Subgroups and timestamps (inside
/// encoders) are used if they were requested. Limits are those of
/// the device, so request what the adapter supports. Matrix instructions
/// need the cargo feature `experimental-cooperative-matrix` and the wgpu
/// features `EXPERIMENTAL_COOPERATIVE_MATRIX`, `SHADER_F16` and `SUBGROUP`.
///
/// Every launch is submitted to `queue` immediately, so that later
/// submissions of the caller see its results. The device's callbacks stay
/// the caller's: when
/// [`set_device_lost_callback`](wgpu::Device::set_device_lost_callback)
/// reports a loss, tell qgemm with [`report_loss`].
///
/// # Errors
/// [`HalError::Unsupported`], naming the feature or limit to
/// request, or a driver error.
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

/// Makes every later call on a [caller-owned device](from_device) fail with
/// `reason`. To be called from the caller's device-lost callback.
///
/// # Errors
/// [`HalError::WrongDevice`] when `device` belongs to another backend.
pub fn report_loss(device: &dyn Device, reason: &str) -> Result<(), HalError> {
    shared_of(device)?.lose(reason.to_owned());
    Ok(())
}

/// Wraps a whole caller-owned buffer without a copy, for as
/// long as either side uses it. The element type is unknown: plans accept
/// the buffer for any operand, unless [`Buffer::typed`] states a type.
///
/// It needs [`BufferUsages::STORAGE`] and a size that is a
/// multiple of 4; for upload, fill or download also the copy
/// usages. The alignment is that of [views](Buffer::slice)
/// within the buffer. wgpu orders the work of both sides that
/// was submitted to the queue.
///
/// # Errors
/// [`HalError::Unsupported`] saying what to change, or
/// [`HalError::WrongDevice`] when `device` belongs to another backend, or
/// `buffer` to another device of the same [`wgpu::Instance`]. wgpu cannot
/// distinguish objects of several instances.
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

/// Shared state of `device`, which must belong to this backend.
pub(crate) fn shared_of(device: &dyn Device) -> Result<&Arc<Shared>, HalError> {
    match device.as_any().downcast_ref::<WgpuDevice>() {
        Some(device) => Ok(&device.shared),
        None => Err(HalError::WrongDevice { device: device.info().id, what: "a device that is not of wgpu" }),
    }
}
