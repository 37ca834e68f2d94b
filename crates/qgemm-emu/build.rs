//! Embeds the emulated atoms: a table of `include_str!` for
//! all files under `kernels/`.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let kernels = Path::new(&env::var("CARGO_MANIFEST_DIR").map_err(io::Error::other)?).join("kernels");
    println!("cargo::rerun-if-changed=kernels");
    let mut files: Vec<PathBuf> = Vec::new();
    for folder in [kernels.clone(), kernels.join("atoms")] {
        files.extend(fs::read_dir(folder)?.map(|e| e.map(|e| e.path())).collect::<io::Result<Vec<_>>>()?);
    }
    files.retain(|f| f.extension().is_some_and(|e| e == "cuh"));
    // Fixed order for a reproducible source hash.
    files.sort();
    let mut table = String::from("&[\n");
    for file in files {
        let name = file.strip_prefix(&kernels).map_err(io::Error::other)?.display().to_string().replace('\\', "/");
        writeln!(table, "    ({name:?}, include_str!({:?})),", file.display().to_string()).map_err(io::Error::other)?;
    }
    table.push_str("]\n");
    let out = Path::new(&env::var("OUT_DIR").map_err(io::Error::other)?).join("atoms.rs");
    fs::write(out, table)
}
