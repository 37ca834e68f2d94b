//! Files beside a model: their texts and JSON.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _};
use std::path::Path;

use qgemm_api::{model_files, strict_json};
use serde_json::Value;

use crate::error::Error;

/// Size limit. The tokenizers of the largest vocabularies have a
/// few ten million bytes.
const MOST: u64 = 256 << 20;

/// The text of the file `name` in the folder of the model at `path`, if there is one.
///
/// # Errors
/// [`Error::Io`], and when the model's files are not found.
pub fn text_beside(path: &Path, name: &str) -> Result<Option<String>, Error> {
    let files = model_files(path)?;
    let Some(folder) = files.first().and_then(|file| file.parent()) else { return Ok(None) };
    let path = folder.join(name);
    match regular_text(&path) {
        Ok(text) => Ok(Some(text)),
        Err(source) if source.kind() == ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Io { path, source }),
    }
}

/// The text of a regular file of at most [`MOST`] bytes. A pipe is not
/// opened, because that waits for its other end.
fn regular_text(path: &Path) -> io::Result<String> {
    let expected = || {
        let message = format!("expected a regular file of at most {MOST} bytes");
        io::Error::new(ErrorKind::InvalidInput, message)
    };
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() || metadata.len() > MOST {
        return Err(expected());
    }
    let mut text = String::new();
    // The file may have grown meanwhile.
    let bytes = File::open(path)?.take(MOST + 1).read_to_string(&mut text)?;
    if bytes as u64 <= MOST { Ok(text) } else { Err(expected()) }
}

/// The JSON of the file `name` in the folder of the model at `path`, if there is one.
///
/// # Errors
/// As [`text_beside`]; [`Error::Json`].
pub fn json_beside(path: &Path, name: &str) -> Result<Option<Value>, Error> {
    let Some(text) = text_beside(path, name)? else { return Ok(None) };
    let parsed = serde_json::from_str(&strict_json(&text));
    parsed.map(Some).map_err(|source| Error::Json { path: path.join(name), source })
}
