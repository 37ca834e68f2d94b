//! Bundle search order ([`Bundles`]): the user's
//! bundles, then embedded ones.

use std::cmp::Reverse;
use std::io;
use std::path::{Path, PathBuf};

use super::{Bundle, BundleError, EXTENSION};
use crate::artifact::Artifact;
use crate::spec::KernelSpec;

/// User's bundles: folders and files, separated as in `PATH`.
pub const BUNDLES_VARIABLE: &str = "QGEMM_KERNELS";

/// Bundles that run on a chip, and the reasons against others.
#[derive(Debug, Default)]
pub(crate) struct Bundles {
    open: Vec<Bundle>,
    refused: Vec<String>,
}

impl Bundles {
    /// Opens the bundles in `QGEMM_KERNELS`, then embedded ones, so that a user
    /// can replace the latter.
    pub(crate) fn of_user(chip: u32) -> Self {
        let named = std::env::var_os(BUNDLES_VARIABLE).unwrap_or_default();
        let mut bundles = Self::at(std::env::split_paths(&named).filter(|p| !p.as_os_str().is_empty()), chip);
        match Bundle::embedded() {
            Ok(embedded) => bundles.append(embedded, chip),
            Err(error) => bundles.refuse(&error),
        }
        bundles
    }

    /// Opens the bundles in files and folders `paths`.
    pub(crate) fn at(paths: impl Iterator<Item = PathBuf>, chip: u32) -> Self {
        let mut bundles = Self::default();
        let mut named = Vec::new();
        for path in paths {
            match files(&path) {
                Ok(files) => named.extend(files),
                Err(error) => bundles.refuse(&BundleError::Io { path, error }),
            }
        }
        let open = named.iter().filter_map(|file| Bundle::open(file).map_err(|e| bundles.refuse(&e)).ok()).collect();
        bundles.append(open, chip);
        bundles
    }

    /// Appends the bundles of `more` that run on `chip`.
    fn append(&mut self, mut more: Vec<Bundle>, chip: u32) {
        more.retain(|bundle| {
            let runs = bundle.target.runs_on(chip);
            if !runs {
                tracing::debug!(path = %bundle.path.display(), target = %bundle.target, "a bundle for other chips");
            }
            runs
        });
        // Machine code of this chip, then of its family, then PTX; newest first.
        more.sort_by_key(|b| (b.target.is_ptx(), Reverse(b.target.arch())));
        self.open.extend(more);
    }

    fn refuse(&mut self, error: &BundleError) {
        tracing::warn!(%error, "a kernel bundle is not used");
        self.refused.push(error.to_string());
    }

    /// Kernel `spec` from the first bundle that has it. Damaged bundles
    /// are reported and skipped.
    pub(crate) fn find(&self, spec: &KernelSpec, chip: u32) -> Option<Artifact> {
        self.open.iter().find_map(|bundle| {
            bundle.read(spec, chip).unwrap_or_else(|error| {
                tracing::warn!(kernel = spec.name, %error, "a bundled kernel is not used");
                None
            })
        })
    }

    /// Reasons why bundles are not used.
    pub(crate) fn refused(&self) -> &[String] {
        &self.refused
    }
}

/// The bundle at `path`, or all bundles in the folder `path`.
pub(crate) fn files(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let mut files = Vec::new();
    for entry in path.read_dir()? {
        let file = entry?.path();
        if file.extension().is_some_and(|e| e == EXTENSION) {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{kernel, write};
    use super::*;
    use crate::jit::tests::probe;

    fn bundles(folder: &Path, chip: u32) -> Bundles {
        Bundles::at([folder.to_path_buf()].into_iter(), chip)
    }

    #[test]
    fn machine_code_of_the_chip_comes_before_ptx() {
        let folder = tempfile::tempdir().unwrap();
        for target in ["compute_70", "compute_80", "sm_80", "sm_86"] {
            write(folder.path(), target, &[kernel("A", target)]);
        }
        let best = |chip| bundles(folder.path(), chip).find(&probe("A"), chip).map(|a| a.target.to_string());
        assert_eq!(best(86).as_deref(), Some("sm_86"));
        assert_eq!(best(80).as_deref(), Some("sm_80"));
        assert_eq!(best(90).as_deref(), Some("compute_80"));
        assert_eq!(best(75).as_deref(), Some("compute_70"));
        assert_eq!(bundles(folder.path(), 86).find(&probe("B"), 86), None);
    }

    #[test]
    fn what_the_user_named_comes_before_what_is_embedded() {
        let folder = tempfile::tempdir().unwrap();
        let bytes = |target, name| {
            let path = write(folder.path(), target, &[kernel(name, target)]);
            let bytes = std::fs::read(&path).unwrap();
            std::fs::remove_file(path).unwrap();
            Bundle::of_program(target, bytes.leak()).unwrap()
        };
        let embedded = vec![bytes("sm_86", "A"), bytes("sm_80", "B"), bytes("sm_90", "C")];
        write(folder.path(), "compute_70", &[kernel("A", "compute_70")]);
        let mut bundles = bundles(folder.path(), 86);
        bundles.append(embedded, 86);
        let target = |name| bundles.find(&probe(name), 86).map(|a| a.target.to_string());
        assert_eq!(target("A").as_deref(), Some("compute_70"));
        assert_eq!(target("B").as_deref(), Some("sm_80"));
        assert_eq!(target("C"), None, "another chip's");
    }

    #[test]
    fn a_bundle_that_is_refused_is_named_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("no.qgk"), b"a text that is longer than the first bytes of a bundle")
            .unwrap();
        std::fs::write(folder.path().join("notes.txt"), b"not looked at").unwrap();
        let missing = folder.path().join("none.qgk");
        let bundles = Bundles::at([folder.path().to_path_buf(), missing].into_iter(), 90);
        let [first, second] = bundles.refused() else { panic!("{:?}", bundles.refused()) };
        assert!(first.contains("none.qgk") || second.contains("none.qgk"));
        assert!([first, second].iter().any(|why| why.contains("no.qgk: damaged: not a kernel bundle")));
    }
}
