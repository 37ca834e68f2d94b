//! Bytes of a tensor, checked against its shape.

use crate::error::FormatError;
use crate::model::gguf::{GgufTensor, ggml_type_name};
use crate::model::layer::{elements, matrix_of};
use crate::model::raw::{bad, unsupported};
use crate::weight::SharedBytes;

/// Bytes of a matrix or stack of matrices, in blocks of
/// so many values and bytes.
///
/// # Errors
/// [`FormatError::KNotMultiple`].
/// [`FormatError::UnsupportedFile`] for vectors.
/// [`FormatError::BadFile`] when the file holds fewer
/// bytes.
pub(super) fn blocks_of(
    tensor: &GgufTensor,
    (block_len, block_bytes): (usize, usize),
) -> Result<SharedBytes, FormatError> {
    let GgufTensor { name, shape, bytes, ggml_type, .. } = tensor;
    let type_name = ggml_type_name(*ggml_type).unwrap_or_default();
    if shape.len() < 2 {
        return Err(unsupported(name, format!("is {type_name} of shape {shape:?}: expected a matrix")));
    }
    let (_, k) = matrix_of(shape);
    if !k.is_multiple_of(block_len) {
        return Err(FormatError::KNotMultiple { format: type_name, block: block_len, k });
    }
    let size = elements(shape).map(|values| values / block_len).and_then(|blocks| blocks.checked_mul(block_bytes));
    size.and_then(|size| bytes.slice(0..size)).ok_or_else(|| {
        bad(name, format!("is {type_name} of shape {shape:?}, and the file holds {} bytes of it", bytes.len()))
    })
}
