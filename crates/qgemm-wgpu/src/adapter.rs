//! Finding adapters, telling what they can do, and opening them.

use std::collections::BTreeSet;
use std::sync::Arc;

use qgemm_hal::{Device, DeviceId, DeviceInfo, DeviceKind, HalError, Math};
use wgpu::{Backends, DeviceType, Features};

use crate::device::WgpuDevice;
use crate::families::{PARAMS_BYTES, STORAGE_BUFFERS};

/// Every adapter that qgemm can use, real GPUs first.
///
/// A software adapter (lavapipe, WARP) has `"software-adapter"` among its features. wgpu tells neither the size of
/// memory (given as 0) nor units, bandwidth and rates: those are typical of the adapter's kind, good enough to
/// rank one kernel against another, not to predict times.
///
/// # Errors
/// [`HalError::NoDevice`] where there is no adapter, because no driver is installed or none suits.
pub fn devices() -> Result<Vec<DeviceInfo>, HalError> {
    Ok(usable_adapters()?.iter().zip(0..).map(|(adapter, ordinal)| info(adapter, ordinal)).collect())
}

/// Opens adapter `ordinal` of [`devices`].
///
/// # Errors
/// [`HalError::NoDevice`] where there are not that many, or a driver error.
pub fn open(ordinal: u32) -> Result<Arc<dyn Device>, HalError> {
    let mut adapters = usable_adapters()?;
    let count = adapters.len();
    let id = DeviceId { kind: DeviceKind::Wgpu, ordinal };
    if ordinal as usize >= count {
        return Err(HalError::NoDevice { device: id.to_string(), why: format!("there are {count} wgpu adapters") });
    }
    let adapter = adapters.swap_remove(ordinal as usize);
    let timestamps = Features::TIMESTAMP_QUERY | Features::TIMESTAMP_QUERY_INSIDE_ENCODERS;
    let mut required_features = Features::IMMEDIATES;
    if adapter.features().contains(timestamps) {
        required_features |= timestamps;
    }
    let request = adapter.request_device(&wgpu::DeviceDescriptor {
        label: Some("qgemm"),
        required_features,
        required_limits: adapter.limits(),
        ..Default::default()
    });
    let (device, queue) = pollster::block_on(request).map_err(|e| HalError::Driver {
        device: id,
        call: "opening the adapter",
        message: e.to_string(),
    })?;
    Ok(Arc::new(WgpuDevice::new(info(&adapter, ordinal), device, queue)?))
}

fn usable_adapters() -> Result<Vec<wgpu::Adapter>, HalError> {
    let backends = Backends::VULKAN | Backends::METAL | Backends::DX12;
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = backends;
    let instance = wgpu::Instance::new(descriptor);
    let found = pollster::block_on(instance.enumerate_adapters(backends));
    if found.is_empty() {
        return Err(no_device("no Vulkan, Metal or Direct3D 12 driver with an adapter was found".into()));
    }
    let mut refusals = Vec::new();
    let mut usable: Vec<_> = found
        .into_iter()
        .filter(|adapter| match missing(adapter) {
            None => true,
            Some(what) => {
                refusals.push(format!("{} lacks {what}", adapter.get_info().name));
                false
            }
        })
        .collect();
    if usable.is_empty() {
        return Err(no_device(refusals.join("; ")));
    }
    usable.sort_by_key(|adapter| preference(adapter.get_info().device_type));
    Ok(usable)
}

fn no_device(why: String) -> HalError {
    HalError::NoDevice { device: DeviceKind::Wgpu.name().into(), why }
}

/// What an adapter lacks for our kernels.
fn missing(adapter: &wgpu::Adapter) -> Option<&'static str> {
    let limits = adapter.limits();
    if !adapter.features().contains(Features::IMMEDIATES) || limits.max_immediate_size < PARAMS_BYTES {
        Some("immediates of 124 bytes")
    } else if limits.max_storage_buffers_per_shader_stage < STORAGE_BUFFERS {
        Some("nine storage buffers in a shader")
    } else {
        None
    }
}

fn preference(kind: DeviceType) -> u32 {
    match kind {
        DeviceType::DiscreteGpu => 0,
        DeviceType::IntegratedGpu => 1,
        DeviceType::VirtualGpu => 2,
        DeviceType::Other => 3,
        DeviceType::Cpu => 4,
    }
}

/// Figures typical of a kind of adapter.
struct Typical {
    units: u32,
    bandwidth: f64,
    macs: f64,
    launch_seconds: f64,
    cache_bytes: u64,
}

fn typical(kind: DeviceType) -> Typical {
    match kind {
        DeviceType::DiscreteGpu | DeviceType::VirtualGpu => {
            Typical { units: 40, bandwidth: 4e11, macs: 5e12, launch_seconds: 1e-5, cache_bytes: 4 << 20 }
        }
        DeviceType::IntegratedGpu | DeviceType::Other => {
            Typical { units: 8, bandwidth: 6e10, macs: 5e11, launch_seconds: 1e-5, cache_bytes: 1 << 20 }
        }
        DeviceType::Cpu => {
            let units = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
            Typical { units, bandwidth: 1e10, macs: 2e9 * f64::from(units), launch_seconds: 1e-3, cache_bytes: 1 << 20 }
        }
    }
}

fn info(adapter: &wgpu::Adapter, ordinal: u32) -> DeviceInfo {
    let (about, limits, has) = (adapter.get_info(), adapter.limits(), adapter.features());
    let typical = typical(about.device_type);
    let features = [
        ("software-adapter", about.device_type == DeviceType::Cpu),
        ("integrated", about.device_type == DeviceType::IntegratedGpu),
        ("f16", has.contains(Features::SHADER_F16)),
        ("subgroups", has.contains(Features::SUBGROUP)),
        ("timestamps", has.contains(Features::TIMESTAMP_QUERY | Features::TIMESTAMP_QUERY_INSIDE_ENCODERS)),
    ];
    DeviceInfo {
        id: DeviceId { kind: DeviceKind::Wgpu, ordinal },
        name: about.name,
        arch: about.backend.to_str().to_owned(),
        variant: None,
        units: typical.units,
        memory_bytes: 0,
        bandwidth: typical.bandwidth,
        cache_bytes: typical.cache_bytes,
        shared_bytes: limits.max_compute_workgroup_storage_size,
        max_buffer_bytes: limits.max_storage_buffer_binding_size,
        rates: vec![(Math::FmaF32, typical.macs)],
        launch_seconds: typical.launch_seconds,
        features: features.into_iter().filter_map(|(name, has)| has.then_some(name)).collect::<BTreeSet<_>>(),
    }
}
