//! Atomically written files: written under a temporary name
//! beside the target, and renamed when complete. SIGINT and SIGTERM
//! remove unfinished ones.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, Once, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail, ensure};

/// Treatment of an existing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// Replace it when the new file is complete.
    Replace,
    /// Fail.
    Refuse,
}

/// A file in progress. Dropped unfinished, it is removed. If the
/// process is killed, the next run removes it.
pub struct WholeFile {
    target: PathBuf,
    existing: Existing,
    partial: PathBuf,
    /// Locked while this run lives: other runs then keep it.
    file: File,
    finished: bool,
}

impl WholeFile {
    /// Begins a file at `target`, whose folder must be writable.
    /// Leftovers of killed runs are removed.
    ///
    /// # Errors
    /// When an existing file may not be replaced, the target is not a
    /// regular file, or the folder is missing or not writable.
    pub fn create(target: &Path, existing: Existing) -> anyhow::Result<Self> {
        /// Number of names to try. One is free unless somebody creates
        /// all of them.
        const TRIES: u32 = 100;
        check(target, existing)?;
        let folder = folder_of(target);
        let prefix = prefix(target)?;
        remove_abandoned(folder, &prefix);
        for attempt in 0..TRIES {
            let nanoseconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.subsec_nanos());
            let name = format!("{prefix}{}-{nanoseconds:09}{attempt:02}{SUFFIX}", std::process::id());
            let partial = folder.join(name);
            // An existing name, even a link, is never opened.
            let file = match begin(&partial) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
                file => file.with_context(|| format!("{} cannot be written", target.display()))?,
            };
            // Without file locks other runs remove nothing either.
            let _ = file.lock();
            // Between creating and locking, another run may have removed it
            // as abandoned.
            if partial.exists() {
                return Ok(Self { target: target.to_owned(), existing, partial, file, finished: false });
            }
            forget(&partial);
        }
        bail!("{}: no temporary file could be made beside it", target.display())
    }

    /// The file to write to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Renames the complete file to the target.
    ///
    /// # Errors
    /// When writing to disk fails, or another file has appeared at
    /// the target.
    pub fn finish(mut self) -> anyhow::Result<()> {
        let place = || -> anyhow::Result<()> {
            self.file.sync_all()?;
            check(&self.target, self.existing)?;
            if self.existing == Existing::Refuse {
                // Unlike a rename, a link never replaces a file created since
                // the check.
                match fs::hard_link(&self.partial, &self.target) {
                    Ok(()) => return Ok(fs::remove_file(&self.partial)?),
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => return Err(error.into()),
                    // Not every file system has hard links.
                    Err(_) => {}
                }
            }
            Ok(fs::rename(&self.partial, &self.target)?)
        };
        place().with_context(|| format!("writing {}", self.target.display()))?;
        self.finished = true;
        forget(&self.partial);
        Ok(())
    }

    /// Writes `contents`, and finishes the file.
    ///
    /// # Errors
    /// As [`WholeFile::finish`], and when the disk is full.
    pub fn finish_with(self, contents: &[u8]) -> anyhow::Result<()> {
        self.file().write_all(contents).with_context(|| format!("writing {}", self.target.display()))?;
        self.finish()
    }
}

impl Drop for WholeFile {
    fn drop(&mut self) {
        if !self.finished {
            // An incomplete file is useless. A failure to remove it matters
            // less than the first error.
            let _ = fs::remove_file(&self.partial);
            forget(&self.partial);
        }
    }
}

/// Unfinished files of this process.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Exit status after a signal, as of a program that SIGINT ends.
const INTERRUPTED: i32 = 128 + 2;

/// Creates the file at `partial`, which a signal removes from now on.
fn begin(partial: &Path) -> std::io::Result<File> {
    static HANDLER: Once = Once::new();
    // Without a handler the next run removes what this one leaves.
    HANDLER.call_once(|| drop(ctrlc::set_handler(remove_and_exit)));
    // The handler waits for a file that is just being created.
    let mut unfinished = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
    let file = OpenOptions::new().write(true).create_new(true).open(partial)?;
    unfinished.push(partial.to_owned());
    Ok(file)
}

fn forget(partial: &Path) {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner).retain(|path| path != partial);
}

/// Handles SIGINT and SIGTERM. The lock is kept, so that no file
/// is begun afterwards.
fn remove_and_exit() {
    let unfinished = UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner);
    unfinished.iter().for_each(|path| drop(fs::remove_file(path)));
    std::process::exit(INTERRUPTED)
}

/// Checks that `target` may be written.
///
/// # Errors
/// As [`WholeFile::create`], except for the folder's permissions.
fn check(target: &Path, existing: Existing) -> anyhow::Result<()> {
    let shown = target.display();
    match fs::symlink_metadata(target) {
        Ok(metadata) => {
            let kind = metadata.file_type();
            ensure!(!kind.is_dir(), "{shown} is a folder: name a file in it");
            ensure!(!kind.is_symlink(), "{shown} is a symbolic link: name the file that it stands for");
            ensure!(kind.is_file(), "{shown} is no regular file, and would be replaced by one");
            ensure!(existing == Existing::Replace, "{shown} is there already: --force replaces it");
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let folder = folder_of(target);
            ensure!(folder.is_dir(), "{shown}: there is no folder {}", folder.display());
        }
        Err(error) => return Err(error).with_context(|| shown.to_string()),
    }
    Ok(())
}

const SUFFIX: &str = ".partial";

/// Common prefix of temporary names.
fn prefix(target: &Path) -> anyhow::Result<String> {
    // File names are limited to 255 bytes.
    const MOST: usize = 40;
    let name = target.file_name().with_context(|| format!("{} is no name of a file", target.display()))?;
    Ok(format!(".{}.qgemm-", name.to_string_lossy().chars().take(MOST).collect::<String>()))
}

fn folder_of(target: &Path) -> &Path {
    match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Removes unfinished files of dead runs. Failures are ignored:
/// another user may own them.
fn remove_abandoned(folder: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let is_ours = name.to_str().is_some_and(|name| name.starts_with(prefix) && name.ends_with(SUFFIX));
        if !is_ours || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let Ok(file) = OpenOptions::new().write(true).open(entry.path()) else { continue };
        match file.try_lock() {
            Ok(()) => drop(fs::remove_file(entry.path())),
            Err(TryLockError::WouldBlock | TryLockError::Error(_)) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("readable").flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn files_are_whole_or_not_there() {
        let folder = tempfile::tempdir().expect("writable");
        let target = folder.path().join("out");
        let mut begun = WholeFile::create(&target, Existing::Refuse).expect("writable");
        begun.file.write_all(b"half").expect("written");
        assert_eq!(names(folder.path()).len(), 1);
        drop(begun);
        assert_eq!(names(folder.path()), Vec::<String>::new());
        WholeFile::create(&target, Existing::Refuse).expect("writable").finish_with(b"first").expect("written");
        let refused = WholeFile::create(&target, Existing::Refuse).err().expect("it is there").to_string();
        assert!(refused.contains("--force"), "{refused}");
        WholeFile::create(&target, Existing::Replace).expect("writable").finish_with(b"second").expect("written");
        assert_eq!((fs::read(&target).expect("there"), names(folder.path())), (b"second".to_vec(), vec!["out".into()]));
    }

    #[test]
    fn what_others_write_meanwhile_stays() {
        let folder = tempfile::tempdir().expect("writable");
        let target = folder.path().join("out");
        let [first, second] = [0, 1].map(|_| WholeFile::create(&target, Existing::Refuse).expect("names of their own"));
        assert_eq!(names(folder.path()).len(), 2);
        first.finish_with(b"first").expect("written");
        let late = second.finish_with(b"second").expect_err("the first is there");
        assert!(format!("{late:#}").contains("is there already"), "{late:#}");
        assert_eq!((fs::read(&target).expect("there"), names(folder.path())), (b"first".to_vec(), vec!["out".into()]));
    }

    #[test]
    fn what_killed_runs_left_is_removed() {
        let folder = tempfile::tempdir().expect("writable");
        let left = folder.path().join(".out.qgemm-123-45.partial");
        let others = [".other.qgemm-123-45.partial", "out.partial", ".out.qgemm-notes"];
        for path in others.map(|name| folder.path().join(name)).iter().chain([&left]) {
            fs::write(path, "left").expect("written");
        }
        let begun = WholeFile::create(&folder.path().join("out"), Existing::Refuse).expect("writable");
        assert!(!left.exists());
        assert!(others.iter().all(|name| folder.path().join(name).exists()), "{:?}", names(folder.path()));
        drop(begun);
    }

    #[cfg(unix)]
    #[test]
    fn only_regular_files_are_replaced() {
        let folder = tempfile::tempdir().expect("writable");
        let path = |name: &str| folder.path().join(name);
        fs::write(path("file"), "kept").expect("written");
        std::os::unix::fs::symlink(path("file"), path("link")).expect("made");
        fs::create_dir(path("folder")).expect("made");
        for (target, why) in
            [(path("link"), "symbolic link"), (path("folder"), "a folder"), ("/dev/null".into(), "no regular file")]
        {
            let error = WholeFile::create(&target, Existing::Replace).err().expect("refused").to_string();
            assert!(error.contains(why), "{error}");
        }
        let nowhere = WholeFile::create(&path("none/out"), Existing::Replace).err().expect("refused").to_string();
        assert!(nowhere.contains("there is no folder"), "{nowhere}");
        assert_eq!(fs::read(path("file")).expect("there"), b"kept");
    }
}
