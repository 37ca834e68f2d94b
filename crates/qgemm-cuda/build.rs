//! Embeds every kernel source: writes a table of `include_str!` for all files under `kernels/`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let kernels = Path::new(&env::var("CARGO_MANIFEST_DIR").map_err(io::Error::other)?).join("kernels");
    println!("cargo::rerun-if-changed=kernels");
    let mut files = Vec::new();
    collect(&kernels, &mut files)?;
    // The order decides the hash of the sources, so it must not depend on the file system.
    let mut named: Vec<(String, PathBuf)> = files.into_iter().map(|f| (include_name(&kernels, &f), f)).collect();
    named.sort();

    let mut table = String::from("&[\n");
    for (name, file) in named {
        writeln!(table, "    ({name:?}, include_str!({:?})),", file.display().to_string()).map_err(io::Error::other)?;
    }
    table.push_str("]\n");
    let out = Path::new(&env::var("OUT_DIR").map_err(io::Error::other)?).join("sources.rs");
    fs::write(out, table)
}

/// The name by which sources include the file: its path below `kernels/`, with forward slashes.
fn include_name(kernels: &Path, file: &Path) -> String {
    let relative = file.strip_prefix(kernels).unwrap_or(file);
    let parts: Vec<_> = relative.components().map(|c| c.as_os_str().to_string_lossy().into_owned()).collect();
    parts.join("/")
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|e| e == "cuh" || e == "cu") {
            files.push(path);
        }
    }
    Ok(())
}
