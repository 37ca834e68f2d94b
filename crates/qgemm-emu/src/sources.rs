//! The kernel sources with the emulated atoms in the place of the ones in PTX.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use qgemm_cuda::{KernelSpec, make_private_folder, source};
use tempfile::NamedTempFile;

use crate::model;

/// The emulated atoms and what they call, as (include name, text).
static ATOMS: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/atoms.rs"));

/// Every file that kernels include.
pub(crate) fn files() -> impl Iterator<Item = (&'static str, &'static str)> {
    let replaced = |name: &str| ATOMS.iter().any(|(n, _)| *n == name);
    let kept = source::SOURCES.iter().filter(move |(name, _)| !replaced(name));
    kept.chain(ATOMS).copied()
}

/// Makes sure that `folder` holds the files, whatever became of it. Each is written in one step, so that processes that do so at
/// once do not disturb one another.
///
/// # Errors
/// When it cannot be written.
pub(crate) fn make(folder: &Path) -> io::Result<()> {
    complete(folder).or_else(|_| {
        // Something else stands where a file or a folder should.
        if folder.is_dir() {
            fs::remove_dir_all(folder)?
        } else {
            fs::remove_file(folder)?
        }
        complete(folder)
    })
}

/// Writes the files that are not there or not as they should be.
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

/// What the compiler gets for a kernel.
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
