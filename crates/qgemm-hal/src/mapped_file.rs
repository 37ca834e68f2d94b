//! Memory-mapped files, from which model readers slice
//! tensors without copying.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::HalError;

/// A read-only file mapping.
///
/// The file must not be written or truncated while it is
/// mapped: readers would see changing bytes, and reading beyond a new
/// end kills the process. Renaming another file over it is fine.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// [`HalError::File`] when it is not a regular file (pipes and devices
    /// are not even opened), or cannot be opened or mapped.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, HalError> {
        let path = path.as_ref();
        let failed = |call, e: std::io::Error| HalError::File { path: path.into(), call, message: e.to_string() };
        check_regular(&std::fs::metadata(path).map_err(|e| failed("open", e))?).map_err(|e| failed("open", e))?;
        let file = File::open(path).map_err(|e| failed("open", e))?;
        // SAFETY: the mapping is read-only and private to this object. The
        // type's documentation requires that nobody writes to the file meanwhile;
        // no operating system lets us enforce it.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| failed("map", e))?;
        Ok(Self { path: path.into(), map })
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

/// Checks that a file is regular. Opening a pipe blocks until
/// its other end is open, and devices have no end.
///
/// # Errors
/// The actual kind of the file, when it is not regular.
pub fn check_regular(metadata: &std::fs::Metadata) -> std::io::Result<()> {
    let kind = metadata.file_type();
    if kind.is_file() {
        return Ok(());
    }
    let got = if kind.is_dir() { "a folder" } else { "a pipe, socket or device" };
    Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, format!("expected a regular file, got {got}")))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use qgemm_formats::SharedBytes;

    use super::*;

    #[test]
    fn maps_what_the_file_holds() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let file = MappedFile::open(path).expect("there");
        assert_eq!(file.as_ref(), std::fs::read(path).expect("there"));
        let shared = SharedBytes::new(Arc::new(file));
        assert_eq!(&*shared.slice(0..9).expect("in range"), b"[package]");
    }

    #[test]
    fn what_is_no_regular_file_is_refused() {
        let folder = MappedFile::open(env!("CARGO_MANIFEST_DIR")).expect_err("a folder").to_string();
        assert!(folder.contains("got a folder"), "{folder}");
        #[cfg(unix)]
        for device in ["/dev/zero", "/dev/null"] {
            let error = MappedFile::open(device).expect_err("a device").to_string();
            assert!(error.contains("device") && error.contains(device), "{error}");
        }
    }

    #[test]
    fn a_missing_file_is_an_error_that_names_it() {
        let error = MappedFile::open("/nowhere/model.gguf").expect_err("not there");
        assert!(matches!(&error, HalError::File { call: "open", .. }));
        assert!(error.to_string().contains("/nowhere/model.gguf"), "{error}");
    }
}
