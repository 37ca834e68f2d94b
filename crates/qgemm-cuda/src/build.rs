//! Compiling kernels ahead of time, without a GPU: what `cargo xtask build-kernels` is made of.

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

/// Version of the compiler (`12.9`) and the compute capabilities that it compiles for, ascending.
///
/// # Errors
/// [`NvrtcError::Missing`].
pub fn compiler() -> Result<(String, Vec<u32>), NvrtcError> {
    let nvrtc = Nvrtc::get()?;
    Ok((nvrtc.version().to_owned(), nvrtc.supported().to_vec()))
}

/// Whether the compiler is there, without keeping it loaded: a later call finds one installed since.
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
    /// It does not compile, or there is no compiler for the target.
    #[error(transparent)]
    Kernel(#[from] HalError),
    /// It was compiled, and cannot be kept.
    #[error("{}: {error}", folder.display())]
    Cache {
        /// The folder for compiled kernels.
        folder: PathBuf,
        /// What the system says.
        error: io::Error,
    },
}

/// A kernel that [`compile`] obtained.
#[derive(Clone, Debug)]
pub struct Built {
    /// The kernel.
    pub artifact: Artifact,
    /// How long the compiler took; `None` when the cache had the kernel.
    pub compiled_in: Option<Duration>,
}

/// The kernel `spec` compiled for `target` (for the chip's own instruction set where the kernel needs it), from the
/// cache in the folder `cache`, or compiled and added to it. Several processes may do so at once, with the same kernels
/// and the same folder.
///
/// # Errors
/// [`BuildError::Kernel`] with [`HalError::Compile`], or [`HalError::KernelUnavailable`] when there is no compiler for
/// the target; [`BuildError::Cache`] when the folder cannot be written.
pub fn compile(cache: &Path, spec: &KernelSpec, target: Target) -> Result<Built, BuildError> {
    let obtained = store::obtain(&Cache::at(cache), spec, jit::target_of(spec, target))?;
    obtained.cached.map_err(|error| BuildError::Cache { folder: cache.to_path_buf(), error })?;
    Ok(Built { artifact: obtained.artifact, compiled_in: obtained.compiled_in })
}
