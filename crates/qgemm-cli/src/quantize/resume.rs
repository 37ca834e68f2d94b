//! [`ResumableFile`]: an output that an interrupted run leaves
//! behind, and the next run continues.
//!
//! `OUTPUT.partial` has the header and complete tensors. `OUTPUT.journal`
//! says in JSON what it is made of, and has a line for each complete tensor.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, bail, ensure};
use qgemm_api::gguf::GgufHeader;
use serde::{Deserialize, Serialize};

use super::target::QuantizedRow;
use crate::whole_file::{Existing, WholeFile};

/// First line of a journal.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
struct Begun {
    /// Version of the command.
    qgemm: String,
    inputs: Vec<InputFile>,
}

/// A file that is read, as it was.
#[derive(Debug, Deserialize, PartialEq, Eq, Serialize)]
struct InputFile {
    path: PathBuf,
    bytes: u64,
    /// Nanoseconds since 1970.
    modified: Option<u128>,
}

impl InputFile {
    fn of(path: &Path) -> anyhow::Result<Self> {
        let metadata = fs::metadata(path).with_context(|| path.display().to_string())?;
        let modified = metadata.modified().ok().and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        let modified = modified.map(|time| time.as_nanos());
        Ok(Self { path: fs::canonicalize(path)?, bytes: metadata.len(), modified })
    }
}

/// An output that survives an interruption.
pub struct ResumableFile {
    target: PathBuf,
    existing: Existing,
    partial: PathBuf,
    journal_path: PathBuf,
    file: File,
    journal: File,
}

impl ResumableFile {
    /// Begins the file, or continues what an earlier run left. The file is
    /// then at the end of its complete tensors, whose rows are returned.
    ///
    /// # Errors
    /// When the target may not be written, another run writes it, or the
    /// earlier run had other settings or inputs.
    pub fn open(
        target: &Path,
        existing: Existing,
        header: &GgufHeader,
        inputs: &[PathBuf],
    ) -> anyhow::Result<(Self, Vec<QuantizedRow>)> {
        // Checks the target, without effect.
        drop(WholeFile::create(target, existing)?);
        let beside = |extension: &str| {
            let mut name = target.as_os_str().to_owned();
            name.push(extension);
            PathBuf::from(name)
        };
        let (partial, journal_path) = (beside(".partial"), beside(".journal"));
        let open = |path: &Path| {
            let is_link = fs::symlink_metadata(path).is_ok_and(|metadata| !metadata.file_type().is_file());
            ensure!(!is_link, "{} is no regular file", path.display());
            let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
            options.with_context(|| path.display().to_string())
        };
        let (file, journal) = (open(&partial)?, open(&journal_path)?);
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            bail!("{}: another run writes it", partial.display());
        }
        let inputs = inputs.iter().map(|path| InputFile::of(path)).collect::<anyhow::Result<_>>()?;
        let begun = Begun { qgemm: env!("CARGO_PKG_VERSION").into(), inputs };
        let mut this = Self { target: target.to_owned(), existing, partial, journal_path, file, journal };
        let rows = this.restore(&begun, header)?;
        Ok((this, rows))
    }

    /// Brings both files to their last complete tensor.
    fn restore(&mut self, begun: &Begun, header: &GgufHeader) -> anyhow::Result<Vec<QuantizedRow>> {
        let (journal, partial) = (self.journal_path.display().to_string(), self.partial.display().to_string());
        let other = |what: &str| format!("{what}: remove {partial} and {journal} to begin again");
        let mut text = String::new();
        self.journal.read_to_string(&mut text).with_context(|| journal.clone())?;
        // A last line without an end was being written.
        let mut lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let (bytes, length) = (header.encode(), self.file.metadata()?.len());
        let Some(first) = lines.next() else {
            ensure!(length == 0, other("the partial file has no journal"));
            self.journal.set_len(0)?;
            self.journal.rewind()?;
            writeln!(self.journal, "{}", serde_json::to_string(begun)?)?;
            self.journal.sync_data()?;
            self.file.write_all(&bytes)?;
            return Ok(Vec::new());
        };
        let earlier: Begun = serde_json::from_str(first).with_context(|| other("the journal is unreadable"))?;
        ensure!(earlier == *begun, other("the earlier run had other inputs"));
        let mut earlier = vec![0; bytes.len()];
        let is_same = length < bytes.len() as u64 || self.file.read_exact(&mut earlier).is_ok() && earlier == bytes;
        ensure!(is_same, other("the earlier run had other settings"));
        // After a power cut, a tensor may be missing although its line is there.
        let (mut rows, mut journal_end) = (Vec::new(), first.len());
        let end = |rows: usize| (bytes.len() + header.data_len(rows)) as u64;
        for line in lines {
            if end(rows.len() + 1) > length {
                break;
            }
            rows.push(serde_json::from_str(line).with_context(|| other("the journal is unreadable"))?);
            journal_end += line.len();
        }
        self.journal.set_len(journal_end as u64)?;
        self.journal.seek(SeekFrom::End(0))?;
        self.file.set_len(end(rows.len()).min(length))?;
        self.file.rewind()?;
        self.file.write_all(&bytes)?;
        self.file.seek(SeekFrom::End(0))?;
        Ok(rows)
    }

    /// The file to write to.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Records in the journal that the tensor of `row` is complete.
    ///
    /// # Errors
    /// When writing to disk fails.
    pub fn complete(&self, row: &QuantizedRow) -> anyhow::Result<()> {
        self.file.sync_data()?;
        writeln!(&self.journal, "{}", serde_json::to_string(row)?)?;
        Ok(self.journal.sync_data()?)
    }

    /// Renames the complete file to the target.
    ///
    /// # Errors
    /// When writing to disk fails, or another file has appeared at
    /// the target.
    pub fn finish(self) -> anyhow::Result<()> {
        self.file.sync_all()?;
        drop(WholeFile::create(&self.target, self.existing)?);
        fs::rename(&self.partial, &self.target).with_context(|| format!("writing {}", self.target.display()))?;
        Ok(fs::remove_file(&self.journal_path)?)
    }
}
