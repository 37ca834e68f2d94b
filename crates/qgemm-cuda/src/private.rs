//! Private folders and files with executable contents: only this user and
//! root may be able to change them. Outside Unix the system's
//! cache folder belongs to the user, and nothing is checked.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// Creates the folder with access for this user only,
/// or checks an existing one.
///
/// # Errors
/// System errors, and [`io::ErrorKind::PermissionDenied`] with the reason
/// when others can change the folder's contents.
pub fn make_private_folder(folder: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)?;
    check_folder(folder)
}

/// Checks an existing folder.
///
/// # Errors
/// As [`make_private_folder`].
pub(crate) fn check_folder(folder: &Path) -> io::Result<()> {
    let metadata = fs::metadata(folder)?;
    if !metadata.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    check(folder, &metadata)?;
    check_above(folder)
}

/// Reads a file in such a folder.
///
/// # Errors
/// As [`make_private_folder`], for the file.
pub fn read_private(path: &Path) -> io::Result<Vec<u8>> {
    // Check the opened file, because the name may
    // refer to another one by now.
    let mut file = File::open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{} is no file", path.display())));
    }
    check(path, &metadata)?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(unix)]
fn check(path: &Path, metadata: &fs::Metadata) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    match refusal(metadata.uid(), effective_user(), metadata.mode()) {
        None => Ok(()),
        Some(why) => Err(denied(path, &why)),
    }
}

/// Refuses a folder that others could replace.
#[cfg(unix)]
fn check_above(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;
    for above in fs::canonicalize(folder)?.ancestors().skip(1) {
        let mode = fs::metadata(above)?.mode();
        if mode & WRITABLE_BY_ALL != 0 && mode & STICKY == 0 {
            return Err(denied(above, &format!("everybody may rename what is in it (mode {:o})", mode & MODE_BITS)));
        }
    }
    Ok(())
}

#[cfg(not(unix))]
fn check(_: &Path, _: &fs::Metadata) -> io::Result<()> {
    Ok(())
}

#[cfg(not(unix))]
fn check_above(_: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(unix)]
const WRITABLE_BY_OTHERS: u32 = 0o022;
#[cfg(unix)]
const WRITABLE_BY_ALL: u32 = 0o002;
#[cfg(unix)]
const STICKY: u32 = 0o1000;
#[cfg(unix)]
const MODE_BITS: u32 = 0o7777;

/// Why `user` must not execute a file of `owner`
/// with `mode`, or `None`.
#[cfg(unix)]
fn refusal(owner: u32, user: u32, mode: u32) -> Option<String> {
    if owner != user && owner != 0 {
        return Some(format!("it belongs to user {owner}, and this process is user {user}"));
    }
    let others = mode & WRITABLE_BY_OTHERS != 0;
    others.then(|| format!("others than its owner may write it (mode {:o})", mode & MODE_BITS))
}

#[cfg(unix)]
fn denied(path: &Path, why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, format!("{} is not trusted: {why}", path.display()))
}

#[cfg(unix)]
fn effective_user() -> u32 {
    // SAFETY: the call has no arguments and always succeeds.
    unsafe { libc::geteuid() }
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown};

    use qgemm_testkit::skipped;

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_folder_is_made_for_this_user_alone() {
        let folder = tempfile::tempdir().unwrap();
        let made = folder.path().join("made/when/needed");
        make_private_folder(&made).unwrap();
        for folder in [&made, made.parent().unwrap()] {
            assert_eq!(fs::metadata(folder).unwrap().permissions().mode() & MODE_BITS, 0o700);
        }
        make_private_folder(&made).unwrap();
    }

    #[test]
    fn what_others_may_write_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (inner, file) = (folder.path().join("inner"), folder.path().join("inner/file"));
        make_private_folder(&inner).unwrap();
        fs::write(&file, b"code").unwrap();
        for (mode, trusted) in [(0o755, true), (0o500, true), (0o775, false), (0o777, false), (0o1777, false)] {
            set_mode(&inner, mode);
            assert_eq!(make_private_folder(&inner).is_ok(), trusted, "{mode:o}");
        }
        set_mode(&inner, 0o700);
        for (mode, trusted) in [(0o644, true), (0o600, true), (0o664, false), (0o666, false)] {
            set_mode(&file, mode);
            assert_eq!(read_private(&file).is_ok(), trusted, "{mode:o}");
        }
        set_mode(&file, 0o666);
        let error = read_private(&file).unwrap_err();
        assert!(error.kind() == io::ErrorKind::PermissionDenied && error.to_string().contains("mode 666"), "{error}");
    }

    #[test]
    fn a_folder_that_anybody_can_exchange_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("inner");
        make_private_folder(&inner).unwrap();
        for (mode, trusted) in [(0o1777, true), (0o755, true), (0o777, false)] {
            set_mode(folder.path(), mode);
            assert_eq!(make_private_folder(&inner).is_ok(), trusted, "{mode:o}");
        }
    }

    #[test]
    fn only_this_user_and_root_are_trusted() {
        assert_eq!(refusal(1000, 1000, 0o100_644), None);
        assert_eq!(refusal(0, 1000, 0o100_644), None);
        for (owner, user) in [(1000, 0), (1001, 1000)] {
            let why = refusal(owner, user, 0o100_600).unwrap();
            assert!(why.contains(&owner.to_string()) && why.contains(&user.to_string()), "{why}");
        }
    }

    #[test]
    fn a_file_of_another_user_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("planted");
        fs::write(&file, b"code").unwrap();
        if chown(&file, Some(12345), None).is_err() {
            skipped("a_file_of_another_user_is_refused", "only root can give files away");
            return;
        }
        let error = read_private(&file).unwrap_err();
        assert!(error.to_string().contains("belongs to user 12345"), "{error}");
    }

    #[test]
    fn a_folder_is_no_file() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read_private(folder.path()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
