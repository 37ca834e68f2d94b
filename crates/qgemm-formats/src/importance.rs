//! [`ImportanceMatrix`]: importance files of llama.cpp (`llama-imatrix`),
//! in both formats.
//!
//! ```text
//! GGUF:   tensors `NAME.in_sum2` (sums of squared inputs, [matrices, K]) and `NAME.counts` ([matrices]), f32
//! legacy: entries i32 | name length i32, name, calls i32, values i32, values f32 … | chunks i32 | dataset length i32, dataset
//! ```
//!
//! Numbers are little-endian. The legacy format has no magic number.

use std::collections::BTreeMap;

use crate::error::FormatError;
use crate::model::gguf::{GgufArray, GgufFile, GgufTensor, GgufValue};
use crate::model::printable;
use crate::weight::SharedBytes;

const SUMS: &str = ".in_sum2";
const COUNTS: &str = ".counts";
const DATASETS: &str = "imatrix.datasets";
const CHUNKS: &str = "imatrix.chunk_count";
const CHUNK_SIZE: &str = "imatrix.chunk_size";

/// Importance of the columns of a model's weights: mean squares of their
/// inputs on a text, by tensor name.
///
/// ```
/// use qgemm_formats::{ImportanceMatrix, SharedBytes};
/// let mut file = 1i32.to_le_bytes().to_vec();
/// file.extend(4i32.to_le_bytes());
/// file.extend(b"a.up");
/// for number in [2i32, 3] { file.extend(number.to_le_bytes()); }
/// for sum in [2.0f32, 4.0, 6.0] { file.extend(sum.to_le_bytes()); }
/// let matrix = ImportanceMatrix::read(&SharedBytes::from(file))?;
/// assert_eq!(matrix.get("a.up"), Some(&[1.0, 2.0, 3.0][..]));
/// # Ok::<(), qgemm_formats::FormatError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ImportanceMatrix {
    entries: BTreeMap<String, Vec<f32>>,
    datasets: Vec<String>,
    chunks: u32,
}

impl ImportanceMatrix {
    /// Reads a file of either format.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] for a truncated or empty file, a sum that is
    /// negative or not finite, a count that is no integer, and sums without counts.
    /// For GGUF also the errors of [`GgufFile::read`].
    pub fn read(bytes: &SharedBytes) -> Result<Self, FormatError> {
        let matrix = if bytes.starts_with(b"GGUF") { Self::of_gguf(bytes)? } else { Self::of_legacy(bytes)? };
        match matrix.entries.is_empty() {
            true => Err(bad("has no entries")),
            false => Ok(matrix),
        }
    }

    /// Importance of a tensor's columns: K numbers, or K for each matrix of a stack.
    pub fn get(&self, tensor: &str) -> Option<&[f32]> {
        self.entries.get(tensor).map(Vec::as_slice)
    }

    /// Names of tensors.
    pub fn tensors(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Texts that the importance was measured on.
    pub fn datasets(&self) -> &[String] {
        &self.datasets
    }

    /// Chunks of text that the importance was measured on. 0 if unknown.
    pub fn chunks(&self) -> u32 {
        self.chunks
    }

    fn of_gguf(bytes: &SharedBytes) -> Result<Self, FormatError> {
        let file = GgufFile::read(bytes)?;
        let required = |key: &str| file.value(key).ok_or_else(|| bad(format!("has no `{key}`")));
        let datasets = match required(DATASETS)? {
            GgufValue::Array(GgufArray::Strings(texts)) => texts.clone(),
            other => return Err(bad(format!("`{DATASETS}` is {other:?}: expected strings"))),
        };
        let count = |key: &str| {
            let value = required(key)?;
            let count = value.as_u64().and_then(|count| u32::try_from(count).ok());
            count.ok_or_else(|| bad(format!("`{key}` is {value:?}: expected a count")))
        };
        let chunks = count(CHUNKS)?;
        count(CHUNK_SIZE)?;
        let by_name: BTreeMap<&str, &GgufTensor> =
            file.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        let mut entries = BTreeMap::new();
        for (&name, sums) in &by_name {
            if let Some(tensor) = name.strip_suffix(SUMS) {
                let counts = by_name.get(format!("{tensor}{COUNTS}").as_str());
                let counts = counts.ok_or_else(|| bad(format!("`{name}` has no `{tensor}{COUNTS}`")))?;
                entries.insert(tensor.to_owned(), means(sums, counts)?);
            } else if let Some(tensor) = name.strip_suffix(COUNTS)
                && !by_name.contains_key(format!("{tensor}{SUMS}").as_str())
            {
                return Err(bad(format!("`{name}` has no `{tensor}{SUMS}`")));
            }
        }
        Ok(Self { entries, datasets, chunks })
    }

    fn of_legacy(bytes: &[u8]) -> Result<Self, FormatError> {
        /// Least bytes of an entry: three numbers and one value.
        const MIN_ENTRY: usize = 16;
        let mut cursor = Cursor { bytes, at: 0 };
        let count = cursor.count("number of entries", MIN_ENTRY)?;
        let mut entries = BTreeMap::new();
        for _ in 0..count {
            let length = cursor.count("length of a name", 1)?;
            let name = cursor.take(length, "a name")?;
            let name = str::from_utf8(name).map_err(|_| bad(format!("the name at byte {} is not UTF-8", cursor.at)))?;
            let calls = cursor.count("calls", 0)?;
            let length = cursor.count("number of values", 4)?;
            let sums = cursor.take(length * 4, name)?.chunks_exact(4).map(f32_of);
            let divisor = if calls > 0 { calls as f32 } else { 1.0 };
            let values = sums.map(|sum| checked(name, sum).map(|sum| sum / divisor)).collect::<Result<Vec<_>, _>>()?;
            if entries.insert(name.to_owned(), values).is_some() {
                return Err(bad(format!("entry `{name}` comes twice")));
            }
        }
        // Old files end here.
        let chunks = if cursor.is_at_end() { 0 } else { cursor.count("chunks", 0)? as u32 };
        let mut datasets = Vec::new();
        if !cursor.is_at_end() {
            let length = cursor.count("length of the dataset's name", 1)?;
            datasets.push(String::from_utf8_lossy(cursor.take(length, "the dataset's name")?).into_owned());
        }
        Ok(Self { entries, datasets, chunks })
    }
}

/// Means of one tensor: sums by the count of their matrix. A matrix that
/// saw no input has importance 1 throughout, as in llama.cpp.
fn means(sums: &GgufTensor, counts: &GgufTensor) -> Result<Vec<f32>, FormatError> {
    let numbers = |tensor: &GgufTensor| match tensor.type_name().as_str() {
        "F32" => tensor.bytes.chunks_exact(4).map(|bytes| checked(&tensor.name, f32_of(bytes))).collect(),
        other => Err(bad(format!("`{}` is {other}: expected F32", tensor.name))),
    };
    let (values, matrices): (Vec<f32>, Vec<f32>) = (numbers(sums)?, numbers(counts)?);
    if values.is_empty() || matrices.is_empty() || !values.len().is_multiple_of(matrices.len()) {
        let (name, sums, counts) = (&sums.name, values.len(), matrices.len());
        return Err(bad(format!("`{name}` has {sums} values for {counts} counts: expected the same for each count")));
    }
    if let Some(count) = matrices.iter().find(|count| count.fract() != 0.0) {
        return Err(bad(format!("`{}` has {count}: expected whole numbers", counts.name)));
    }
    let columns = values.len() / matrices.len();
    let of_matrix = values.chunks_exact(columns).zip(matrices);
    Ok(of_matrix
        .flat_map(|(sums, count)| sums.iter().map(move |&sum| if count > 0.0 { sum / count } else { 1.0 }))
        .collect())
}

/// A sum or count, which is neither negative nor infinite.
fn checked(name: &str, number: f32) -> Result<f32, FormatError> {
    match number.is_finite() && number >= 0.0 {
        true => Ok(number),
        false => Err(bad(format!("`{name}` has {number}: expected finite numbers, 0 or more"))),
    }
}

fn f32_of(bytes: &[u8]) -> f32 {
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn bad(what: impl Into<String>) -> FormatError {
    FormatError::BadFile { file: "importance matrix".into(), what: printable(&what.into()) }
}

/// Read position in a legacy file.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn is_at_end(&self) -> bool {
        self.at == self.bytes.len()
    }

    fn take(&mut self, length: usize, what: &str) -> Result<&'a [u8], FormatError> {
        let taken = self.bytes[self.at..].get(..length);
        let end = self.bytes.len();
        self.at += length.min(end - self.at);
        taken.ok_or_else(|| bad(format!("ends at byte {end} within {what}")))
    }

    /// Reads a count that is not negative. So many items of `size` bytes must fit the rest.
    fn count(&mut self, what: &str, size: usize) -> Result<usize, FormatError> {
        let bytes = self.take(4, what)?;
        let count = i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let rest = self.bytes.len() - self.at;
        match usize::try_from(count) {
            Ok(count) if count.checked_mul(size).is_some_and(|bytes| bytes <= rest) => Ok(count),
            _ => Err(bad(format!("{what} is {count}, and {rest} bytes follow: expected a GGUF or legacy `.dat` file"))),
        }
    }
}
