//! Workspace root, its files, and running commands in it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use anyhow::{Context, bail};

/// Root of the workspace, searched at each run: this
/// program may have been built in another working tree
/// that shares the target folder.
pub fn root() -> PathBuf {
    static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
        // `cargo run` passes this crate's folder. Started directly, the program
        // searches upwards from the current folder.
        let package = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
        let start = package.or_else(|| std::env::current_dir().ok()).unwrap_or_default();
        root_above(&start).unwrap_or(start)
    });
    ROOT.clone()
}

/// The nearest folder from `start` upwards with a
/// workspace that contains this crate.
fn root_above(start: &Path) -> Option<PathBuf> {
    let is_root = |folder: &&Path| {
        let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap_or_default();
        manifest.lines().any(|line| line.trim() == "[workspace]") && folder.join("xtask").is_dir()
    };
    start.ancestors().find(is_root).map(Path::to_path_buf)
}

/// The `cargo` that runs this command, started in the root.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// Cargo's target folder: this executable is in `<target>/<profile>/`.
///
/// # Errors
/// When the executable is elsewhere.
pub fn target_folder() -> anyhow::Result<PathBuf> {
    let executable = std::env::current_exe().context("finding this executable")?;
    executable.ancestors().nth(2).map(Path::to_path_buf).context("the executable is in no target folder")
}

/// Files that git tracks or would track, as paths
/// relative to the root.
pub fn files() -> anyhow::Result<Vec<PathBuf>> {
    let listing = output(Command::new("git").current_dir(root()).args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))?;
    let mut files: Vec<PathBuf> = listing.split('\0').filter(|f| !f.is_empty()).map(PathBuf::from).collect();
    // A deleted but uncommitted file is still listed.
    files.retain(|f| root().join(f).is_file());
    files.sort();
    files.dedup();
    Ok(files)
}

/// Output of `command`, which must succeed.
///
/// # Errors
/// When it cannot be started, fails, or does not print UTF-8.
pub fn output(command: &mut Command) -> anyhow::Result<String> {
    let out = command.output().with_context(|| format!("starting {command:?}"))?;
    if !out.status.success() {
        bail!("{command:?} failed ({}):\n{}", out.status, String::from_utf8_lossy(&out.stderr));
    }
    Ok(String::from_utf8(out.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_found_from_every_folder_in_it() {
        let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let expected = crate_folder.parent();
        assert_eq!(root_above(crate_folder).as_deref(), expected);
        assert_eq!(root_above(&crate_folder.join("src").join("tidy")).as_deref(), expected);
        assert_eq!(root_above(Path::new("/")), None);
        // Another working tree has a separate root, wherever
        // this program was built.
        let other = tempfile::tempdir().expect("writable");
        std::fs::create_dir_all(other.path().join("xtask/src")).expect("writable");
        std::fs::write(other.path().join("Cargo.toml"), "[workspace]\n").expect("writable");
        std::fs::write(other.path().join("xtask/Cargo.toml"), "[package]\n").expect("writable");
        assert_eq!(root_above(&other.path().join("xtask/src")).as_deref(), Some(other.path()));
    }
}
