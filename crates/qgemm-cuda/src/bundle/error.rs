//! Errors of bundles.

use std::io;
use std::path::PathBuf;

use crate::hash::Sha256Hash;

/// Errors of bundles.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// Read or write error.
    #[error("{}: {error}", path.display())]
    Io {
        /// File path.
        path: PathBuf,
        /// System error.
        error: io::Error,
    },
    /// Truncated or modified file, or no bundle at all.
    #[error("{}: damaged: {what}", path.display())]
    Damaged {
        /// File path.
        path: PathBuf,
        /// Description of the damage.
        what: String,
    },
    /// Part beyond the size limit.
    #[error("{}: {part} of {got} bytes, expected at most {limit}", path.display())]
    TooLarge {
        /// File path.
        path: PathBuf,
        /// Name of the part.
        part: &'static str,
        /// Size limit in bytes.
        limit: u64,
        /// Size in the file, or of the kernel to be written.
        got: u64,
    },
    /// Bundle of another format version.
    #[error("{}: expected version {expected} of the bundle format, got {got}: build it again", path.display())]
    OtherVersion {
        /// File path.
        path: PathBuf,
        /// Supported format version.
        expected: u32,
        /// Format version of the file.
        got: u32,
    },
    /// Bundle of other kernel sources.
    #[error("{}: expected kernel sources {expected}, got {got}: build it again", path.display())]
    OtherSources {
        /// File path.
        path: PathBuf,
        /// Hash of this library's sources.
        expected: Sha256Hash,
        /// Hash of the bundle's sources.
        got: Sha256Hash,
    },
}
