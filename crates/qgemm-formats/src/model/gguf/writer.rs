//! GGUF writer (version 3). It writes the header first and then tensor after tensor,
//! so that a model need not fit memory.

use std::collections::HashSet;
use std::io::Write;

use super::value::{ARRAY, GgufArray, GgufValue, STRING};
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC, MAX_DIMS, NAME_BYTES};
use crate::desc::Format;
use crate::error::FormatError;
use crate::model::layer::elements;
use crate::model::{NumberType, printable};

const VERSION: u32 = 3;

/// GGUF header: metadata and tensor descriptions.
///
/// ```
/// use qgemm_formats::{Format, SharedBytes, model::gguf::{GgufFile, GgufHeader}};
/// let f32: Format = "f32".parse()?;
/// let mut header = GgufHeader::new();
/// header.metadata("general.architecture", "llama".into())?;
/// header.tensor("blk.0.attn_q.weight", &[2, 3], f32)?;
/// let mut writer = header.write(Vec::new())?;
/// writer.tensor(&[0; 24])?;
/// let file = GgufFile::read(&SharedBytes::from(writer.finish()?))?;
/// assert_eq!(file.tensors[0].shape, [2, 3]);
/// # Ok::<(), qgemm_formats::FormatError>(())
/// ```
#[derive(Debug)]
pub struct GgufHeader {
    alignment: usize,
    keys: HashSet<String>,
    names: HashSet<String>,
    metadata: Vec<u8>,
    descriptions: Vec<u8>,
    sizes: Vec<(String, usize)>,
    data_bytes: usize,
}

impl Default for GgufHeader {
    fn default() -> Self {
        Self::new()
    }
}

impl GgufHeader {
    /// Empty header.
    pub fn new() -> Self {
        Self {
            alignment: DEFAULT_ALIGNMENT,
            keys: HashSet::new(),
            names: HashSet::new(),
            metadata: Vec::new(),
            descriptions: Vec::new(),
            sizes: Vec::new(),
            data_bytes: 0,
        }
    }

    /// Adds a metadata pair. `general.alignment` sets the alignment of tensors,
    /// so it must precede them.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] for a duplicate key, or an alignment that is no power
    /// of two or comes too late.
    pub fn metadata(&mut self, key: &str, value: GgufValue) -> Result<(), FormatError> {
        if !self.keys.insert(key.to_owned()) {
            return Err(bad(format!("metadata key `{key}` comes twice")));
        }
        if key == ALIGNMENT_KEY {
            self.alignment = match value.as_u64().and_then(|a| usize::try_from(a).ok()) {
                Some(alignment) if alignment.is_power_of_two() && self.sizes.is_empty() => alignment,
                _ => return Err(bad(format!("`{key}` is {value:?}: expected a power of two, before all tensors"))),
            };
        }
        put_string(&mut self.metadata, key.as_bytes());
        match &value {
            GgufValue::Scalar(scalar) => {
                self.metadata.extend(scalar.kind().to_le_bytes());
                scalar.encode(&mut self.metadata);
            }
            GgufValue::String(text) => {
                self.metadata.extend(STRING.to_le_bytes());
                put_string(&mut self.metadata, text.as_bytes());
            }
            GgufValue::ByteString(bytes) => {
                self.metadata.extend(STRING.to_le_bytes());
                put_string(&mut self.metadata, bytes);
            }
            GgufValue::Array(array) => {
                self.metadata.extend(ARRAY.to_le_bytes());
                put_array(&mut self.metadata, array);
            }
        }
        Ok(())
    }

    /// Adds a tensor of `shape` (outermost dimension first: `[N, K]`).
    /// Returns its size in bytes.
    ///
    /// # Errors
    /// [`FormatError::UnsupportedFile`] when GGUF lacks the format.
    /// [`FormatError::BadFile`] for a duplicate name, a name of [`NAME_BYTES`]
    /// bytes or more, or more than 4 dimensions. [`FormatError::KNotMultiple`] and
    /// [`FormatError::Overflow`] when the shape does not fit the format.
    pub fn tensor(&mut self, name: &str, shape: &[usize], format: Format) -> Result<usize, FormatError> {
        let ggml_type = format.ggml_type.ok_or_else(|| FormatError::UnsupportedFile {
            file: "GGUF file".into(),
            what: printable(&format!("tensor `{name}` is {format}, which GGUF does not have")),
        })?;
        let k = shape.last().copied().unwrap_or_default();
        if !k.is_multiple_of(format.block_len) {
            return Err(FormatError::KNotMultiple { format: format.name, block: format.block_len, k });
        }
        self.describe(name, shape, ggml_type, (format.block_len, format.block_bytes))
    }

    /// Adds a tensor of integers or f64. Returns its size in bytes.
    ///
    /// # Errors
    /// As [`GgufHeader::tensor`].
    pub fn numbers(&mut self, name: &str, shape: &[usize], kind: NumberType) -> Result<usize, FormatError> {
        self.describe(name, shape, kind.ggml_type(), (1, kind.bytes()))
    }

    /// Adds a tensor whose blocks have this many values and bytes.
    fn describe(
        &mut self,
        name: &str,
        shape: &[usize],
        ggml_type: u32,
        (block_len, block_bytes): (usize, usize),
    ) -> Result<usize, FormatError> {
        if shape.is_empty() || shape.len() > MAX_DIMS {
            return Err(bad(format!("tensor `{name}` has {} dimensions: expected 1 to {MAX_DIMS}", shape.len())));
        }
        if name.len() >= NAME_BYTES {
            let most = NAME_BYTES - 1;
            return Err(bad(format!("the name `{name}` has {} bytes: ggml's have at most {most}", name.len())));
        }
        if !self.names.insert(name.to_owned()) {
            return Err(bad(format!("tensor `{name}` comes twice")));
        }
        let overflow = || FormatError::Overflow {
            what: printable(&format!("tensor `{name}`")),
            dims: shape.iter().map(|&d| d as u64).collect(),
        };
        let values = elements(shape).ok_or_else(overflow)?;
        let size = (values / block_len).checked_mul(block_bytes).ok_or_else(overflow)?;
        let end = size
            .checked_next_multiple_of(self.alignment)
            .and_then(|padded| padded.checked_add(self.data_bytes))
            .ok_or_else(overflow)?;
        put_string(&mut self.descriptions, name.as_bytes());
        self.descriptions.extend((shape.len() as u32).to_le_bytes());
        for &dimension in shape.iter().rev() {
            self.descriptions.extend((dimension as u64).to_le_bytes());
        }
        self.descriptions.extend(ggml_type.to_le_bytes());
        self.descriptions.extend((self.data_bytes as u64).to_le_bytes());
        self.sizes.push((name.to_owned(), size));
        self.data_bytes = end;
        Ok(size)
    }

    /// Writes the header to `out`. The returned writer takes the data.
    ///
    /// # Errors
    /// [`FormatError::WriteFailed`] when `out` fails.
    pub fn write<W: Write>(self, out: W) -> Result<GgufWriter<W>, FormatError> {
        let header = self.encode();
        let mut writer = self.resume(out, 0);
        writer.put(&header)?;
        Ok(writer)
    }

    /// Bytes of the header, with the padding before the first tensor.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.sizes.len() as u64).to_le_bytes());
        bytes.extend((self.keys.len() as u64).to_le_bytes());
        bytes.extend(&self.metadata);
        bytes.extend(&self.descriptions);
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        bytes
    }

    /// Length of the file's data after its first `tensors` tensors,
    /// padding included. The header comes before.
    pub fn data_len(&self, tensors: usize) -> usize {
        let sizes = self.sizes.iter().take(tensors);
        sizes.map(|(_, size)| size.next_multiple_of(self.alignment)).sum()
    }

    /// Writer for a file that already has its header and first `tensors`
    /// tensors. `out` is at its end.
    pub fn resume<W: Write>(self, out: W, tensors: usize) -> GgufWriter<W> {
        GgufWriter { out, alignment: self.alignment, sizes: self.sizes, next: tensors }
    }
}

/// Writer of tensor data, in header order.
#[derive(Debug)]
pub struct GgufWriter<W> {
    out: W,
    alignment: usize,
    sizes: Vec<(String, usize)>,
    next: usize,
}

impl<W: Write> GgufWriter<W> {
    /// Writes the data of the next tensor.
    ///
    /// # Errors
    /// [`FormatError::WrongLength`] when `bytes` does not have the length
    /// in the header. [`FormatError::BadFile`] when there is no next tensor.
    /// [`FormatError::WriteFailed`] when the output fails.
    pub fn tensor(&mut self, bytes: &[u8]) -> Result<(), FormatError> {
        let (name, size) =
            self.sizes.get(self.next).ok_or_else(|| bad(format!("all {} tensors are written", self.sizes.len())))?;
        if bytes.len() != *size {
            return Err(FormatError::WrongLength {
                what: format!("tensor `{name}`"),
                expected: *size,
                got: bytes.len(),
            });
        }
        self.put(bytes)?;
        self.pad(bytes.len())?;
        self.next += 1;
        Ok(())
    }

    /// Flushes and returns the output.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when tensors are missing.
    /// [`FormatError::WriteFailed`] when the output fails.
    pub fn finish(mut self) -> Result<W, FormatError> {
        if let Some((name, _)) = self.sizes.get(self.next) {
            return Err(bad(format!("the data of tensor `{name}` was never written")));
        }
        self.out.flush().map_err(failed)?;
        Ok(self.out)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), FormatError> {
        self.out.write_all(bytes).map_err(failed)
    }

    /// Pads to the alignment after `written` bytes.
    fn pad(&mut self, written: usize) -> Result<(), FormatError> {
        const ZEROS: [u8; 256] = [0; 256];
        let mut missing = written.next_multiple_of(self.alignment) - written;
        while missing > 0 {
            let part = missing.min(ZEROS.len());
            self.put(&ZEROS[..part])?;
            missing -= part;
        }
        Ok(())
    }
}

fn bad(what: impl Into<String>) -> FormatError {
    FormatError::BadFile { file: "GGUF file".into(), what: printable(&what.into()) }
}

fn failed(error: std::io::Error) -> FormatError {
    FormatError::WriteFailed { file: "GGUF file".into(), why: error.to_string() }
}

fn put_string(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend((bytes.len() as u64).to_le_bytes());
    out.extend(bytes);
}

/// Writes element type, count and elements.
fn put_array(out: &mut Vec<u8>, array: &GgufArray) {
    let kind = match array {
        GgufArray::Scalars { kind, .. } => *kind,
        GgufArray::Strings(_) | GgufArray::ByteStrings(_) => STRING,
        GgufArray::Arrays(_) => ARRAY,
    };
    out.extend(kind.to_le_bytes());
    out.extend((array.len() as u64).to_le_bytes());
    match array {
        GgufArray::Scalars { bytes, .. } => out.extend_from_slice(bytes),
        GgufArray::Strings(items) => items.iter().for_each(|text| put_string(out, text.as_bytes())),
        GgufArray::ByteStrings(items) => items.iter().for_each(|bytes| put_string(out, bytes)),
        GgufArray::Arrays(items) => items.iter().for_each(|item| put_array(out, item)),
    }
}
