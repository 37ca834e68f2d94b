//! [`Turn`]: who compiles a kernel that several processes want at once. It saves work and decides nothing: an entry is
//! whole or absent with and without it.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Between two looks at a lock that another process holds.
const PAUSE: Duration = Duration::from_millis(10);

/// Held while a kernel is compiled and added to the cache.
#[derive(Debug)]
pub(crate) struct Turn {
    /// The locked file, deleted at the end; `None` where nothing could be locked.
    lock: Option<(File, PathBuf)>,
}

impl Turn {
    /// Waits until no other process holds `path`, at most `patience`: a holder that does not get on (stopped, or behind
    /// a network that lost it) must not keep others from working. Where files cannot be locked, everyone works.
    pub(super) fn take(path: &Path, patience: Duration) -> Self {
        let start = Instant::now();
        let without = |why: &str| {
            tracing::debug!(path = %path.display(), why, "compiling without a lock");
            Self { lock: None }
        };
        let file = match File::options().create(true).truncate(false).write(true).open(path) {
            Ok(file) => file,
            Err(error) => return without(&error.to_string()),
        };
        loop {
            match file.try_lock() {
                Ok(()) => return Self { lock: Some((file, path.to_path_buf())) },
                Err(TryLockError::WouldBlock) if start.elapsed() < patience => thread::sleep(PAUSE),
                Err(TryLockError::WouldBlock) => return without("it was held for too long"),
                Err(TryLockError::Error(error)) => return without(&error.to_string()),
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let Some((_, path)) = &self.lock else { return };
        // Deleted while it is held. Whoever already waits for this file gets its turn when it is closed; whoever comes
        // later makes another file, and finds the entry.
        if let Err(error) = fs::remove_file(path) {
            tracing::debug!(path = %path.display(), %error, "a lock file stays");
        }
    }
}

#[cfg(test)]
mod tests {
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
