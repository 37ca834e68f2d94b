//! Kernel sources with emulated atoms instead of the PTX atoms.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use qgemm_cuda::{KernelSpec, make_private_folder, source};
use tempfile::NamedTempFile;

use crate::model;

/// Emulated atoms and their dependencies, as (include name, text).
static ATOMS: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/atoms.rs"));

/// All files that kernels include.
pub(crate) fn files() -> impl Iterator<Item = (&'static str, &'static str)> {
    let replaced = |name: &str| ATOMS.iter().any(|(n, _)| *n == name);
    let kept = source::SOURCES.iter().filter(move |(name, _)| !replaced(name));
    kept.chain(ATOMS).copied()
}

/// Ensures that `folder` holds the files, whatever its
/// state. Files are written atomically, so that concurrent
/// processes do not disturb each other.
///
/// # Errors
/// When the folder cannot be written.
pub(crate) fn make(folder: &Path) -> io::Result<()> {
    complete(folder).or_else(|_| {
        // Something else is in the place of a file or folder.
        if folder.is_dir() {
            fs::remove_dir_all(folder)?
        } else {
            fs::remove_file(folder)?
        }
        complete(folder)
    })
}

/// Writes missing or changed files.
fn complete(folder: &Path) -> io::Result<()> {
    for (name, text) in files() {
        let path = folder.join(name);
        if fs::read(&path).is_ok_and(|found| found == text.as_bytes()) {
            continue;
        }
        let parent = path.parent().unwrap_or(folder);
        make_private_folder(parent)?;
        let mut file = NamedTempFile::new_in(parent)?;
        file.write_all(text.as_bytes())?;
        file.persist(path)?;
    }
    Ok(())
}

/// The translation unit of a kernel.
pub(crate) fn translation_unit(spec: &KernelSpec) -> String {
    let KernelSpec { entry, text, symbol, prelude, .. } = spec;
    format!(
        "#include \"atoms/types.cuh\"\n{}\n{prelude}\n#line 1 \"{entry}\"\n{text}\n#define QG_EMU_KERNEL {symbol}\n\
         #include \"entry.cuh\"\n",
        model::header()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_atom_in_ptx_has_its_model() {
        for (name, text) in source::SOURCES.iter().filter(|(name, _)| name.starts_with("atoms/")) {
            let replaced = ATOMS.iter().any(|(n, _)| n == name);
            assert!(replaced || !text.contains("asm"), "{name} holds PTX and has no emulated counterpart");
        }
    }
}
