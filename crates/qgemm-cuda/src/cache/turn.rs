//! Compilation turns ([`Turn`]): only one of several processes compiles
//! a kernel. They save work but guarantee nothing: entries are complete
//! or absent in any case.

use std::fs;
use std::path::Path;
use std::time::Duration;

use qgemm_hal::FileLock;

/// Held during compilation of a kernel.
#[derive(Debug)]
pub(crate) struct Turn {
    /// Lock, whose file is deleted on drop. `None` if
    /// nothing could be locked.
    lock: Option<FileLock>,
}

impl Turn {
    /// Waits at most `patience` for `path`, so that a stuck holder cannot
    /// block others. Without file locks, everyone compiles.
    pub(super) fn take(path: &Path, patience: Duration) -> Self {
        let lock = FileLock::take(path, patience);
        Self { lock: lock.inspect_err(|error| tracing::debug!(%error, "compiling without a lock")).ok() }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some(path) = self.lock.as_ref().map(FileLock::path) else { return };
        // Deleted while locked. A process already waiting for this file
        // gets its turn when it closes; a later process makes another
        // file and finds the entry.
        if let Err(error) = fs::remove_file(path) {
            tracing::debug!(path = %path.display(), %error, "a lock file stays");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Instant;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn others_wait_for_the_holder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.lock");
        let first = Turn::take(&path, LONG);
        assert!(first.lock.is_some());
        thread::scope(|scope| {
            let second = scope.spawn(|| {
                let start = Instant::now();
                assert!(Turn::take(&path, LONG).lock.is_some());
                start.elapsed()
            });
            thread::sleep(Duration::from_millis(200));
            drop(first);
            let waited = second.join().unwrap();
            assert!((100..10_000).contains(&waited.as_millis()), "{waited:?}");
        });
        assert!(!path.exists());
    }

    #[test]
    fn a_holder_that_does_not_get_on_is_not_waited_for_forever() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.lock");
        let _first = Turn::take(&path, LONG);
        let second = Turn::take(&path, Duration::from_millis(50));
        assert!(second.lock.is_none());
        drop(second);
        assert!(path.exists(), "it is the holder's");
    }

    #[test]
    fn where_nothing_can_be_locked_everyone_works() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Turn::take(&folder.path().join("no/folder/a.lock"), LONG).lock.is_none());
    }
}
