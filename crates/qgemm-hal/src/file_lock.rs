//! Inter-process file lock ([`FileLock`]).

use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::HalError;
use crate::mapped_file::check_regular;

/// Polling interval of a lock held by another process.
const PAUSE: Duration = Duration::from_millis(10);

/// Exclusive lock on a lock file, until drop or the end of the process.
///
/// The lock file is never removed. A waiting process has it open: after a removal,
/// another process could create and lock a new file, and both would hold the lock.
#[derive(Debug)]
pub struct FileLock {
    path: PathBuf,
    /// Locked while open.
    _file: File,
}

impl FileLock {
    /// Locks the file at `path`, creating it if needed. Waits at most `patience`, because
    /// a holder may be stopped, or unreachable on a network.
    ///
    /// # Errors
    /// [`HalError::File`] when the file cannot be opened or locked,
    /// or is locked for longer.
    pub fn take(path: impl AsRef<Path>, patience: Duration) -> Result<Self, HalError> {
        let (path, start) = (path.as_ref(), Instant::now());
        let failed = |message: String| HalError::File { path: path.to_owned(), call: "lock", message };
        // Opening a pipe would wait for its other end.
        match fs::metadata(path) {
            Ok(metadata) => check_regular(&metadata).map_err(|error| failed(error.to_string()))?,
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error.to_string())),
        }
        let file = File::options().create(true).truncate(false).write(true).open(path);
        let file = file.map_err(|error| failed(error.to_string()))?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { path: path.to_owned(), _file: file }),
                Err(TryLockError::WouldBlock) if start.elapsed() < patience => thread::sleep(PAUSE),
                Err(TryLockError::WouldBlock) => {
                    return Err(failed(format!("another process has held it for {:.1} s", patience.as_secs_f64())));
                }
                Err(TryLockError::Error(error)) => return Err(failed(error.to_string())),
            }
        }
    }

    /// Path of the lock file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// Path that no other test uses.
    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("qgemm-{name}-{}.lock", std::process::id()))
    }

    #[test]
    fn one_holder_at_a_time_and_waiting_has_an_end() {
        let path = path("one-holder");
        let first = FileLock::take(&path, LONG).expect("nobody holds it");
        let error = FileLock::take(&path, Duration::from_millis(50)).expect_err("it is held").to_string();
        assert!(error.contains("cannot lock") && error.contains("another process"), "{error}");
        thread::scope(|scope| {
            let second = scope.spawn(|| FileLock::take(&path, LONG).map(drop));
            thread::sleep(Duration::from_millis(100));
            assert!(!second.is_finished());
            drop(first);
            assert!(second.join().expect("no panic").is_ok());
        });
        fs::remove_file(&path).expect("it stays");
    }

    #[test]
    fn what_cannot_be_locked_is_an_error() {
        let below_a_file = path("below").join("lock");
        fs::write(path("below"), b"").expect("writable");
        for path in [&below_a_file, Path::new("/dev/zero"), Path::new(env!("CARGO_MANIFEST_DIR"))] {
            let error = FileLock::take(path, LONG).expect_err("no file");
            assert!(matches!(error, HalError::File { call: "lock", .. }), "{error}");
        }
        fs::remove_file(path("below")).expect("it is there");
    }
}
