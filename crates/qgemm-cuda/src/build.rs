//! Ahead-of-time kernel compilation without a GPU, for
//! `cargo xtask build-kernels`.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use qgemm_hal::HalError;

use crate::artifact::Artifact;
use crate::cache::Cache;
use crate::jit;
use crate::nvrtc::{Nvrtc, NvrtcError};
use crate::spec::KernelSpec;
use crate::store;
use crate::target::Target;

pub use crate::nvrtc::{LIBRARY_VARIABLE, toolkits};

/// Compiler version (`12.9`) and supported compute capabilities, ascending.
///
/// # Errors
/// [`NvrtcError::Missing`].
pub fn compiler() -> Result<(String, Vec<u32>), NvrtcError> {
    let nvrtc = Nvrtc::get()?;
    Ok((nvrtc.version().to_owned(), nvrtc.supported().to_vec()))
}

/// Whether the compiler is installed, without keeping it loaded. A later
/// call finds one that was installed since.
///
/// # Errors
/// [`NvrtcError::Missing`] when `QGEMM_NVRTC` names a path without it.
pub fn compiler_is_installed() -> Result<bool, NvrtcError> {
    Nvrtc::is_installed()
}

/// Why a kernel was not built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The kernel does not compile, or no compiler supports the target.
    #[error(transparent)]
    Kernel(#[from] HalError),
    /// The compiled kernel could not be stored.
    #[error("{}: {error}", folder.display())]
    Cache {
        /// The kernel cache folder.
        folder: PathBuf,
        /// The system's error.
        error: io::Error,
    },
}

/// A kernel returned by [`compile`].
#[derive(Clone, Debug)]
pub struct Built {
    /// The kernel.
    pub artifact: Artifact,
    /// Compile time; `None` for a cache hit.
    pub compiled_in: Option<Duration>,
}

/// Returns the kernel `spec` compiled for `target` (with chip-specific
/// instructions if the kernel needs them).
///
/// It comes from the cache in folder `cache`, or is compiled
/// and added to it. Several processes may do so concurrently with
/// the same kernels and folder.
///
/// # Errors
/// [`BuildError::Kernel`] with [`HalError::Compile`], or
/// [`HalError::KernelUnavailable`] when no compiler supports the target;
/// [`BuildError::Cache`] when the folder cannot be written.
pub fn compile(cache: &Path, spec: &KernelSpec, target: Target) -> Result<Built, BuildError> {
    let obtained = store::obtain(&Cache::at(cache), spec, jit::target_of(spec, target))?;
    obtained.cached.map_err(|error| BuildError::Cache { folder: cache.to_path_buf(), error })?;
    Ok(Built { artifact: obtained.artifact, compiled_in: obtained.compiled_in })
}
