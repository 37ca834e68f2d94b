//! [`ImportanceMatrix`]: importance files of llama.cpp (`llama-imatrix`),
//! in both formats.
//!
//! ```text
//! GGUF:   tensors `NAME.in_sum2` (sums of squared inputs, [matrices, K]) and `NAME.counts` ([matrices]), f32
//! legacy: i32 entries | i32 name length, name, i32 calls, i32 values, f32 … | i32 chunks | i32 length, dataset
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::model::gguf::GgufHeader;

    /// GGUF file of tensors in f32, with the metadata of `llama-imatrix`
    /// except `without`.
    fn gguf(tensors: &[(&str, &[f32])], without: &str) -> SharedBytes {
        let mut header = GgufHeader::new();
        let datasets = GgufValue::Array(GgufArray::Strings(vec!["a.txt".into(), "b.txt".into()]));
        for (key, value) in [(DATASETS, datasets), (CHUNKS, 7u32.into()), (CHUNK_SIZE, 512u32.into())] {
            if key != without {
                header.metadata(key, value).expect("a new key");
            }
        }
        let f32 = "f32".parse().expect("a format");
        for (name, values) in tensors {
            header.tensor(name, &[values.len()], f32).expect("fits");
        }
        let mut writer = header.write(Vec::new()).expect("memory");
        tensors.iter().for_each(|(_, values)| writer.tensor(&DType::F32.encode(values)).expect("fits"));
        writer.finish().expect("complete").into()
    }

    /// Legacy file of one entry.
    fn legacy(calls: i32, values: &[f32]) -> Vec<u8> {
        let mut file = Vec::new();
        for number in [1, 4] {
            file.extend(i32::to_le_bytes(number));
        }
        file.extend(b"a.up");
        for number in [calls, values.len() as i32] {
            file.extend(number.to_le_bytes());
        }
        file.extend(DType::F32.encode(values));
        file.extend(3i32.to_le_bytes());
        file.extend(5i32.to_le_bytes());
        file.extend(b"a.txt");
        file
    }

    #[test]
    fn sums_are_divided_by_the_count_of_their_matrix() {
        let file = gguf(&[("a.in_sum2", &[2.0, 4.0, 6.0, 8.0]), ("a.counts", &[2.0, 0.0]), ("note", &[1.0])], "");
        let matrix = ImportanceMatrix::read(&file).expect("valid");
        // A matrix without input is as important as any.
        assert_eq!(matrix.get("a"), Some(&[1.0, 2.0, 1.0, 1.0][..]));
        assert_eq!((matrix.tensors().count(), matrix.chunks(), matrix.datasets().len()), (1, 7, 2));
    }

    #[test]
    fn legacy_files_may_end_before_their_chunks() {
        let file = legacy(2, &[2.0, 4.0]);
        let read = |bytes: &[u8]| ImportanceMatrix::read(&bytes.to_vec().into());
        let matrix = read(&file).expect("valid");
        assert_eq!((matrix.get("a.up"), matrix.chunks()), (Some(&[1.0, 2.0][..]), 3));
        assert_eq!(matrix.datasets(), ["a.txt"]);
        let entries = file.len() - 13;
        for end in 0..file.len() {
            let whole = [entries, entries + 4].contains(&end);
            assert_eq!(read(&file[..end]).is_ok(), whole, "{end} bytes");
        }
        assert_eq!(read(&legacy(0, &[2.0])).expect("valid").get("a.up"), Some(&[2.0][..]));
    }

    #[test]
    fn numbers_of_a_file_are_checked() {
        let refused = |bytes: SharedBytes| ImportanceMatrix::read(&bytes).expect_err("invalid").to_string();
        for number in [-1.0, f32::NAN, f32::INFINITY] {
            assert!(refused(legacy(1, &[number]).into()).contains("finite numbers"));
            assert!(refused(gguf(&[("a.in_sum2", &[number]), ("a.counts", &[1.0])], "")).contains("finite numbers"));
            assert!(refused(gguf(&[("a.in_sum2", &[1.0]), ("a.counts", &[number])], "")).contains("finite numbers"));
        }
        assert!(
            refused(gguf(&[("a.in_sum2", &[1.0; 3]), ("a.counts", &[1.0; 2])], "")).contains("3 values for 2 counts")
        );
        assert!(refused(gguf(&[("a.in_sum2", &[1.0]), ("a.counts", &[0.5])], "")).contains("whole numbers"));
        assert!(refused(gguf(&[("a.in_sum2", &[1.0])], "")).contains("`a.counts`"));
        assert!(refused(gguf(&[("a.counts", &[1.0])], "")).contains("`a.in_sum2`"));
        assert!(refused(gguf(&[], "")).contains("no entries"));
        for key in [DATASETS, CHUNKS, CHUNK_SIZE] {
            assert!(refused(gguf(&[("a.in_sum2", &[1.0]), ("a.counts", &[1.0])], key)).contains(key));
        }
        for count in [-1i32, i32::MAX] {
            let mut file = legacy(1, &[1.0]);
            file[..4].copy_from_slice(&count.to_le_bytes());
            assert!(refused(file.into()).contains("number of entries"));
        }
    }
}
