//! Atomic replacement of files.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use anyhow::Context;

/// Atomically writes `contents` to `path`: an interrupted
/// command leaves the old file.
///
/// # Errors
/// When writing fails.
pub fn write(path: &Path, contents: &[u8]) -> anyhow::Result<()> {
    let write = || -> anyhow::Result<()> {
        let folder = path.parent().context("it has no folder")?;
        let begin = |path: &Path| File::create_new(path);
        let mut file = tempfile::Builder::new().prefix(".unfinished-").make_in(folder, begin)?;
        file.write_all(contents)?;
        file.persist(path)?;
        Ok(())
    };
    write().with_context(|| format!("writing {}", path.display()))
}
