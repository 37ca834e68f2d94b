//! `cargo xtask regen`: regenerates every generated file, and says what changed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, bail};
use xtask::workspace;

use crate::kernels;

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Only these generators: `codegen,support`. All together compile each kernel of every chip
    /// that changed.
    #[arg(long, value_delimiter = ',', value_name = "NAME,…", value_parser = GENERATORS.iter().map(|g| g.name).collect::<Vec<_>>())]
    only: Vec<String>,
}

/// A generator of files.
struct Generator {
    name: &'static str,
    /// Files, and folders of files, relative to the root.
    files: &'static [&'static str],
    run: fn(&Path) -> anyhow::Result<()>,
}

const LOCK: &str = "crates/qgemm-cuda/kernels.lock";

/// Later generators read the files of earlier ones.
const GENERATORS: &[Generator] = &[
    Generator {
        name: "codegen",
        files: &["crates/qgemm-cuda/kernels/generated", "crates/qgemm-wgpu/shaders/generated"],
        run: |_| command(&["codegen"]),
    },
    Generator { name: "spills", files: &["crates/qgemm-cuda/kernels.spills"], run: |_| command(&["spills"]) },
    Generator { name: "kernels", files: &[LOCK], run: |root| command(&["build-kernels", "--arch", &chips(root)?]) },
    Generator { name: "support", files: &["docs/guide/support.md"], run: support },
    Generator { name: "figures", files: &["docs/internals/kernels.md"], run: |_| command(&["figures"]) },
    Generator {
        name: "performance",
        files: &["docs/results/performance.md", "docs/results/operations.md"],
        run: |_| command(&["performance"]),
    },
];

/// Runs the command.
///
/// # Errors
/// When a generator fails.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let root = workspace::root();
    let mut changed = Vec::new();
    for generator in GENERATORS.iter().filter(|g| args.only.is_empty() || args.only.iter().any(|o| o == g.name)) {
        println!("== {}", generator.name);
        let (before, start) = (contents(&root, generator.files)?, Instant::now());
        (generator.run)(&root).with_context(|| format!("generating {}", generator.files.join(", ")))?;
        let differing = differing(&before, &contents(&root, generator.files)?);
        println!("{} files changed, {:.0} s", differing.len(), start.elapsed().as_secs_f64());
        changed.extend(differing);
    }
    println!();
    if changed.is_empty() {
        println!("nothing changed");
    }
    for path in changed {
        println!("changed: {}", path.strip_prefix(&root).unwrap_or(&path).display());
    }
    Ok(())
}

/// Runs a command of the package `xtask-kernels`.
fn command(arguments: &[&str]) -> anyhow::Result<()> {
    let status = workspace::cargo().args(kernels::RUN).args(arguments).status().context("starting cargo")?;
    if status.success() { Ok(()) } else { bail!("{}: {status}", arguments.join(" ")) }
}

/// Chips of `kernels.lock`, as `--arch` takes them.
fn chips(root: &Path) -> anyhow::Result<String> {
    let mut chips: Vec<u32> = fs::read_dir(root.join(LOCK))?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().strip_prefix("sm_").and_then(|chip| chip.parse().ok())))
        .filter_map(Result::transpose)
        .collect::<anyhow::Result<_>>()?;
    chips.sort_unstable();
    Ok(chips.iter().map(u32::to_string).collect::<Vec<_>>().join(","))
}

/// Writes the page of supported formats. The emulated GPUs and lavapipe must be there.
fn support(root: &Path) -> anyhow::Result<()> {
    let page = workspace::output(workspace::cargo().args([
        "run",
        "--quiet",
        "--package",
        "qgemm-cli",
        "--",
        "support",
        "--markdown",
    ]))?;
    fs::write(root.join("docs/guide/support.md"), page).context("writing the page")
}

/// Contents of the files at and below `paths`.
fn contents(root: &Path, paths: &[&str]) -> anyhow::Result<BTreeMap<PathBuf, Vec<u8>>> {
    let mut found = BTreeMap::new();
    let mut open: Vec<PathBuf> = paths.iter().map(|path| root.join(path)).collect();
    while let Some(path) = open.pop() {
        if path.is_dir() {
            for entry in fs::read_dir(&path)? {
                open.push(entry?.path());
            }
        } else if path.is_file() {
            found.insert(path.clone(), fs::read(&path).with_context(|| format!("reading {}", path.display()))?);
        }
    }
    Ok(found)
}

/// Paths that are new, gone or of other contents.
fn differing(before: &BTreeMap<PathBuf, Vec<u8>>, after: &BTreeMap<PathBuf, Vec<u8>>) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        before.keys().chain(after.keys()).filter(|path| before.get(*path) != after.get(*path)).cloned().collect();
    paths.sort_unstable();
    paths.dedup();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_changed_and_deleted_files_are_told() {
        let root = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("writable");
            fs::write(path, text).expect("writable");
        };
        write("all/a/same", "1");
        write("all/a/changed", "1");
        write("all/gone", "1");
        let all = || contents(root.path(), &["all", "one"]).expect("readable");
        let before = all();
        assert!(differing(&before, &all()).is_empty());
        write("all/a/changed", "2");
        write("one", "");
        fs::remove_file(root.path().join("all/gone")).expect("there");
        let names: Vec<String> = differing(&before, &all())
            .iter()
            .map(|path| path.strip_prefix(root.path()).expect("below").display().to_string())
            .collect();
        assert_eq!(names, ["all/a/changed", "all/gone", "one"]);
    }

    #[test]
    fn chips_are_those_of_the_lock() {
        let chips = chips(&workspace::root()).expect("a lock");
        assert!(chips.starts_with("70,75,80") && chips.ends_with("120"), "{chips}");
    }
}
