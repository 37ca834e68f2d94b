//! `cargo xtask tidy`: repository rules that the compiler does not check.

mod comments;
mod device_sources;
mod format_names;
mod layering;
mod module_order;
mod operation_guide;
mod rust_sources;

use std::fmt;
use std::path::PathBuf;

use anyhow::bail;

use crate::workspace;

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {}

/// A broken rule, with its location.
pub struct Finding {
    /// File relative to the root, and a 1-based line if known.
    place: (PathBuf, Option<usize>),
    /// Broken rule, and the remedy.
    what: String,
}

impl Finding {
    fn in_file(file: impl Into<PathBuf>, what: impl Into<String>) -> Self {
        Self { place: (file.into(), None), what: what.into() }
    }

    fn at(file: impl Into<PathBuf>, line: usize, what: impl Into<String>) -> Self {
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
struct Source {
    path: PathBuf,
    text: String,
}

/// Runs the command.
///
/// # Errors
/// When a rule is broken, or git or cargo fails.
pub fn run(_args: &Args) -> anyhow::Result<()> {
    let mut sources = Vec::new();
    for path in workspace::files()? {
        let bytes = std::fs::read(workspace::root().join(&path))?;
        // Samples and golden files are not sources.
        if let Ok(text) = String::from_utf8(bytes) {
            sources.push(Source { path, text });
        }
    }
    let mut findings = layering::check()?;
    findings.extend(rust_sources::check(&sources));
    findings.extend(device_sources::check(&sources));
    findings.extend(comments::check(&sources));
    findings.extend(module_order::check(&sources));
    findings.extend(operation_guide::check(&sources));
    for finding in &findings {
        eprintln!("{finding}");
    }
    match findings.len() {
        0 => {
            println!("tidy: {} files, no rule broken", sources.len());
            Ok(())
        }
        count => bail!("tidy: {count} findings"),
    }
}
