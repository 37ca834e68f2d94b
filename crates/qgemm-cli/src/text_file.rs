//! Reading small files of text.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, ensure};

/// Bytes of a file, at most: plans of the largest models and results of thousands of cases have a few million.
const MOST: u64 = 64 << 20;

/// The text of a regular file of at most [`MOST`] bytes. A pipe is not opened, since that waits for its other end, and of a file that
/// is too long nothing is read.
///
/// # Errors
/// When it is something else, too long, no UTF-8, or cannot be read.
pub fn read(path: &Path) -> anyhow::Result<String> {
    let reading = || format!("reading {}", path.display());
    let metadata = fs::metadata(path).with_context(reading)?;
    let kind = if metadata.is_dir() { "a folder" } else { "a pipe, socket or device" };
    ensure!(metadata.is_file(), "{}: expected a regular file, got {kind}", path.display());
    let check = |bytes: u64| -> anyhow::Result<()> {
        ensure!(bytes <= MOST, "{}: expected at most {MOST} bytes, got {bytes}", path.display());
        Ok(())
    };
    check(metadata.len())?;
    let mut text = String::new();
    let file = File::open(path).with_context(reading)?;
    // The file may have grown since.
    let bytes = file.take(MOST + 1).read_to_string(&mut text).with_context(reading)?;
    check(bytes as u64)?;
    Ok(text)
}
