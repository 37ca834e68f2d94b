//! NVRTC for commands that compile kernels: found, or
//! installed into the target folder.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};
use qgemm_cuda::build;
use xtask::pip;
use xtask::workspace::target_folder;

/// The wheel: the last version that supports all chips since Volta.
const WHEEL: &str = "nvidia-cuda-nvrtc-cu12==12.9.86";

/// Folder name of the compiler, in the target
/// folder and next to programs.
const NAME: &str = "nvrtc";

/// Ensures that this process and its children find the compiler.
///
/// # Errors
/// A message, when it is missing and cannot be installed.
pub fn ensure() -> anyhow::Result<()> {
    if build::compiler_is_installed()? {
        return Ok(());
    }
    let folder = target_folder()?.join(NAME);
    if folder.exists() {
        link(&folder)?;
    }
    if build::compiler_is_installed()? {
        return Ok(());
    }
    println!("NVRTC is not installed: putting the wheel {WHEEL} (90 MB) into {}", folder.display());
    pip::install(WHEEL, &folder).and_then(|()| link(&folder)).with_context(|| {
        format!(
            "NVIDIA's run-time compiler is neither in `{0}`, nor in a CUDA toolkit, nor in Python's packages, and could \
             not be installed. Install it (`pip install {WHEEL}`), or copy libnvrtc and libnvrtc-builtins from another \
             machine and name their folder in `{0}`. What failed",
            build::LIBRARY_VARIABLE
        )
    })?;
    if !build::compiler_is_installed()? {
        bail!("{} holds no NVRTC that loads on this machine", folder.display());
    }
    Ok(())
}

/// Links the installed compiler next to the programs that cargo builds,
/// which only search their own folder.
#[cfg(unix)]
fn link(folder: &Path) -> anyhow::Result<()> {
    let target = target_folder()?;
    for programs in ["debug", "debug/deps", "debug/examples", "release", "release/deps", "release/examples"] {
        let link = target.join(programs).join(NAME);
        if link.symlink_metadata().is_err() {
            fs::create_dir_all(target.join(programs))?;
            std::os::unix::fs::symlink(folder, &link).with_context(|| format!("linking {}", link.display()))?;
        }
    }
    Ok(())
}

/// Elsewhere, links need rights that users do not have.
#[cfg(not(unix))]
fn link(folder: &Path) -> anyhow::Result<()> {
    bail!("set {}={}", build::LIBRARY_VARIABLE, folder.display())
}
