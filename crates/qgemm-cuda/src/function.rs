//! Kernels on a device: loading and launching.

use std::ffi::{CString, c_uint, c_void};
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::{result, sys};
use qgemm_hal::{HalError, Stream};

use crate::artifact::Artifact;
use crate::driver::{self, DeviceContext};
use crate::spec::KernelSpec;
use crate::stream::CudaStream;

/// Room for the driver's complaint about an image.
const ERROR_LOG_BYTES: usize = 16 * 1024;
/// Launches of no more blocks that start early leave what they can of L1 to shared memory. A multiprocessor that divides its memory
/// otherwise takes no block of a kernel that needs more, before it is empty: between two products, a norm of eight rows cost 2 µs so (H200).
const FEW_BLOCKS: u64 = 64;
/// Percent of its memory that a multiprocessor is asked to use as shared memory: what the driver thinks best, and all.
const DRIVERS_CHOICE: i32 = -1;
const MOST_SHARED: i32 = 100;

/// A kernel that is loaded on a device. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Function {
    module: Arc<Module>,
    raw: sys::CUfunction,
}

struct Module {
    context: Arc<DeviceContext>,
    raw: sys::CUmodule,
    name: String,
    /// Whether its kernel asks for [`MOST_SHARED`].
    asks_for_most_shared: AtomicBool,
}

// SAFETY: modules and functions are handles that every thread may use while the context lives; after loading they
// are only read.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}
// SAFETY: as above.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// When a kernel's blocks may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// When all earlier work of the stream is done.
    InOrder,
    /// When the blocks of the kernel before it have all started and leave room (programmatic dependent launch, sm_90
    /// and newer): the kernel itself waits for that kernel's results.
    Early,
}

impl Function {
    /// Loads `artifact` and looks up the kernel of `spec`. `shared_bytes` is the most shared memory that a block
    /// may have on this device; launches may use all that the kernel does not reserve statically.
    pub(crate) fn load(
        context: &Arc<DeviceContext>,
        spec: &KernelSpec,
        artifact: &Artifact,
        shared_bytes: u32,
    ) -> Result<Self, HalError> {
        let _span = tracing::info_span!("load", kernel = spec.name, target = %artifact.target).entered();
        context.bind()?;
        let raw = load_image(context, &artifact.image)?;
        let module = Arc::new(Module {
            context: context.clone(),
            raw,
            name: spec.name.clone(),
            asks_for_most_shared: AtomicBool::new(false),
        });
        let symbol = CString::new(spec.symbol).map_err(|e| HalError::Driver {
            device: context.id(),
            call: "cuModuleGetFunction",
            message: format!("{}: {e}", spec.symbol),
        })?;
        use sys::CUfunction_attribute_enum as A;
        // SAFETY: the module was just loaded and is kept alive beside the function.
        let raw = unsafe {
            let raw = context.check("cuModuleGetFunction", result::module::get_function(module.raw, symbol))?;
            let fixed = context.check(
                "cuFuncGetAttribute",
                result::function::get_function_attribute(raw, A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES),
            )?;
            let dynamic = i32::try_from(shared_bytes).unwrap_or(i32::MAX).saturating_sub(fixed).max(0);
            let attribute = A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let opt_in = result::function::set_function_attribute(raw, attribute, dynamic);
            context.check("cuFuncSetAttribute", opt_in)?;
            raw
        };
        Ok(Self { module, raw })
    }

    /// Submits the kernel to `stream`: blocks of `threads` threads with `shared_bytes` of dynamic shared memory,
    /// and `params` as its one by-value parameter. Allocates nothing, takes no lock.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] when the stream is another device's, or a driver error.
    ///
    /// # Safety
    /// `params` must be laid out as the kernel's parameter, at least as long, and the addresses in it must be of
    /// memory on this device that is as large as the kernel expects and stays allocated until the kernel is done.
    /// With [`Start::Early`] the kernel must execute `griddepcontrol.wait` before it reads what earlier work of the
    /// stream writes, and before it writes.
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: u32,
        params: &[u8],
        start: Start,
    ) -> Result<(), HalError> {
        let context = &self.module.context;
        let stream = CudaStream::of(context.id(), stream)?;
        context.bind()?;
        if start == Start::Early {
            self.divide_memory(grid.iter().map(|&blocks| u64::from(blocks)).product::<u64>() <= FEW_BLOCKS)?;
        }
        let mut params = [params.as_ptr().cast::<c_void>().cast_mut()];
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: stream.handle(),
            attrs: &raw mut early,
            numAttrs: 1,
        };
        // SAFETY: function, stream and context belong together and are alive; the driver copies configuration and
        // parameter, which the caller vouches for, before it returns, and does not write through the pointers.
        let status = unsafe {
            match start {
                Start::Early => sys::cuLaunchKernelEx(&config, self.raw, params.as_mut_ptr(), ptr::null_mut()),
                // Drivers before CUDA 11.8 have only this call.
                Start::InOrder => sys::cuLaunchKernel(
                    self.raw,
                    grid[0],
                    grid[1],
                    grid[2],
                    threads,
                    1,
                    1,
                    shared_bytes,
                    stream.handle(),
                    params.as_mut_ptr(),
                    ptr::null_mut(),
                ),
            }
        };
        status.result().map_err(|e| HalError::Driver {
            device: context.id(),
            call: "a kernel launch",
            message: format!(
                "{}: {} (grid {grid:?}, {threads} threads, {shared_bytes} bytes of shared memory)",
                self.module.name,
                driver::describe(e)
            ),
        })
    }

    /// Says how multiprocessors should divide their memory for the next launches, a preference that changes no result. The driver is told
    /// only what is new.
    fn divide_memory(&self, most_shared: bool) -> Result<(), HalError> {
        if self.module.asks_for_most_shared.swap(most_shared, Ordering::Relaxed) == most_shared {
            return Ok(());
        }
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        let percent = if most_shared { MOST_SHARED } else { DRIVERS_CHOICE };
        // SAFETY: the function is alive as long as its module.
        let told = unsafe { result::function::set_function_attribute(self.raw, attribute, percent) };
        self.module.context.check("cuFuncSetAttribute", told)
    }
}

#[cfg(test)]
impl Function {
    /// Whether both are the same kernel of the same loaded module.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.module, &other.module) && self.raw == other.raw
    }
}

/// Loads a cubin or PTX; the driver's own words go into the error.
fn load_image(context: &DeviceContext, image: &[u8]) -> Result<sys::CUmodule, HalError> {
    use sys::CUjit_option_enum as Option;
    let mut log = vec![0u8; ERROR_LOG_BYTES];
    let mut options = [Option::CU_JIT_ERROR_LOG_BUFFER, Option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    // Integers are passed in the place of pointers (CUDA driver API, `cuModuleLoadDataEx`).
    let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(ERROR_LOG_BYTES)];
    let mut module = ptr::null_mut();
    // SAFETY: the image is a cubin, or PTX ending in a zero byte, and was checked by its hash when it was read; the
    // option values are as their options demand, and all outlive the call.
    let status = unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            image.as_ptr().cast(),
            options.len() as c_uint,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    status.result().map_err(|e| {
        let log = String::from_utf8_lossy(&log);
        let words = log.trim_end_matches('\0').trim();
        let message = if words.is_empty() { driver::describe(e) } else { format!("{}\n{words}", driver::describe(e)) };
        HalError::Driver { device: context.id(), call: "cuModuleLoadDataEx", message }
    })?;
    Ok(module)
}

impl Drop for Module {
    fn drop(&mut self) {
        let unloaded = self.context.bind().and_then(|()| {
            // SAFETY: the module was loaded here, no function of it is left, and it is unloaded once.
            self.context.check("cuModuleUnload", unsafe { result::module::unload(self.raw) })
        });
        if let Err(error) = unloaded {
            tracing::warn!(kernel = self.name, %error, "a kernel could not be unloaded");
        }
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Function({} on {})", self.module.name, self.module.context.id())
    }
}
