//! Feature `embed-kernels`: finds the user's bundles.
//! Invalid bundles fail the build instead of the program.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use crate::hash::{Sha256Hash, of_sources};
use crate::layout::{EMBED_VARIABLE, EXTENSION, FORMAT_VERSION, PREFIX_BYTES, Prefix};
use crate::write_table;

/// Writes the table of the user's bundles to `table`,
/// or fails the build with a message. `sources` are the
/// kernel sources by name.
pub fn embed(sources: &[(String, PathBuf)], table: &Path) -> io::Result<()> {
    println!("cargo::rerun-if-env-changed={EMBED_VARIABLE}");
    let mut texts = Vec::new();
    for (name, file) in sources {
        texts.push((name.as_str(), fs::read_to_string(file)?));
    }
    let ours = of_sources(texts.iter().map(|(name, text)| (*name, text.as_str())));
    match named(env::var_os(EMBED_VARIABLE), ours) {
        Ok(bundles) => write_table(table, "include_bytes", &bundles),
        Err(why) => {
            println!("cargo::error=feature `embed-kernels` of qgemm-cuda: {why}");
            std::process::exit(1);
        }
    }
}

/// Bundles named by the user, by file name.
fn named(value: Option<OsString>, ours: Sha256Hash) -> Result<Vec<(String, PathBuf)>, String> {
    let make = "`cargo xtask build-kernels --arch 80,90 --out FOLDER` makes it";
    let value = value.filter(|v| !v.is_empty()).ok_or_else(|| {
        format!("set {EMBED_VARIABLE} to the kernel bundles to embed, or to a folder of them ({make})")
    })?;
    let mut bundles = Vec::new();
    for path in env::split_paths(&value) {
        if !path.is_absolute() {
            return Err(format!("{EMBED_VARIABLE} names {}: expected an absolute path", path.display()));
        }
        println!("cargo::rerun-if-changed={}", path.display());
        let files = files(&path).map_err(|e| format!("{EMBED_VARIABLE} names {}: {e}", path.display()))?;
        if files.is_empty() {
            let path = path.display();
            return Err(format!("{EMBED_VARIABLE} names {path}, where no file ends in .{EXTENSION} ({make})"));
        }
        for file in files {
            println!("cargo::rerun-if-changed={}", file.display());
            check(&file, ours).map_err(|why| format!("{}: {why}", file.display()))?;
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            bundles.push((name, file));
        }
    }
    Ok(bundles)
}

/// The file `path`, or all bundles in the folder `path`.
fn files(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !fs::metadata(path)?.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let mut files = fs::read_dir(path)?.map(|entry| entry.map(|e| e.path())).collect::<io::Result<Vec<_>>>()?;
    files.retain(|file| file.extension().is_some_and(|e| e == EXTENSION));
    files.sort();
    Ok(files)
}

/// Checks that the library will accept the bundle.
fn check(path: &Path, ours: Sha256Hash) -> Result<(), String> {
    let unreadable = |e: io::Error| format!("not a kernel bundle ({e})");
    let mut file = File::open(path).map_err(unreadable)?;
    let mut prefix = [0u8; PREFIX_BYTES];
    file.read_exact(&mut prefix).map_err(unreadable)?;
    let prefix = Prefix::parse(&prefix).ok_or("not a kernel bundle")?;
    if prefix.version != FORMAT_VERSION {
        let got = prefix.version;
        return Err(format!("of version {got} of the bundle format, expected {FORMAT_VERSION}: build it again"));
    }
    if prefix.file_bytes() != file.metadata().map_err(unreadable)?.len() {
        return Err("damaged: cut off, or longer than it says".into());
    }
    let mut header = Vec::new();
    file.take(u64::from(prefix.header) + 32).read_to_end(&mut header).map_err(unreadable)?;
    let (header, checksum) = header.split_at(prefix.header as usize);
    if Sha256Hash::of(header).0 != checksum {
        return Err("damaged: wrong checksum of its header".into());
    }
    let sources = header.get(..32).ok_or("damaged: its header is too short")?;
    if sources != ours.0 {
        let got: String = sources.iter().map(|byte| format!("{byte:02x}")).collect();
        return Err(format!("built from kernel sources {got}, expected {ours}: build it again"));
    }
    Ok(())
}
