//! [`Finding`] and [`Source`], which all checks share.

use std::fmt;
use std::path::PathBuf;

/// A broken rule, with its location.
pub struct Finding {
    /// File relative to the root, and a 1-based line if known.
    place: (PathBuf, Option<usize>),
    /// Broken rule, and the remedy.
    what: String,
}

impl Finding {
    pub fn in_file(file: impl Into<PathBuf>, what: impl Into<String>) -> Self {
        Self { place: (file.into(), None), what: what.into() }
    }

    pub fn at(file: impl Into<PathBuf>, line: usize, what: impl Into<String>) -> Self {
        Self { place: (file.into(), Some(line)), what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            (file, Some(line)) => write!(f, "{}:{line}: {}", file.display(), self.what),
            (file, None) => write!(f, "{}: {}", file.display(), self.what),
        }
    }
}

/// A source file with its text.
pub struct Source {
    pub path: PathBuf,
    pub text: String,
}
