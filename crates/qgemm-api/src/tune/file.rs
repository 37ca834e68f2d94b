//! Tuned-table files, which several processes may update concurrently.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, fs};

use qgemm_hal::{FileLock, HalError};
use qgemm_sched::TunedTable;

use crate::error::Error;
use crate::model::read_text;

/// Path of the tuned table: `QGEMM_TUNED`, else `qgemm/tuned.json` in the user's cache
/// folder. `None` without such a folder.
pub fn tuned_table_path() -> Option<PathBuf> {
    if let Some(path) = env::var_os("QGEMM_TUNED").filter(|path| !path.is_empty()) {
        return Some(path.into());
    }
    let folder = etcetera::choose_base_strategy().ok()?;
    Some(etcetera::BaseStrategy::cache_dir(&folder).join("qgemm").join("tuned.json"))
}

/// Reads a tuned table. `None` when the file does not exist.
///
/// # Errors
/// [`Error::Io`] when the file cannot be read, [`Error::Tuned`] when
/// its contents are invalid.
pub fn read_tuned(path: impl AsRef<Path>) -> Result<Option<TunedTable>, Error> {
    /// Maximum size of a table in bytes. An entry has a few hundred.
    const MOST: u64 = 256 << 20;
    match read_text(path.as_ref(), MOST) {
        Ok(text) => Ok(Some(TunedTable::from_json(&text)?)),
        Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Updates a tuned table, creating file and folder if needed. Returns the result
/// of `change` and the new table.
///
/// A lock file (name plus `.lock`) is held from reading to writing, so that concurrent
/// updates are not lost. The new table replaces the old one atomically.
///
/// ```
/// use qgemm_api::{tuning::TunedTable, update_tuned};
/// # let folder = tempfile::tempdir().expect("a writable folder");
/// # let path = folder.path().join("tuned.json");
/// # let (before, after) = (TunedTable::new(), TunedTable::new());
///
/// // After a tuning that began with `before` and ended with `after`:
/// let (_, table) = update_tuned(&path, |table| table.renew(after.measured_since(&before)))?;
/// # assert!(table.is_empty());
/// # Ok::<(), qgemm_api::Error>(())
/// ```
///
/// # Errors
/// As [`read_tuned`]. [`Error::Hal`] when the lock is not acquired within ten seconds,
/// or the file cannot be written.
pub fn update_tuned<R>(
    path: impl AsRef<Path>,
    change: impl FnOnce(&mut TunedTable) -> R,
) -> Result<(R, TunedTable), Error> {
    /// Timeout of the lock, which other processes hold for milliseconds.
    const PATIENCE: Duration = Duration::from_secs(10);
    let path = path.as_ref();
    let failed = |error: io::Error| HalError::File { path: path.to_owned(), call: "write", message: error.to_string() };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(failed)?;
    let mut lock: OsString = path.into();
    lock.push(".lock");
    let _lock = FileLock::take(Path::new(&lock), PATIENCE)?;
    let before = read_tuned(path)?;
    let mut table = before.clone().unwrap_or_default();
    let result = change(&mut table);
    if before.as_ref() != Some(&table) {
        replace(path, folder, table.to_json()?.as_bytes()).map_err(failed)?;
    }
    Ok((result, table))
}

/// Atomically replaces the file at `path` by one with `contents`.
fn replace(path: &Path, folder: &Path, contents: &[u8]) -> io::Result<()> {
    let mut file = tempfile::Builder::new()
        .prefix(".qgemm-tuned-")
        .make_in(folder, |path| fs::File::options().read(true).write(true).create_new(true).open(path))?;
    file.write_all(contents)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}
