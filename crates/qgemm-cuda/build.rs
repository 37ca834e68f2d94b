//! Embeds all kernel sources and, with the feature `embed-kernels`, the user's bundles:
//! writes tables of `include_str!` and `include_bytes!`.

#[cfg(feature = "embed-kernels")]
#[path = "build/bundles.rs"]
mod bundles;
#[cfg(feature = "embed-kernels")]
#[path = "src/hash.rs"]
#[allow(dead_code, reason = "the library takes more of it")]
mod hash;
#[cfg(feature = "embed-kernels")]
#[path = "src/bundle/layout.rs"]
mod layout;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let kernels = Path::new(&env::var("CARGO_MANIFEST_DIR").map_err(io::Error::other)?).join("kernels");
    let out = PathBuf::from(env::var("OUT_DIR").map_err(io::Error::other)?);
    println!("cargo::rerun-if-changed=kernels");
    let mut files = Vec::new();
    collect(&kernels, &mut files)?;
    // Fixed order for a reproducible source hash.
    let mut named: Vec<(String, PathBuf)> = files.into_iter().map(|f| (include_name(&kernels, &f), f)).collect();
    named.sort();
    write_table(&out.join("sources.rs"), "include_str", &named)?;
    #[cfg(feature = "embed-kernels")]
    bundles::embed(&named, &out.join("embedded.rs"))?;
    Ok(())
}

/// Writes a table of (name, file contents).
fn write_table(path: &Path, include: &str, named: &[(String, PathBuf)]) -> io::Result<()> {
    let mut table = String::from("&[\n");
    for (name, file) in named {
        writeln!(table, "    ({name:?}, {include}!({:?})),", file.display().to_string()).map_err(io::Error::other)?;
    }
    table.push_str("]\n");
    fs::write(path, table)
}

/// Include name of a file: its path below `kernels/`, with forward slashes.
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
