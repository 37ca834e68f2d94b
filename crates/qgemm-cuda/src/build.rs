//! Compiling kernels ahead of time, without a GPU: what `cargo xtask build-kernels` is made of.

use std::path::Path;

use qgemm_hal::HalError;

use crate::artifact::Artifact;
use crate::cache::Cache;
use crate::jit;
use crate::nvrtc::{Nvrtc, NvrtcError};
use crate::spec::KernelSpec;
use crate::store;
use crate::target::Target;

pub use crate::nvrtc::LIBRARY_VARIABLE;

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

/// The kernel `spec` compiled for `target` (for the chip's own instruction set where the kernel needs it), from the
/// cache in the folder `cache`, or compiled and added to it.
///
/// # Errors
/// [`HalError::Compile`], or [`HalError::KernelUnavailable`] when there is no compiler for the target.
pub fn compile(cache: &Path, spec: &KernelSpec, target: Target) -> Result<Artifact, HalError> {
    store::compiled(&Cache::at(cache), spec, jit::target_of(spec, target))
}
