//! Files beside a model: their texts and JSON.

use std::path::Path;

use qgemm_api::{model_files, strict_json};
use serde_json::Value;

use crate::error::Error;

/// The text of the file `name` in the folder of the model at `path`, if there is one.
///
/// # Errors
/// [`Error::Io`], and when the model's files are not found.
pub fn text_beside(path: &Path, name: &str) -> Result<Option<String>, Error> {
    let files = model_files(path)?;
    let Some(folder) = files.first().and_then(|file| file.parent()) else { return Ok(None) };
    let path = folder.join(name);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Io { path, source }),
    }
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
