//! The backends this build has, and the choice between them.

use std::sync::Arc;

use qgemm_hal::{Device, DeviceId, DeviceInfo, DeviceKind, HalError};

use crate::error::Error;

/// What [`devices`] found of one device, or why a backend has none.
#[derive(Clone, Debug)]
pub enum DeviceListing {
    /// A device that [`Context::open`](crate::Context::open) opens by its `id`.
    Found(DeviceInfo),
    /// A backend without a device.
    Absent {
        /// The backend.
        kind: DeviceKind,
        /// What is missing.
        why: String,
    },
}

/// Every device of every backend, best first.
pub fn devices() -> Vec<DeviceListing> {
    BACKENDS
        .iter()
        .flat_map(|backend| match (backend.devices)() {
            Ok(found) if !found.is_empty() => found.into_iter().map(DeviceListing::Found).collect(),
            Ok(_) => vec![DeviceListing::Absent { kind: backend.kind, why: "none found".into() }],
            Err(error) => vec![DeviceListing::Absent { kind: backend.kind, why: error.to_string() }],
        })
        .collect()
}

/// Opens a device by name or, for `auto`, the best there is.
pub(crate) fn open(name: &str) -> Result<Arc<dyn Device>, Error> {
    let _span = tracing::info_span!("open", device = name).entered();
    if name.eq_ignore_ascii_case("auto") {
        return open_best();
    }
    let id: DeviceId = name.parse()?;
    let backend = BACKENDS.iter().find(|b| b.kind == id.kind).ok_or_else(|| no_device(name))?;
    (backend.open)(id)
}

/// The first device, in the order of [`BACKENDS`], that `auto` accepts.
fn open_best() -> Result<Arc<dyn Device>, Error> {
    for backend in BACKENDS {
        match (backend.devices)() {
            Ok(found) => {
                if let Some(info) = found.iter().find(|info| (backend.accept)(info)) {
                    tracing::info!(device = %info.id, name = info.name, "chosen");
                    return (backend.open)(info.id);
                }
                tracing::info!(backend = backend.kind.name(), "no suitable device");
            }
            Err(error) => tracing::info!(backend = backend.kind.name(), %error, "passed over"),
        }
    }
    Err(no_device("auto"))
}

fn no_device(name: &str) -> Error {
    HalError::NoDevice { device: name.to_owned(), why: "no backend has one".into() }.into()
}

/// A backend as data.
struct Backend {
    kind: DeviceKind,
    devices: fn() -> Result<Vec<DeviceInfo>, Error>,
    open: fn(DeviceId) -> Result<Arc<dyn Device>, Error>,
    /// Whether `auto` may choose this device.
    accept: fn(&DeviceInfo) -> bool,
}

/// Best first.
const BACKENDS: &[Backend] = &[Backend {
    kind: DeviceKind::Noop,
    devices: || Ok(qgemm_hal::noop::devices()),
    open: |id| Ok(qgemm_hal::noop::open(id)?),
    accept: |_| false,
}];
