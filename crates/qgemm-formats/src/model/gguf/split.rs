//! Split GGUF files (`…-00001-of-0000N.gguf`), as
//! `llama-gguf-split` writes them: the first part has the
//! metadata, and each has some of the tensors.

use std::collections::HashSet;

use super::reader::{GgufFile, bad, unsupported};
use crate::error::FormatError;
use crate::model::options::NamedFile;
use crate::weight::SharedBytes;

/// Keys of a part: number of parts, number of the part,
/// and tensors of all parts.
const COUNT: &str = "split.count";
const NUMBER: &str = "split.no";
const TENSORS: &str = "split.tensors.count";

/// Place of a file among the parts of a model.
struct Part {
    number: u64,
    /// Parts; 0 and 1 for a file that is not split.
    count: u64,
    /// Tensors of all parts, if stated.
    tensors: Option<u64>,
}

impl Part {
    fn of(file: &GgufFile) -> Self {
        let number = |key: &str| file.value(key).and_then(super::GgufValue::as_u64);
        Self { number: number(NUMBER).unwrap_or(0), count: number(COUNT).unwrap_or(0), tensors: number(TENSORS) }
    }

    fn is_split(&self) -> bool {
        self.count > 1
    }
}

/// Reads a model of one or several files, in any order.
///
/// The result has the metadata of the first part without
/// the keys of a part, and the tensors of all.
///
/// # Errors
/// As [`GgufFile::read`]. [`FormatError::UnsupportedFile`]
/// when parts are missing, [`FormatError::BadFile`] when
/// files are not the parts of one model.
pub(in crate::model) fn read(files: &[NamedFile<SharedBytes>]) -> Result<GgufFile, FormatError> {
    let mut parts = Vec::new();
    for NamedFile { name, contents } in files {
        let file = GgufFile::read_part(contents).map_err(|error| error.in_file(name))?;
        let part = Part::of(&file);
        if files.len() > 1 && !part.is_split() {
            return Err(bad("is no part of a split model, but one of several files").in_file(name));
        }
        parts.push((name, part, file));
    }
    parts.sort_by_key(|(_, part, _)| part.number);
    let mut parts = parts.into_iter();
    let Some((name, first, mut whole)) = parts.next() else { return Err(bad("is not there: expected a file")) };
    if !first.is_split() {
        return Ok(whole);
    }
    if first.count != files.len() as u64 {
        let (number, count, got) = (first.number + 1, first.count, files.len());
        return Err(unsupported(format!("is part {number} of {count}, and there are {got} files")).in_file(name));
    }
    let mut names: HashSet<String> = whole.tensors.iter().map(|tensor| tensor.name.clone()).collect();
    check(&first, 0, &first).map_err(|error| error.in_file(name))?;
    for (i, (name, part, file)) in parts.enumerate() {
        check(&part, i + 1, &first).map_err(|error| error.in_file(name))?;
        if let Some(twice) = file.tensors.iter().find(|tensor| !names.insert(tensor.name.clone())) {
            return Err(bad(format!("tensor `{}` is in two parts", twice.name)).in_file(name));
        }
        whole.tensors.extend(file.tensors);
    }
    if let Some(expected) = first.tensors.filter(|&count| count != whole.tensors.len() as u64) {
        let got = whole.tensors.len();
        return Err(bad(format!("`{TENSORS}` is {expected}, but all parts have {got} tensors")).in_file(name));
    }
    whole.metadata.retain(|(key, _)| ![COUNT, NUMBER, TENSORS].contains(&key.as_str()));
    Ok(whole)
}

/// Checks that `part` is number `number` of the parts of `first`.
fn check(part: &Part, number: usize, first: &Part) -> Result<(), FormatError> {
    if part.count != first.count {
        return Err(bad(format!("is of {} parts, and another file of {}", part.count, first.count)));
    }
    if part.number != number as u64 {
        return Err(bad(format!("is part {} of {}: expected part {}", part.number + 1, part.count, number + 1)));
    }
    Ok(())
}
