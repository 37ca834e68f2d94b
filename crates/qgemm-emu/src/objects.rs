//! [`Objects`]: a folder of shared objects that only this user can have written.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use qgemm_cuda::{Sha256Hash, make_private_folder, read_private};
use tempfile::{Builder, NamedTempFile, TempDir};

/// A folder of objects and notes. A note is named
/// after an object's build inputs, and contains the
/// object's name and content hash.
pub(crate) struct Objects<'a> {
    folder: &'a Path,
}

impl<'a> Objects<'a> {
    /// Opens the folder, creating it if necessary.
    ///
    /// # Errors
    /// System errors, and a refusal when others can
    /// write to the folder.
    pub(crate) fn open(folder: &'a Path) -> io::Result<Self> {
        make_private_folder(folder)?;
        Ok(Self { folder })
    }

    /// Path of the note for `key`.
    pub(crate) fn note_path(&self, key: &[&str]) -> PathBuf {
        let hash = Sha256Hash::of(key.join("\0").as_bytes());
        self.folder.join(format!("{hash}.note"))
    }

    /// The object that a note names, if both are trusted
    /// and the object is intact.
    pub(crate) fn noted(&self, note: &Path) -> Option<PathBuf> {
        let text = String::from_utf8(self.read(note)?).ok()?;
        let (name, hash) = text.split_once('\n')?;
        // Only the file name, so that the path
        // cannot leave the folder.
        let object = self.folder.join(Path::new(name).file_name()?);
        if Sha256Hash::of(&self.read(&object)?).to_string() == hash {
            return Some(object);
        }
        tracing::warn!(object = %object.display(), "a damaged kernel is compiled again");
        None
    }

    /// Adds an object with the note `note`.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub(crate) fn add(&self, note: &Path, contents: &[u8]) -> io::Result<PathBuf> {
        let object = note.with_extension("so");
        self.write(&object, contents)?;
        self.note(note, &object)?;
        Ok(object)
    }

    /// Writes `note` for the intact `object`.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub(crate) fn note(&self, note: &Path, object: &Path) -> io::Result<()> {
        let hash = Sha256Hash::of(&fs::read(object)?);
        let name = object.file_name().unwrap_or_default().to_string_lossy();
        self.write(note, format!("{name}\n{hash}").as_bytes())
    }

    /// Reads an existing, trusted file.
    fn read(&self, path: &Path) -> Option<Vec<u8>> {
        match read_private(path) {
            Ok(bytes) => Some(bytes),
            Err(error) => {
                if error.kind() != io::ErrorKind::NotFound {
                    tracing::warn!(path = %path.display(), %error, "a kept kernel is not used");
                }
                None
            }
        }
    }

    /// Atomically writes a file for this user only.
    fn write(&self, path: &Path, contents: &[u8]) -> io::Result<()> {
        let mut file = NamedTempFile::new_in(self.folder)?;
        file.write_all(contents)?;
        file.persist(path)?;
        Ok(())
    }
}

/// A folder for this user only, removed on drop.
pub(crate) fn temporary_folder() -> io::Result<TempDir> {
    let mut builder = Builder::new();
    builder.prefix("qgemm-emu-");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700));
    builder.tempdir()
}
