//! Errors of bundles.

use std::io;
use std::path::PathBuf;

use crate::hash::Sha256Hash;

/// Why a bundle is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// The file cannot be read or written.
    #[error("{}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// The file is no bundle, is cut off, or was changed.
    #[error("{}: damaged: {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The file says that something in it is larger than what this library makes room for.
    #[error("{}: {part} of {got} bytes, expected at most {limit}", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// What is too large.
        part: &'static str,
        /// The most that is read or written.
        limit: u64,
        /// What the file says, or the kernel to be written has.
        got: u64,
    },
    /// The file was written by another version of this library, in another format.
    #[error("{}: of version {got} of the bundle format, this library reads {expected}: build it again", path.display())]
    OtherVersion {
        /// The file.
        path: PathBuf,
        /// The version that this library reads.
        expected: u32,
        /// The file's.
        got: u32,
    },
    /// The kernels were compiled from other sources than those of this library.
    #[error("{}: built from kernel sources {got}, this library has {expected}: build it again", path.display())]
    OtherSources {
        /// The file.
        path: PathBuf,
        /// Hash of this library's sources.
        expected: Sha256Hash,
        /// Hash of the bundle's.
        got: Sha256Hash,
    },
}
