//! Adapters: discovery, capabilities, opening.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use qgemm_hal::{Device, DeviceId, DeviceInfo, DeviceKind, Feature, HalError, Math};
use wgpu::{
    AdapterInfo, Backends, CooperativeMatrixProperties, CooperativeScalarType, DeviceType, ExperimentalFeatures,
    Features, Limits,
};

use crate::device::WgpuDevice;
use crate::families::{PARAMS_BYTES, STORAGE_BUFFERS};
use crate::shared::{Owner, Shared};

/// All usable adapters, real GPUs first.
///
/// Software adapters (lavapipe, WARP) have
/// [`Feature::SoftwareAdapter`]. wgpu does not report memory size (given as 0),
/// units, bandwidth or rates. These come from a short list of
/// known GPUs, or are typical values for the adapter's kind: good
/// enough to rank kernels, not to predict times.
///
/// # Errors
/// [`HalError::NoDevice`] when there is no usable adapter,
/// for example without a driver.
pub fn devices() -> Result<Vec<DeviceInfo>, HalError> {
    Ok(usable_adapters()?.iter().zip(0..).map(|(adapter, ordinal)| info_of(adapter, ordinal)).collect())
}

/// Opens adapter `ordinal` of [`devices`]. An adapter that is already
/// open returns the same device, so that all users share its
/// memory; a lost one is opened again.
///
/// # Errors
/// [`HalError::NoDevice`] when there are fewer adapters, or a driver error.
pub fn open(ordinal: u32) -> Result<Arc<dyn Device>, HalError> {
    static OPENED: Mutex<BTreeMap<u32, Weak<WgpuDevice>>> = Mutex::new(BTreeMap::new());
    // Held while opening, so that concurrent callers get the same device.
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = opened.get(&ordinal).and_then(Weak::upgrade).filter(|device| !device.shared.is_broken());
    let device = match known {
        Some(device) => device,
        None => open_anew(ordinal)?,
    };
    opened.insert(ordinal, Arc::downgrade(&device));
    Ok(device)
}

/// Opens a new device on an adapter.
fn open_anew(ordinal: u32) -> Result<Arc<WgpuDevice>, HalError> {
    let mut adapters = usable_adapters()?;
    let count = adapters.len();
    let id = DeviceId { kind: DeviceKind::Wgpu, ordinal };
    if ordinal as usize >= count {
        return Err(HalError::NoDevice { device: id.to_string(), why: format!("there are {count} wgpu adapters") });
    }
    let adapter = adapters.swap_remove(ordinal as usize);
    let timestamps = Features::TIMESTAMP_QUERY | Features::TIMESTAMP_QUERY_INSIDE_ENCODERS;
    let mut required_features = Features::IMMEDIATES | (adapter.features() & Features::SUBGROUP);
    let mut experimental_features = ExperimentalFeatures::disabled();
    if adapter.features().contains(timestamps) {
        required_features |= timestamps;
    }
    let matrices = CooperativeMatrices::of(&adapter, adapter.features());
    if matrices.is_some() {
        required_features |= COOPERATIVE_FEATURES;
        // SAFETY: this acknowledges that wgpu's experimental code may have
        // undefined behaviour that safe calls reach. Whoever builds with the cargo
        // feature of this name, which is off by default, has accepted
        // that. Only `gemm_matrix` reaches it. Its shader is ours: the matrices
        // are within arrays in workgroup memory at offsets that are constants
        // of the tile, and are loaded and stored in control flow
        // that is uniform across all invocations.
        experimental_features = unsafe { ExperimentalFeatures::enabled() };
    }
    let request = adapter.request_device(&wgpu::DeviceDescriptor {
        label: Some("qgemm"),
        required_features,
        required_limits: adapter.limits(),
        experimental_features,
        ..Default::default()
    });
    let (device, queue) = pollster::block_on(request).map_err(|e| HalError::Driver {
        device: id,
        call: "opening the adapter",
        message: e.to_string(),
    })?;
    let shared = Shared::new(id, device, queue, matrices, Owner::Backend)?;
    Ok(Arc::new(WgpuDevice::new(info_of(&adapter, ordinal), shared)))
}

/// A new device on the first adapter, which the test may
/// lose. Without an adapter the test is reported as skipped.
#[cfg(test)]
pub(crate) fn open_for_test() -> Option<Arc<dyn Device>> {
    match open_anew(0) {
        Ok(device) => Some(device),
        Err(HalError::NoDevice { device, why }) => {
            qgemm_testkit::skipped(&format!("unit tests on {device}"), &why);
            None
        }
        Err(error) => panic!("an adapter is there, but does not open: {error}"),
    }
}

/// The adapter of a caller-owned device, for properties that
/// the device does not report.
pub(crate) fn adapter_of(device: &wgpu::Device) -> Option<wgpu::Adapter> {
    let about = device.adapter_info();
    usable_adapters().ok()?.into_iter().find(|adapter| adapter.get_info() == about)
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
        .filter(|adapter| match missing(adapter.features(), &adapter.limits()) {
            None => true,
            Some(lack) => {
                refusals.push(format!("{} lacks {}", adapter.get_info().name, lack.what));
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

/// Workgroup size that every adapter must support.
const WORKGROUP: u32 = 256;

/// wgpu features that [cooperative matrices](CooperativeMatrices)
/// require at device creation.
const COOPERATIVE_FEATURES: Features =
    Features::EXPERIMENTAL_COOPERATIVE_MATRIX.union(Features::SHADER_F16).union(Features::SUBGROUP);

/// Cooperative matrices of a device: f16 operands, f32 sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CooperativeMatrices {
    /// Rows and columns of each of the three
    /// matrices: 16 or 8.
    pub side: u32,
    /// Invocations of a subgroup.
    pub lanes: u32,
}

impl CooperativeMatrices {
    /// Largest subgroup that tiles support.
    pub const MAX_LANES: u32 = 32;

    /// Cooperative matrices of a device with `features`, opened on
    /// `adapter`. `None` without the cargo feature, without such a
    /// shape, or when the subgroup size varies, because the work of
    /// a workgroup is divided by it.
    pub fn of(adapter: &wgpu::Adapter, features: Features) -> Option<Self> {
        let about = adapter.get_info();
        let lanes = about.subgroup_min_size;
        let usable = cfg!(feature = "experimental-cooperative-matrix")
            && features.contains(COOPERATIVE_FEATURES)
            && lanes == about.subgroup_max_size
            && [8, 16, Self::MAX_LANES].contains(&lanes);
        if !usable {
            return None;
        }
        let offered = adapter.cooperative_matrix_properties();
        let types = (CooperativeScalarType::F16, CooperativeScalarType::F32);
        let has = |side: &u32| {
            let of_side = |shape: &CooperativeMatrixProperties| {
                [shape.m_size, shape.n_size, shape.k_size] == [*side; 3] && (shape.ab_type, shape.cr_type) == types
            };
            offered.iter().any(of_side)
        };
        [16, 8].into_iter().find(has).map(|side| Self { side, lanes })
    }
}

/// A missing requirement of the kernels.
pub(crate) struct Lack {
    /// The requirement, as half a sentence.
    pub what: &'static str,
    /// Features and limits to request when opening a device.
    pub advice: &'static str,
}

/// The first missing requirement, if any.
pub(crate) fn missing(features: Features, limits: &Limits) -> Option<Lack> {
    if !features.contains(Features::IMMEDIATES) || limits.max_immediate_size < PARAMS_BYTES {
        Some(Lack {
            what: "immediates of 96 bytes",
            advice: "request Features::IMMEDIATES and Limits::max_immediate_size of at least 96",
        })
    } else if limits.max_storage_buffers_per_shader_stage < STORAGE_BUFFERS {
        Some(Lack {
            what: "nine storage buffers in a shader",
            advice: "request Limits::max_storage_buffers_per_shader_stage of at least 9",
        })
    } else if limits.max_compute_invocations_per_workgroup.min(limits.max_compute_workgroup_size_x) < WORKGROUP {
        Some(Lack {
            what: "workgroups of 256 invocations",
            advice: "request 256 of Limits::max_compute_invocations_per_workgroup and max_compute_workgroup_size_x",
        })
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

/// Typical figures of a device.
#[derive(Clone, Copy)]
struct Typical {
    units: u32,
    bandwidth: f64,
    macs: f64,
    launch_seconds: f64,
    cache_bytes: u64,
}

/// Known GPUs by a part of their name: units, bandwidth, f32
/// multiply-adds per second and last-level cache, from the vendors' data
/// sheets (the bandwidth of an H200 is measured).
const KNOWN: &[(&str, u32, f64, f64, u64)] = &[
    ("H200", 132, 4.47e12, 3.3e13, 60 << 20),
    ("H100", 132, 3.35e12, 3.3e13, 50 << 20),
    ("A100", 108, 1.55e12, 9.7e12, 40 << 20),
    ("V100", 80, 9.0e11, 7.8e12, 6 << 20),
    ("Tesla T4", 40, 3.2e11, 4.0e12, 4 << 20),
    ("RTX 5090", 170, 1.79e12, 5.2e13, 96 << 20),
    ("RTX 4090", 128, 1.0e12, 4.1e13, 72 << 20),
    ("RTX 3090", 82, 9.3e11, 1.78e13, 6 << 20),
    ("RX 7900 XTX", 96, 9.6e11, 1.5e13, 96 << 20),
];

/// Latency of a dispatch on a GPU, in seconds.
const LAUNCH_SECONDS: f64 = 1e-5;

/// Rate of INT8 multiply-adds relative to f32. GPUs with a four-way
/// dot product issue it at half or full rate.
const DOT_RATE: f64 = 2.0;

/// Rate of matrix instructions relative to f32, from the
/// vendors' data sheets: from 2 (RTX 4090) and 4 (RX
/// 7900 XTX) to 16 (A100, H100).
const MATRIX_RATE: f64 = 8.0;

fn typical(about: &AdapterInfo) -> Typical {
    if let Some(&(_, units, bandwidth, macs, cache_bytes)) = KNOWN.iter().find(|known| about.name.contains(known.0)) {
        return Typical { units, bandwidth, macs, launch_seconds: LAUNCH_SECONDS, cache_bytes };
    }
    let launch_seconds = LAUNCH_SECONDS;
    match about.device_type {
        DeviceType::DiscreteGpu | DeviceType::VirtualGpu => {
            Typical { units: 40, bandwidth: 4e11, macs: 5e12, launch_seconds, cache_bytes: 4 << 20 }
        }
        DeviceType::IntegratedGpu | DeviceType::Other => {
            Typical { units: 8, bandwidth: 6e10, macs: 5e11, launch_seconds, cache_bytes: 1 << 20 }
        }
        DeviceType::Cpu => {
            let units = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
            Typical { units, bandwidth: 1e10, macs: 2e9 * f64::from(units), launch_seconds: 1e-3, cache_bytes: 1 << 20 }
        }
    }
}

fn info_of(adapter: &wgpu::Adapter, ordinal: u32) -> DeviceInfo {
    let id = DeviceId { kind: DeviceKind::Wgpu, ordinal };
    let matrices = CooperativeMatrices::of(adapter, adapter.features());
    info(id, adapter.get_info(), &adapter.limits(), adapter.features(), matrices)
}

/// Device info for these limits and features. `matrices` are the
/// supported cooperative matrices.
pub(crate) fn info(
    id: DeviceId,
    about: AdapterInfo,
    limits: &Limits,
    has: Features,
    matrices: Option<CooperativeMatrices>,
) -> DeviceInfo {
    let typical = typical(&about);
    let invocations = limits.max_compute_invocations_per_workgroup.min(limits.max_compute_workgroup_size_x);
    let software = about.device_type == DeviceType::Cpu;
    let features = [
        // Software adapters run invocations one by one, and would
        // have to compile more shaders.
        (Feature::WideWorkgroups, invocations >= 2 * WORKGROUP && !software),
        (Feature::SoftwareAdapter, software),
        (Feature::Integrated, about.device_type == DeviceType::IntegratedGpu),
        (Feature::F16, has.contains(Features::SHADER_F16)),
        (Feature::CooperativeMatrices, matrices.is_some()),
        (Feature::Subgroups, has.contains(Features::SUBGROUP)),
        (Feature::Timestamps, has.contains(Features::TIMESTAMP_QUERY | Features::TIMESTAMP_QUERY_INSIDE_ENCODERS)),
    ];
    let mut rates = vec![(Math::FmaF32, typical.macs), (Math::DotI8, typical.macs * DOT_RATE)];
    if matrices.is_some() {
        rates.push((Math::TensorF16, typical.macs * MATRIX_RATE));
    }
    DeviceInfo {
        id,
        name: about.name,
        arch: about.backend.to_str().to_owned(),
        variant: None,
        driver: format!("{} {}", about.driver, about.driver_info).trim().to_owned(),
        units: typical.units,
        memory_bytes: 0,
        bandwidth: typical.bandwidth,
        cache_bytes: typical.cache_bytes,
        shared_bytes: limits.max_compute_workgroup_storage_size,
        // Kernels index bytes in 32 bits.
        max_buffer_bytes: limits.max_storage_buffer_binding_size.min(u32::MAX.into()),
        rates,
        launch_seconds: typical.launch_seconds,
        features: features.into_iter().filter_map(|(feature, has)| has.then_some(feature)).collect::<BTreeSet<_>>(),
    }
}
