//! Atomic file replacement: readers see the old
//! file or the new one, and a writer that fails or
//! dies leaves the old one.

use std::fs::{self, File, OpenOptions};
#[cfg(any(test, feature = "write-bundles"))]
use std::io::BufWriter;
use std::io::{self, Write};
use std::path::Path;

use tempfile::{Builder, NamedTempFile};

/// Name prefix of unfinished files.
const PARTIAL: &str = ".qgemm-partial-";

/// Writes `bytes` to `path`, writable only by this user.
/// After a power loss the file may be damaged, so
/// readers must check its contents.
///
/// # Errors
/// System errors; nothing is left behind.
pub(crate) fn with(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = partial(path, &mut owners(File::options()))?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}

/// Lets `write` write the new file `path`, and
/// waits until it is on disk.
///
/// # Errors
/// Errors of `write` and of the system; nothing is left behind.
#[cfg(any(test, feature = "write-bundles"))]
pub(crate) fn durably(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let file = partial(path, &mut File::options())?;
    let mut buffer = BufWriter::new(file);
    write(&mut buffer)?;
    let file = buffer.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}

/// Open options for a file that others may read, subject
/// to the umask, but not write.
#[cfg_attr(not(unix), allow(unused_mut, reason = "modes are those of Unix"))]
fn owners(mut options: OpenOptions) -> OpenOptions {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o644);
    options
}

/// An unfinished file next to `path`, deleted on drop.
fn partial(path: &Path, options: &mut OpenOptions) -> io::Result<NamedTempFile> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let mut builder = Builder::new();
    builder.prefix(PARTIAL);
    builder.make_in(folder, |path| options.read(true).write(true).create_new(true).open(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            folder.read_dir().unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("made/when/needed/file");
        with(&path, b"one").unwrap();
        durably(&path, |file| file.write_all(b"another")).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"another");
        assert_eq!(names(path.parent().unwrap()), ["file"]);
    }

    #[test]
    fn a_full_disk_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let fails_late = |file: &mut dyn Write| {
            file.write_all(&vec![1; 1 << 20])?;
            Err(io::ErrorKind::StorageFull.into())
        };
        assert_eq!(durably(&path, fails_late).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(names(folder.path()).is_empty());
        with(&path, b"old").unwrap();
        durably(&path, fails_late).unwrap_err();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["file"]);
    }

    #[cfg(unix)]
    #[test]
    fn others_may_read_what_the_umask_lets_them() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (path, plain) = (folder.path().join("file"), folder.path().join("plain"));
        durably(&path, |_| Ok(())).unwrap();
        fs::write(&plain, b"").unwrap();
        let mode = |path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&path), mode(&plain));
        with(&path, b"").unwrap();
        assert_eq!(mode(&path), mode(&plain) & !0o022);
    }
}
