//! The workspace's root, its files, and how commands are run in it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

/// The workspace's root: the folder above this crate.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

/// `cargo`, the one that runs this command, started in the root.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// Files that git tracks or would track, as paths relative to the root.
pub fn files() -> anyhow::Result<Vec<PathBuf>> {
    let listing = output(Command::new("git").current_dir(root()).args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))?;
    let mut files: Vec<PathBuf> = listing.split('\0').filter(|f| !f.is_empty()).map(PathBuf::from).collect();
    // A file that was deleted but not yet committed is still listed.
    files.retain(|f| root().join(f).is_file());
    files.sort();
    files.dedup();
    Ok(files)
}

/// What `command` prints, which must succeed.
///
/// # Errors
/// When it cannot be started, fails, or prints no UTF-8.
pub fn output(command: &mut Command) -> anyhow::Result<String> {
    let out = command.output().with_context(|| format!("starting {command:?}"))?;
    if !out.status.success() {
        bail!("{command:?} failed ({}):\n{}", out.status, String::from_utf8_lossy(&out.stderr));
    }
    Ok(String::from_utf8(out.stdout)?)
}
