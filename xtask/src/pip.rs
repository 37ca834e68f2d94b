//! Wheels from PyPI, installed into the target folder.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};

/// Installs `wheel` (`name==version`) into `folder`. It installs next to
/// the destination and renames, so that an interrupted installation is
/// not mistaken for a complete one.
///
/// # Errors
/// When there is no Python, `pip` fails, or the
/// folder cannot be written.
pub fn install(wheel: &str, folder: &Path) -> anyhow::Result<()> {
    let parts = folder.with_extension("partial");
    if parts.exists() {
        fs::remove_dir_all(&parts)?;
    }
    let python = if cfg!(windows) { "python" } else { "python3" };
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target"]);
    let status = pip.arg(&parts).arg(wheel).status().with_context(|| format!("starting {python}"))?;
    if !status.success() {
        bail!("{python} -m pip ({status})");
    }
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::rename(&parts, folder)?;
    Ok(())
}
