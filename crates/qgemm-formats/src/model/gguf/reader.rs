//! GGUF reader over the bytes of a file. Copies names and strings only. No allocation
//! exceeds the file's own length.

use std::collections::HashSet;

use super::value::{ARRAY, GgufArray, GgufScalar, GgufValue, STRING, scalar_bytes};
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, ggml_type_name};
use crate::desc::Format;
use crate::error::FormatError;
use crate::model::layer::elements;
use crate::names::printable;
use crate::weight::SharedBytes;

/// Maximum nesting of arrays. The format sets no limit, but files stay below it.
const MAX_DEPTH: usize = 4;
/// Minimum bytes of a metadata pair: key length, type and one byte of value.
const MIN_PAIR: usize = 13;
/// Minimum bytes of a tensor description: name length,
/// dimension count, type and offset.
const MIN_TENSOR: usize = 24;

/// Tensor of a GGUF file.
#[derive(Clone, Debug)]
pub struct GgufTensor {
    /// Name, unique in the file.
    pub name: String,
    /// Dimensions, outermost first (`[N, K]`: the reverse of the file's order).
    pub shape: Vec<usize>,
    /// Type number (`enum ggml_type`).
    pub ggml_type: u32,
    /// Weight format of the type, if qgemm has one.
    pub format: Option<Format>,
    /// Tensor data. Types without a format have unknown size: then all
    /// bytes up to the next tensor.
    pub bytes: SharedBytes,
}

impl GgufTensor {
    /// ggml's name of the tensor type, or `type <number>`.
    pub fn type_name(&self) -> String {
        ggml_type_name(self.ggml_type).map_or_else(|| format!("type {}", self.ggml_type), str::to_owned)
    }
}

/// Contents of a GGUF file.
#[derive(Clone, Debug)]
pub struct GgufFile {
    /// Version of the file format, 2 or 3.
    pub version: u32,
    /// Alignment of tensor data in bytes.
    pub alignment: usize,
    /// Metadata in file order, keys unique.
    pub metadata: Vec<(String, GgufValue)>,
    /// Tensors in file order, names unique.
    pub tensors: Vec<GgufTensor>,
}

impl GgufFile {
    /// Parses a file.
    ///
    /// # Errors
    /// [`FormatError::UnsupportedFile`] for version 1, big-endian files and parts of split
    /// files. [`FormatError::BadFile`] for truncated files; sizes and offsets that leave
    /// the file, overlap or are misaligned; duplicate names; dimensions that overflow or
    /// do not fill whole blocks.
    pub fn read(bytes: &SharedBytes) -> Result<Self, FormatError> {
        let file = Self::read_part(bytes)?;
        match file.value("split.count").and_then(GgufValue::as_u64) {
            Some(count) if count > 1 => {
                let number = file.value("split.no").and_then(GgufValue::as_u64);
                let part = number.map_or("one".to_owned(), |number| format!("number {}", number.saturating_add(1)));
                Err(unsupported(format!("is {part} of {count} parts: open all of them together")))
            }
            _ => Ok(file),
        }
    }

    /// [`Self::read`] of a file that may be a part of a split model.
    pub(super) fn read_part(bytes: &SharedBytes) -> Result<Self, FormatError> {
        let mut cursor = Cursor { bytes, at: 0 };
        if cursor.take(4, "magic")? != MAGIC {
            return Err(bad("does not begin with `GGUF`"));
        }
        let version = cursor.u32("version")?;
        check_version(version)?;
        let tensor_count = cursor.count("tensor count", MIN_TENSOR)?;
        let pair_count = cursor.count("metadata count", MIN_PAIR)?;
        let metadata = read_metadata(&mut cursor, pair_count)?;
        let value_of = |key: &str| metadata.iter().find(|(k, _)| k == key).map(|(_, value)| value);
        let alignment = alignment(value_of(ALIGNMENT_KEY))?;
        let descriptions = read_descriptions(&mut cursor, tensor_count)?;
        let data_start = match cursor.at.checked_next_multiple_of(alignment) {
            Some(start) if start <= bytes.len() => start,
            // A file without tensors may end before the padding.
            _ if tensor_count == 0 => bytes.len(),
            _ => return Err(bad(format!("ends at byte {} within its header", bytes.len()))),
        };
        let data = bytes.slice(data_start..bytes.len()).ok_or_else(|| bad("has no tensor data"))?;
        let tensors = place(descriptions, &data, alignment)?;
        Ok(Self { version, alignment, metadata, tensors })
    }

    /// Metadata value of `key`.
    pub fn value(&self, key: &str) -> Option<&GgufValue> {
        self.metadata.iter().find(|(k, _)| k == key).map(|(_, value)| value)
    }
}

pub(super) fn bad(what: impl Into<String>) -> FormatError {
    FormatError::BadFile { file: "GGUF file".into(), what: printable(&what.into()) }
}

pub(super) fn unsupported(what: impl Into<String>) -> FormatError {
    FormatError::UnsupportedFile { file: "GGUF file".into(), what: printable(&what.into()) }
}

fn check_version(version: u32) -> Result<(), FormatError> {
    match version {
        2 | 3 => Ok(()),
        1 => Err(unsupported("version 1 is not supported: convert the model to version 2 or 3")),
        v if matches!(v.swap_bytes(), 1..=3) => Err(unsupported("is big-endian: convert it to little-endian")),
        v => Err(unsupported(format!("version {v} is not known: expected 2 or 3"))),
    }
}

fn alignment(value: Option<&GgufValue>) -> Result<usize, FormatError> {
    let Some(value) = value else { return Ok(DEFAULT_ALIGNMENT) };
    match value.as_u64().and_then(|a| usize::try_from(a).ok()) {
        Some(alignment) if alignment.is_power_of_two() => Ok(alignment),
        _ => Err(bad(format!("`{ALIGNMENT_KEY}` is {value:?}: expected a power of two"))),
    }
}

/// Read position in the header.
struct Cursor<'a> {
    bytes: &'a SharedBytes,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, count: usize, what: &str) -> Result<&'a [u8], FormatError> {
        if count > self.remaining() {
            return Err(bad(format!(
                "ends at byte {}, but {what} at byte {} needs {count} more",
                self.bytes.len(),
                self.at
            )));
        }
        let taken = &self.bytes[self.at..self.at + count];
        self.at += count;
        Ok(taken)
    }

    fn u32(&mut self, what: &str) -> Result<u32, FormatError> {
        let mut bytes = [0; 4];
        bytes.copy_from_slice(self.take(4, what)?);
        Ok(u32::from_le_bytes(bytes))
    }

    fn u64(&mut self, what: &str) -> Result<u64, FormatError> {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(self.take(8, what)?);
        Ok(u64::from_le_bytes(bytes))
    }

    /// Reads an item count. So many items of `min_bytes`
    /// must fit the rest of the file.
    fn count(&mut self, what: &str, min_bytes: usize) -> Result<usize, FormatError> {
        let count = self.u64(what)?;
        let most = self.remaining() / min_bytes;
        match usize::try_from(count) {
            Ok(count) if count <= most => Ok(count),
            _ => Err(bad(format!("{what} is {count}, but the rest of the file holds at most {most}"))),
        }
    }

    fn string(&mut self, what: &str) -> Result<&'a [u8], FormatError> {
        let length = self.count(what, 1)?;
        self.take(length, what)
    }

    /// Reads a key or tensor name, which must be UTF-8.
    fn name(&mut self, what: &str) -> Result<String, FormatError> {
        let text = std::str::from_utf8(self.string(what)?).map_err(|_| bad(format!("{what} is not UTF-8")))?;
        Ok(text.to_owned())
    }

    fn value(&mut self, kind: u32, key: &str) -> Result<GgufValue, FormatError> {
        match kind {
            STRING => {
                let bytes = self.string(key)?.to_vec();
                Ok(String::from_utf8(bytes).map_or_else(|e| GgufValue::ByteString(e.into_bytes()), GgufValue::String))
            }
            ARRAY => Ok(GgufValue::Array(self.array(key, 1)?)),
            kind => {
                let size = scalar_bytes(kind).ok_or_else(|| bad(format!("`{key}` has the unknown type {kind}")))?;
                GgufScalar::decode(kind, self.take(size, key)?)
                    .map(GgufValue::Scalar)
                    .ok_or_else(|| bad(format!("`{key}` has the unknown type {kind}")))
            }
        }
    }

    fn array(&mut self, key: &str, depth: usize) -> Result<GgufArray, FormatError> {
        if depth > MAX_DEPTH {
            return Err(bad(format!("`{key}` nests arrays deeper than {MAX_DEPTH}")));
        }
        let kind = self.u32(key)?;
        match kind {
            STRING => {
                let count = self.count(key, 8)?;
                let strings = (0..count).map(|_| self.string(key)).collect::<Result<Vec<_>, _>>()?;
                let texts: Result<Vec<_>, _> =
                    strings.iter().map(|bytes| str::from_utf8(bytes).map(str::to_owned)).collect();
                let bytes = |_| GgufArray::ByteStrings(strings.iter().map(|bytes| bytes.to_vec()).collect());
                Ok(texts.map_or_else(bytes, GgufArray::Strings))
            }
            ARRAY => {
                let count = self.count(key, 12)?;
                (0..count).map(|_| self.array(key, depth + 1)).collect::<Result<_, _>>().map(GgufArray::Arrays)
            }
            kind => {
                let size = scalar_bytes(kind).ok_or_else(|| bad(format!("`{key}` holds the unknown type {kind}")))?;
                let count = self.count(key, size)?;
                let start = self.at;
                self.take(count * size, key)?;
                let bytes = self.bytes.slice(start..self.at).ok_or_else(|| bad(format!("`{key}` leaves the file")))?;
                Ok(GgufArray::Scalars { kind, bytes })
            }
        }
    }
}

fn read_metadata(cursor: &mut Cursor<'_>, count: usize) -> Result<Vec<(String, GgufValue)>, FormatError> {
    let mut metadata = Vec::new();
    let mut keys = HashSet::new();
    for _ in 0..count {
        let key = cursor.name("metadata key")?;
        let kind = cursor.u32(&key)?;
        let value = cursor.value(kind, &key)?;
        if !keys.insert(key.clone()) {
            return Err(bad(format!("metadata key `{key}` comes twice")));
        }
        metadata.push((key, value));
    }
    Ok(metadata)
}

/// Tensor description of the header.
struct Description {
    name: String,
    shape: Vec<usize>,
    ggml_type: u32,
    format: Option<Format>,
    offset: usize,
    /// Size by shape and format. `None` without a format.
    size: Option<usize>,
}

fn read_descriptions(cursor: &mut Cursor<'_>, count: usize) -> Result<Vec<Description>, FormatError> {
    let mut descriptions = Vec::new();
    let mut names = HashSet::new();
    for _ in 0..count {
        let description = read_description(cursor)?;
        if !names.insert(description.name.clone()) {
            return Err(bad(format!("tensor `{}` comes twice", description.name)));
        }
        descriptions.push(description);
    }
    Ok(descriptions)
}

fn read_description(cursor: &mut Cursor<'_>) -> Result<Description, FormatError> {
    let name = cursor.name("tensor name")?;
    let dims = cursor.u32(&name)? as usize;
    if dims > MAX_DIMS {
        return Err(bad(format!("tensor `{name}` has {dims} dimensions: expected at most {MAX_DIMS}")));
    }
    let mut dimensions = (0..dims).map(|_| cursor.u64(&name)).collect::<Result<Vec<u64>, _>>()?;
    dimensions.reverse();
    let ggml_type = cursor.u32(&name)?;
    let offset = cursor.u64(&name)?;
    let overflow = || FormatError::Overflow { what: printable(&format!("tensor `{name}`")), dims: dimensions.clone() };
    let shape =
        dimensions.iter().map(|&d| usize::try_from(d)).collect::<Result<Vec<usize>, _>>().map_err(|_| overflow())?;
    let values = elements(&shape).ok_or_else(overflow)?;
    let offset = usize::try_from(offset).map_err(|_| overflow())?;
    let format = Format::from_ggml_type(ggml_type);
    let size = match format {
        None => None,
        Some(format) => {
            let k = shape.last().copied().unwrap_or(1);
            if values > 0 && !k.is_multiple_of(format.block_len) {
                return Err(FormatError::KNotMultiple { format: format.name, block: format.block_len, k });
            }
            Some((values / format.block_len).checked_mul(format.block_bytes).ok_or_else(overflow)?)
        }
    };
    Ok(Description { name, shape, ggml_type, format, offset, size })
}

/// Slices the tensors from the data. Checks that none leaves the
/// data or overlaps another.
fn place(descriptions: Vec<Description>, data: &SharedBytes, alignment: usize) -> Result<Vec<GgufTensor>, FormatError> {
    let mut by_offset: Vec<usize> = (0..descriptions.len()).collect();
    by_offset.sort_by_key(|&i| (descriptions[i].offset, descriptions[i].size));
    let mut ends = vec![0usize; descriptions.len()];
    for (position, &i) in by_offset.iter().enumerate() {
        let tensor = &descriptions[i];
        let name = &tensor.name;
        if !tensor.offset.is_multiple_of(alignment) {
            return Err(bad(format!("tensor `{name}` is at offset {}, no multiple of {alignment}", tensor.offset)));
        }
        let next = by_offset.get(position + 1).map(|&j| &descriptions[j]);
        let limit = next.map_or(data.len(), |next| next.offset.min(data.len()));
        let end = match tensor.size {
            Some(size) => tensor.offset.checked_add(size),
            None => Some(limit.max(tensor.offset)),
        };
        match end {
            Some(end) if end <= limit => ends[i] = end,
            Some(end) if end <= data.len() => {
                let other = next.map_or("", |next| &next.name);
                return Err(bad(format!("tensors `{name}` and `{other}` overlap")));
            }
            _ => {
                return Err(bad(format!(
                    "tensor `{name}` takes {} bytes at offset {}, but the file holds {} bytes of data",
                    tensor.size.unwrap_or(0),
                    tensor.offset,
                    data.len()
                )));
            }
        }
    }
    let cut = descriptions.into_iter().zip(ends).map(|(tensor, end)| {
        let Description { name, shape, ggml_type, format, offset, .. } = tensor;
        let bytes = data.slice(offset..end).ok_or_else(|| bad(format!("tensor `{name}` leaves the file")))?;
        Ok(GgufTensor { name, shape, ggml_type, format, bytes })
    });
    cut.collect()
}
