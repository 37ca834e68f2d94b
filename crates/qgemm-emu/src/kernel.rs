//! Kernels loaded into the process.

use std::ffi::c_void;
use std::path::Path;

use libloading::Library;
use qgemm_hal::HalError;

use crate::machine::Runtime;

/// A loaded kernel.
#[derive(Debug)]
pub(crate) struct LoadedKernel {
    run: unsafe extern "C" fn(*const c_void),
    /// Keeps the code loaded.
    _library: Library,
}

impl LoadedKernel {
    /// Loads the shared object of a kernel.
    ///
    /// # Errors
    /// [`HalError::File`].
    pub(crate) fn load(path: &Path) -> Result<Self, HalError> {
        static TABLE: Runtime = Runtime::TABLE;
        let failed = |message: String| HalError::File { path: path.to_owned(), call: "load", message };
        // SAFETY: the object was made by `compile` (its hash was
        // checked) and has no initialisers.
        let library = unsafe { Library::new(path) }.map_err(|e| failed(e.to_string()))?;
        // SAFETY: the types are those of `kernels/emu.cuh`
        // and `kernels/entry.cuh`.
        let run = unsafe {
            let bind = library
                .get::<unsafe extern "C" fn(*const Runtime, u64) -> bool>(b"qg_emu_bind")
                .map_err(|e| failed(e.to_string()))?;
            if !bind(&raw const TABLE, size_of::<Runtime>() as u64) {
                return Err(failed("it expects other functions of the emulator".into()));
            }
            *library.get::<unsafe extern "C" fn(*const c_void)>(b"qg_emu_run").map_err(|e| failed(e.to_string()))?
        };
        Ok(Self { run, _library: library })
    }

    /// The kernel function, to be called on a
    /// thread of a running CTA.
    pub(crate) fn run(&self) -> unsafe extern "C" fn(*const c_void) {
        self.run
    }
}
