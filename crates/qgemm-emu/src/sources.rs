//! The kernel sources with the emulated atoms in the place of the ones in PTX.

use std::fs;
use std::io;
use std::path::Path;

use qgemm_cuda::{KernelSpec, source};

use crate::model;

/// The emulated atoms and what they call, as (include name, text).
static ATOMS: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/atoms.rs"));

/// Every file that kernels include.
pub(crate) fn files() -> impl Iterator<Item = (&'static str, &'static str)> {
    let replaced = |name: &str| ATOMS.iter().any(|(n, _)| *n == name);
    let kept = source::SOURCES.iter().filter(move |(name, _)| !replaced(name));
    kept.chain(ATOMS).copied()
}

/// Writes the files below `folder`.
pub(crate) fn write(folder: &Path) -> io::Result<()> {
    for (name, text) in files() {
        let path = folder.join(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(path, text)?;
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
