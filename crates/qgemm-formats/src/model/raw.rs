//! Raw tensors of a safetensors file, before layers are recognised.

use std::collections::BTreeMap;

use safetensors::tensor::{Dtype, SafeTensors};

use super::layer::elements;
use super::options::NamedFile;
use crate::dtype::DType;
use crate::error::FormatError;
use crate::names::printable;
use crate::weight::SharedBytes;

/// Tensors of a checkpoint by name.
pub(super) type RawTensors = BTreeMap<String, RawTensor>;

/// Texts of the headers by key.
pub(super) type Metadata = BTreeMap<String, String>;

/// Raw tensor: type, shape, bytes.
#[derive(Clone, Debug)]
pub(super) struct RawTensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: SharedBytes,
}

impl RawTensor {
    /// Element type, if activations and dense weights can have it.
    pub fn float_type(&self) -> Option<DType> {
        match self.dtype {
            Dtype::F32 => Some(DType::F32),
            Dtype::F16 => Some(DType::F16),
            Dtype::BF16 => Some(DType::BF16),
            _ => None,
        }
    }

    /// Element type, which must be a float type of scales.
    pub fn scale_type(&self) -> Result<DType, FormatError> {
        self.float_type().ok_or_else(|| self.unexpected("F32, F16 or BF16"))
    }

    /// Rows and columns of a matrix, both non-zero. (If one were 0, the other could be any
    /// number without backing bytes.)
    pub fn matrix(&self) -> Result<(usize, usize), FormatError> {
        match self.shape[..] {
            [0, _] => Err(FormatError::ZeroDimension { name: "number of rows" }),
            [_, 0] => Err(FormatError::ZeroDimension { name: "number of columns" }),
            [rows, columns] => Ok((rows, columns)),
            _ => Err(bad(&self.name, format!("expected 2 dimensions, got {:?}", self.shape))),
        }
    }

    /// Checks that the element type is `dtype`.
    pub fn expect_type(&self, dtype: Dtype) -> Result<(), FormatError> {
        if self.dtype == dtype { Ok(()) } else { Err(self.unexpected(&format!("{dtype:?}"))) }
    }

    /// Checks that the shape is `shape`.
    pub fn expect_shape(&self, shape: &[usize]) -> Result<(), FormatError> {
        if self.shape == shape {
            return Ok(());
        }
        Err(bad(&self.name, format!("expected shape {shape:?}, got {:?}", self.shape)))
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    fn unexpected(&self, expected: &str) -> FormatError {
        bad(&self.name, format!("expected type {expected}, got {:?}", self.dtype))
    }
}

/// Tensors of all shards of a checkpoint, and the metadata of their headers.
///
/// # Errors
/// [`FormatError::BadFile`] for duplicate names, and for files that the `safetensors`
/// crate rejects: truncated files, false sizes and offsets, gaps, overlaps.
pub(super) fn read(files: &[NamedFile<SharedBytes>]) -> Result<(RawTensors, Metadata), FormatError> {
    let (mut tensors, mut metadata) = (RawTensors::new(), Metadata::new());
    for NamedFile { name: file, contents: bytes } in files {
        let bad = |what: String| FormatError::BadFile { file: file.clone(), what: printable(&what) };
        let (header_bytes, header) = SafeTensors::read_metadata(bytes).map_err(|error| bad(error.to_string()))?;
        metadata.extend(header.metadata().iter().flatten().map(|(key, text)| (key.clone(), text.clone())));
        // The length of the header takes eight bytes before it.
        let start = header_bytes + 8;
        for (name, info) in header.tensors() {
            let (from, to) = info.data_offsets;
            let bytes = start.checked_add(from).zip(start.checked_add(to)).and_then(|(from, to)| bytes.slice(from..to));
            let bytes = bytes.ok_or_else(|| bad(format!("tensor `{name}` leaves the file")))?;
            if elements(&info.shape).is_none() {
                return Err(bad(format!("tensor `{name}`: {:?} overflows the address space", info.shape)));
            }
            let tensor = RawTensor { name: name.clone(), dtype: info.dtype, shape: info.shape.clone(), bytes };
            if tensors.insert(name.clone(), tensor).is_some() {
                return Err(bad(format!("tensor `{name}` is in two shards")));
            }
        }
    }
    Ok((tensors, metadata))
}

/// Error of an invalid tensor or layer.
pub(super) fn bad(name: &str, what: impl Into<String>) -> FormatError {
    FormatError::BadFile { file: printable(&format!("tensor `{name}`")), what: printable(&what.into()) }
}

/// Error of an unsupported layer.
pub(super) fn unsupported(name: &str, what: impl Into<String>) -> FormatError {
    FormatError::UnsupportedFile { file: printable(&format!("tensor `{name}`")), what: printable(&what.into()) }
}

/// Word `index` (32 bits) of `bytes`.
pub(super) fn word(bytes: &[u8], index: usize) -> u32 {
    let at = index * 4;
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
