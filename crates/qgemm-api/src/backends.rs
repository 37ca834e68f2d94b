//! Backends of this build, and device selection.

use std::sync::Arc;

use qgemm_hal::{Device, DeviceId, DeviceInfo, DeviceKind, HalError};

use crate::error::Error;

/// Device of a backend, or the reason why the backend has none.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum DeviceListing {
    /// Device that [`Context::open`](crate::Context::open) opens by its `id`.
    Found(DeviceInfo),
    /// Backend without a device.
    Absent {
        /// Backend.
        kind: DeviceKind,
        /// Reason.
        why: String,
    },
}

/// All devices of all backends, best first, and the reason for each backend without
/// one. The no-op device is not listed.
pub fn devices() -> Vec<DeviceListing> {
    let absent = |kind, why| vec![DeviceListing::Absent { kind, why }];
    let built = BACKENDS.iter().filter(|b| b.kind != DeviceKind::Noop).flat_map(|backend| match (backend.devices)() {
        Ok(found) if !found.is_empty() => found.into_iter().map(DeviceListing::Found).collect(),
        Ok(_) => absent(backend.kind, "no device was found".into()),
        Err(error) => absent(backend.kind, error.to_string()),
    });
    let left_out = LEFT_OUT.iter().flat_map(|&kind| absent(kind, not_built(kind).to_string()));
    built.chain(left_out).collect()
}

/// Device for [`Context::open`](crate::Context::open), from a name or a [`DeviceId`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum DeviceChoice<'a> {
    /// Name: `cpu`, `cuda:0`, `auto`.
    Name(&'a str),
    /// Device id.
    Id(DeviceId),
}

impl<'a, S: AsRef<str> + ?Sized> From<&'a S> for DeviceChoice<'a> {
    fn from(name: &'a S) -> Self {
        Self::Name(name.as_ref())
    }
}

impl From<DeviceId> for DeviceChoice<'_> {
    fn from(id: DeviceId) -> Self {
        Self::Id(id)
    }
}

/// Opens the chosen device, or the best one for `auto`.
pub(crate) fn open(choice: DeviceChoice<'_>) -> Result<Arc<dyn Device>, Error> {
    let id = match choice {
        DeviceChoice::Name(name) if name.eq_ignore_ascii_case("auto") => return open_best(),
        DeviceChoice::Name(name) => name.parse().map_err(|_| unknown(name))?,
        DeviceChoice::Id(id) => id,
    };
    let _span = tracing::info_span!("open", device = %id).entered();
    match BACKENDS.iter().find(|backend| backend.kind == id.kind) {
        Some(backend) => Ok((backend.open)(id.ordinal)?),
        None => Err(not_built(id.kind)),
    }
}

/// Opens the first device, in the order of [`BACKENDS`], that `auto` accepts.
fn open_best() -> Result<Arc<dyn Device>, Error> {
    let mut reasons = Vec::new();
    for backend in BACKENDS {
        let why = match (backend.devices)() {
            Ok(found) => match found.iter().find(|info| (backend.eligible_for_auto)(info)) {
                Some(info) => {
                    tracing::info!(device = %info.id, name = info.name, "chosen");
                    return Ok((backend.open)(info.id.ordinal)?);
                }
                None => "no suitable device".to_owned(),
            },
            Err(HalError::NoDevice { why, .. }) => why,
            // A device that exists but fails is an error for the user, not a reason to fall back.
            Err(error) => return Err(error.into()),
        };
        tracing::info!(backend = backend.kind.name(), why, "passed over");
        reasons.push(format!("{}: {why}", backend.kind.name()));
    }
    Err(HalError::NoDevice { device: "auto".into(), why: reasons.join("; ") }.into())
}

fn unknown(name: &str) -> Error {
    let example = |backend: &Backend| match backend.kind {
        DeviceKind::Cpu => Some("cpu".to_owned()),
        DeviceKind::Emu => Some("emu:sm75".to_owned()),
        DeviceKind::Noop => None,
        kind => Some(format!("{}:0", kind.name())),
    };
    Error::UnknownDevice { name: name.to_owned(), kinds: BACKENDS.iter().filter_map(example).collect() }
}

fn not_built(kind: DeviceKind) -> Error {
    Error::BackendNotBuilt { kind, feature: kind.name() }
}

/// Backend, as data.
struct Backend {
    kind: DeviceKind,
    devices: fn() -> Result<Vec<DeviceInfo>, HalError>,
    open: fn(ordinal: u32) -> Result<Arc<dyn Device>, HalError>,
    /// Whether `auto` may choose this device.
    eligible_for_auto: fn(&DeviceInfo) -> bool,
}

/// Backends, best first.
const BACKENDS: &[Backend] = &[
    #[cfg(feature = "cuda")]
    Backend {
        kind: DeviceKind::Cuda,
        devices: qgemm_cuda::devices,
        open: qgemm_cuda::open,
        eligible_for_auto: |_| true,
    },
    #[cfg(feature = "wgpu")]
    Backend {
        kind: DeviceKind::Wgpu,
        devices: qgemm_wgpu::devices,
        open: qgemm_wgpu::open,
        // The CPU backend is faster than an emulated GPU on the same CPU.
        eligible_for_auto: |info| !info.features.contains(&qgemm_hal::Feature::SoftwareAdapter),
    },
    Backend { kind: DeviceKind::Cpu, devices: qgemm_cpu::devices, open: qgemm_cpu::open, eligible_for_auto: |_| true },
    #[cfg(feature = "emu")]
    Backend { kind: DeviceKind::Emu, devices: qgemm_emu::devices, open: qgemm_emu::open, eligible_for_auto: |_| false },
    Backend {
        kind: DeviceKind::Noop,
        devices: || Ok(qgemm_hal::noop::devices()),
        open: |ordinal| qgemm_hal::noop::open(DeviceId { kind: DeviceKind::Noop, ordinal }),
        eligible_for_auto: |_| false,
    },
];

/// Backends that are not compiled in.
const LEFT_OUT: &[DeviceKind] = &[
    #[cfg(not(feature = "cuda"))]
    DeviceKind::Cuda,
    #[cfg(not(feature = "wgpu"))]
    DeviceKind::Wgpu,
    #[cfg(not(feature = "emu"))]
    DeviceKind::Emu,
];
