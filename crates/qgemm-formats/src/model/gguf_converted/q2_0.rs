//! Q2_0 (type 42): groups of 64 as in ggml, or of 128 in
//! older files. Files do not say which. The distances
//! between tensors do.

use super::blocks::blocks_of;
use crate::desc::{Format, FormatDesc};
use crate::error::FormatError;
use crate::formats::ternary::{Q2_0_G64, Q2_0_G128};
use crate::model::gguf::GgufTensor;
use crate::model::layer::{BlockLayer, elements};
use crate::model::raw::unsupported;

/// Type number.
const GGML_TYPE: u32 = 42;

/// Group length of a file's Q2_0 tensors.
pub(in crate::model) struct Q2_0 {
    /// Formats whose sizes fit all tensors.
    fitting: Vec<&'static FormatDesc>,
}

impl Q2_0 {
    /// Compares sizes with the distances between all such
    /// tensors.
    pub fn of(tensors: &[GgufTensor], alignment: usize) -> Self {
        let fits = |format: &&FormatDesc| {
            tensors.iter().filter(|tensor| Self::is(tensor)).all(|tensor| {
                let size = elements(&tensor.shape)
                    .filter(|values| values.is_multiple_of(format.block_len))
                    .and_then(|values| (values / format.block_len).checked_mul(format.block_bytes));
                // The last tensor of a file may lack the padding.
                let padded = size.and_then(|size| size.checked_next_multiple_of(alignment));
                [size, padded].contains(&Some(tensor.bytes.len()))
            })
        };
        Self { fitting: [&Q2_0_G64, &Q2_0_G128].into_iter().filter(fits).collect() }
    }

    /// Whether a tensor is Q2_0.
    pub fn is(tensor: &GgufTensor) -> bool {
        tensor.ggml_type == GGML_TYPE
    }

    /// Layer of a tensor.
    ///
    /// # Errors
    /// [`FormatError::UnsupportedFile`] when groups of 64 and
    /// of 128 fit the file, or neither does, and for vectors.
    /// [`FormatError::KNotMultiple`].
    pub fn layer(&self, tensor: &GgufTensor) -> Result<BlockLayer, FormatError> {
        let format = match self.fitting[..] {
            [format] => format,
            ref formats => {
                let which =
                    if formats.is_empty() { "neither groups of 64 nor of 128" } else { "both groups of 64 and of 128" };
                let what =
                    format!("is Q2_0, and the offsets of the file's Q2_0 tensors fit {which}: expected one of them");
                return Err(unsupported(&tensor.name, what));
            }
        };
        let bytes = blocks_of(tensor, (format.block_len, format.block_bytes))?;
        Ok(BlockLayer { format: Format::new(format), shape: tensor.shape.clone(), bytes })
    }
}
