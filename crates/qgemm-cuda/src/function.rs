//! Kernel loading and launching.

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

/// Size of the driver's error log for an image.
const ERROR_LOG_BYTES: usize = 16 * 1024;
/// Early-start launches of at most this many CTAs ask for maximum
/// shared memory, too. An SM with another L1/shared split must
/// drain before it accepts a CTA that needs more shared memory,
/// which would delay the next kernel.
const FEW_BLOCKS: u64 = 64;
/// Preferred shared-memory carveout of an SM in percent: the
/// driver's default, and the maximum.
const DRIVERS_CHOICE: i32 = -1;
const MOST_SHARED: i32 = 100;

/// A loaded kernel. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Function {
    module: Arc<Module>,
    raw: sys::CUfunction,
}

struct Module {
    context: Arc<DeviceContext>,
    raw: sys::CUmodule,
    name: String,
    /// Whether the function currently asks for [`MOST_SHARED`].
    asks_for_most_shared: AtomicBool,
}

// SAFETY: modules and functions are handles that every thread may use
// while the context lives. After loading they are only read.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}
// SAFETY: as above.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// When the CTAs of a kernel may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// After all earlier work of the stream is done.
    InOrder,
    /// Programmatic dependent launch (sm_90 and newer): as soon as all CTAs
    /// of the previous kernel have started and leave room. The kernel
    /// itself waits for the previous kernel's results.
    Early,
}

impl Function {
    /// Loads `artifact` and looks up the kernel of `spec`. `shared_bytes` is
    /// the device's maximum shared memory of a CTA; launches may use
    /// all of it that the kernel does not reserve statically.
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
        // SAFETY: the module was just loaded and is kept
        // alive beside the function.
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

    /// Launches the kernel on `stream`: CTAs of `threads` threads with
    /// `shared_bytes` of dynamic shared memory, and `params` as its single
    /// by-value parameter. Does not allocate or lock.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] when the stream belongs to
    /// another device, or a driver error.
    ///
    /// # Safety
    /// `params` must have the layout of the kernel's parameter and be
    /// at least as long. Its addresses must be memory on this
    /// device that is as large as the kernel expects and stays
    /// allocated until the kernel is done. With [`Start::Early`] the kernel
    /// must execute `griddepcontrol.wait` before it reads what earlier work of
    /// the stream writes, and before it writes.
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
        // SAFETY: function, stream and context belong together and are
        // alive. The driver copies the configuration and the
        // parameter, which the caller vouches for, before it returns,
        // and does not write through the pointers.
        let status = unsafe {
            match start {
                Start::Early => sys::cuLaunchKernelEx(&config, self.raw, params.as_mut_ptr(), ptr::null_mut()),
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

    /// Sets the preferred shared-memory carveout for the next
    /// launches, which changes no results. The driver is called only
    /// when the preference changes.
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

/// Loads a cubin or PTX. The error contains the driver's log.
fn load_image(context: &DeviceContext, image: &[u8]) -> Result<sys::CUmodule, HalError> {
    use sys::CUjit_option_enum as Option;
    let mut log = vec![0u8; ERROR_LOG_BYTES];
    let mut options = [Option::CU_JIT_ERROR_LOG_BUFFER, Option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    // Integer options are passed as pointer values (CUDA driver
    // API, `cuModuleLoadDataEx`).
    let mut values = [log.as_mut_ptr().cast::<c_void>(), ptr::without_provenance_mut(ERROR_LOG_BYTES)];
    let mut module = ptr::null_mut();
    // SAFETY: the image is a cubin, or zero-terminated PTX, and its
    // hash was checked when it was read. The option values match
    // their options, and all of them outlive the call.
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
            // SAFETY: the module was loaded here, no function of it is
            // left, and it is unloaded once.
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
