//! Reads small text files.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, ensure};

/// Size limit. Plans of the largest models and results of
/// thousands of cases have a few million bytes.
const MOST: u64 = 64 << 20;

/// The text of a regular file of at most [`MOST`] bytes.
/// A pipe is not opened, because that waits for its other end. A
/// too long file is not read.
///
/// # Errors
/// When the file is not regular, too long, not UTF-8, or cannot
/// be read.
pub fn read(path: &Path) -> anyhow::Result<String> {
    let reading = || format!("reading {}", path.display());
    let metadata = fs::metadata(path).with_context(reading)?;
    let kind = if metadata.is_dir() { "a folder" } else { "a pipe, socket or device" };
    let expected = format!("{}: expected a regular file of at most {MOST} bytes", path.display());
    ensure!(metadata.is_file(), "{expected}, got {kind}");
    let check = |bytes: u64| -> anyhow::Result<()> {
        ensure!(bytes <= MOST, "{expected}, got {bytes} bytes or more");
        Ok(())
    };
    check(metadata.len())?;
    let mut text = String::new();
    let file = File::open(path).with_context(reading)?;
    // The file may have grown meanwhile.
    let bytes = file.take(MOST + 1).read_to_string(&mut text).with_context(reading)?;
    check(bytes as u64)?;
    Ok(text)
}
