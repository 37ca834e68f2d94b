//! CUDA driver access: presence, devices, and the
//! shared context of a device.

use std::fmt;
use std::sync::{Arc, OnceLock};

use cudarc::driver::{CudaContext, DriverError, result, sys};
use libloading::Library;
use qgemm_hal::{DeviceId, DeviceKind, HalError};

/// Names of the driver's library. cudarc tries the same names but
/// panics when none exists, so they are tried here first.
const DRIVER_LIBRARIES: [&str; 3] = ["libcuda.so.1", "libcuda.so", "nvcuda.dll"];

/// Oldest CUDA version of a supported driver. Every driver function
/// that this crate calls through cudarc exists since then, and
/// cudarc panics when one is missing.
const OLDEST_CUDA: i32 = 12_000;

/// The driver's library. It stays loaded for the life of the process,
/// because cudarc keeps function pointers into it.
static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();

/// Initialises the driver once per process.
///
/// # Errors
/// [`HalError::NoDevice`] when there is no driver, it does not start, or
/// it is older than CUDA 12.0.
pub(crate) fn init() -> Result<(), HalError> {
    library().map(drop)
}

fn library() -> Result<&'static Library, HalError> {
    let started = LIBRARY.get_or_init(start).as_ref();
    started.map_err(|why| HalError::NoDevice { device: "cuda".into(), why: why.clone() })
}

fn start() -> Result<Library, String> {
    let found = DRIVER_LIBRARIES.iter().find_map(|name| {
        // SAFETY: loading the NVIDIA driver runs its initialisers,
        // which have no preconditions.
        unsafe { Library::new(*name) }.ok()
    });
    let Some(library) = found else {
        return Err(format!("no NVIDIA driver is installed ({} not found)", DRIVER_LIBRARIES[0]));
    };
    let started = result::init().and_then(|()| cuda_version());
    let version = started.map_err(|e| format!("the NVIDIA driver does not start: {}", describe(e)))?;
    check_version(version)?;
    Ok(library)
}

/// Refuses drivers older than [`OLDEST_CUDA`].
fn check_version(version: i32) -> Result<(), String> {
    let [expected, got] = [OLDEST_CUDA, version].map(dotted);
    let old = || format!("the NVIDIA driver supports CUDA {got}: expected {expected} or newer");
    if version < OLDEST_CUDA { Err(old()) } else { Ok(()) }
}

/// Newest CUDA version that the driver supports: 12090.
fn cuda_version() -> Result<i32, DriverError> {
    let mut version = 0;
    // SAFETY: the driver writes one integer, which lives through the call.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
    Ok(version)
}

fn dotted(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// Newest CUDA version that the driver supports: `12.9`; empty when
/// unknown. Call only after [`init`] succeeded.
pub(crate) fn version() -> String {
    cuda_version().map(dotted).unwrap_or_default()
}

/// Milliseconds between two events, by the call that every driver has.
/// cudarc's bindings of CUDA 13 call `cuEventElapsedTime_v2`, which
/// drivers before CUDA 12.8 lack.
///
/// # Errors
/// [`HalError::Driver`] when the call fails or is missing.
///
/// # Safety
/// Both events must be valid, recorded and of the current context.
pub(crate) unsafe fn elapsed_milliseconds(
    context: &DeviceContext,
    start: sys::CUevent,
    end: sys::CUevent,
) -> Result<f32, HalError> {
    type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;
    const CALL: &str = "cuEventElapsedTime";
    // SAFETY: the type is that of the CUDA driver API.
    let call = unsafe { library()?.get::<ElapsedTime>(CALL.as_bytes()) }.map_err(|error| HalError::Driver {
        device: context.id,
        call: CALL,
        message: format!("the driver lacks it: {error}"),
    })?;
    let mut milliseconds = 0.0;
    // SAFETY: the driver writes one number, which lives through the
    // call. The caller vouches for the events.
    let status = unsafe { call(&mut milliseconds, start, end) };
    context.check(CALL, status.result().map(|()| milliseconds))
}

/// Number of devices.
pub(crate) fn device_count() -> Result<u32, HalError> {
    init()?;
    let count = result::device::get_count()
        .map_err(|e| HalError::NoDevice { device: "cuda".into(), why: format!("cuDeviceGetCount: {}", describe(e)) })?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// The driver's name and text of an error. Call only
/// after [`init`] succeeded.
pub(crate) fn describe(error: DriverError) -> String {
    let text = |r: Result<&std::ffi::CStr, DriverError>| r.ok().map(|s| s.to_string_lossy().into_owned());
    match (text(error.error_name()), text(error.error_string())) {
        (Some(name), Some(words)) => format!("{name}: {words}"),
        _ => format!("error {}", error.0 as u32),
    }
}

/// Primary context of one device, shared by all its buffers, streams
/// and kernels. Other CUDA code of the process (runtime API, PyTorch,
/// cudarc) shares it too, so pointers and streams can be exchanged.
pub(crate) struct DeviceContext {
    cuda: Arc<CudaContext>,
    id: DeviceId,
}

impl DeviceContext {
    /// Retains the primary context of device `ordinal`.
    pub(crate) fn open(ordinal: u32) -> Result<Self, HalError> {
        let id = DeviceId { kind: DeviceKind::Cuda, ordinal };
        let count = device_count()?;
        if ordinal >= count {
            let why = format!("the NVIDIA driver sees {count} device(s)");
            return Err(HalError::NoDevice { device: id.to_string(), why });
        }
        let cuda = CudaContext::new(ordinal as usize).map_err(|e| HalError::Driver {
            device: id,
            call: "cuDevicePrimaryCtxRetain",
            message: describe(e),
        })?;
        Ok(Self { cuda, id })
    }

    /// The device that it belongs to.
    pub(crate) fn id(&self) -> DeviceId {
        self.id
    }

    /// The driver's handle, for comparing contexts.
    pub(crate) fn handle(&self) -> sys::CUcontext {
        self.cuda.cu_ctx()
    }

    /// Makes the context current on the calling thread. Required
    /// before every raw driver call.
    pub(crate) fn bind(&self) -> Result<(), HalError> {
        self.check("cuCtxSetCurrent", self.cuda.bind_to_thread())
    }

    /// Converts a driver result to a HAL result.
    pub(crate) fn check<T>(&self, call: &'static str, result: Result<T, DriverError>) -> Result<T, HalError> {
        result.map_err(|e| HalError::Driver { device: self.id, call, message: describe(e) })
    }
}

impl fmt::Debug for DeviceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceContext({})", self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_drivers_are_refused() {
        assert_eq!(check_version(12_000), Ok(()));
        assert_eq!(check_version(13_040), Ok(()));
        let why = check_version(11_080).unwrap_err();
        assert_eq!(why, "the NVIDIA driver supports CUDA 11.8: expected 12.0 or newer");
    }

    #[test]
    fn a_missing_driver_is_no_such_device() {
        // If there is a driver, it is asked for an
        // ordinal that no machine has.
        let error = DeviceContext::open(10_000).unwrap_err();
        assert!(matches!(&error, HalError::NoDevice { why, .. } if why.contains("driver")), "{error}");
    }
}
