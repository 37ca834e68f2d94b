//! Quantized layers of a checkpoint: the trait [`Layer`], and [`BlockLayer`] for bytes
//! that are canonical blocks already.

use std::fmt;
use std::sync::Arc;

use crate::desc::Format;
use crate::error::FormatError;
use crate::weight::{HostWeight, SharedBytes};

/// Quantized layer of a checkpoint. Shapes are checked; bytes are not read yet.
pub(super) trait Layer: fmt::Debug + Send + Sync {
    /// Format of the loaded weight.
    fn format(&self) -> Format;

    /// `[N, K]`, or `[matrices, N, K]` for a stack.
    fn shape(&self) -> Vec<usize>;

    /// Bytes in the file, scales included.
    fn bytes(&self) -> usize;

    /// Loads matrix `index` of the stack; 0 for a single matrix.
    ///
    /// # Errors
    /// A [`FormatError`] when the contents are invalid. The caller checks index and scales.
    fn weight(&self, index: usize) -> Result<HostWeight, FormatError>;

    /// Blocks of all matrices, stacked along N.
    ///
    /// # Errors
    /// As [`Layer::weight`]. [`FormatError::UnsupportedFile`] when a
    /// weight has more than blocks.
    fn blocks(&self) -> Result<SharedBytes, FormatError> {
        let mut blocks = Vec::new();
        for index in 0..stack_size(&self.shape()) {
            let weight = self.weight(index)?;
            if weight.row_scale().is_some() || weight.k_order().is_some() {
                let what = "has scales of rows, or a column order, beside its blocks".into();
                return Err(FormatError::UnsupportedFile { file: format!("{} weight", weight.format()), what });
            }
            blocks.extend_from_slice(weight.blocks());
        }
        Ok(blocks.into())
    }
}

/// Layer or its error, under the name that users see (`….weight`).
pub(super) type Found = (String, Result<Arc<dyn Layer>, FormatError>);

/// A layer as a trait object.
pub(super) fn erase<L: Layer + 'static>(layer: Result<L, FormatError>) -> Result<Arc<dyn Layer>, FormatError> {
    layer.map(|layer| Arc::new(layer) as Arc<dyn Layer>)
}

/// Canonical rows of blocks, as in GGUF files and plain tensors.
#[derive(Debug)]
pub(super) struct BlockLayer {
    pub format: Format,
    /// At least 2 dimensions.
    pub shape: Vec<usize>,
    pub bytes: SharedBytes,
}

impl Layer for BlockLayer {
    fn format(&self) -> Format {
        self.format
    }

    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn bytes(&self) -> usize {
        self.bytes.len()
    }

    fn weight(&self, index: usize) -> Result<HostWeight, FormatError> {
        let (n, k) = matrix_of(&self.shape);
        let bytes = stack_slice(&self.bytes, index, stack_size(&self.shape));
        HostWeight::new(self.format, n, k, bytes)
    }

    fn blocks(&self) -> Result<SharedBytes, FormatError> {
        Ok(self.bytes.clone())
    }
}

/// N and K of a shape with at least 2 dimensions.
pub(super) fn matrix_of(shape: &[usize]) -> (usize, usize) {
    (shape[shape.len() - 2], shape[shape.len() - 1])
}

/// Matrices of a stack. The shape has at least 2 dimensions.
pub(super) fn stack_size(shape: &[usize]) -> usize {
    shape[..shape.len() - 2].iter().product()
}

/// Number of elements. `None` when the product of any non-zero dimensions overflows,
/// so that no partial product is wrong.
pub(super) fn elements(shape: &[usize]) -> Option<usize> {
    let product = shape.iter().filter(|&&d| d != 0).try_fold(1usize, |count, &d| count.checked_mul(d))?;
    Some(if shape.contains(&0) { 0 } else { product })
}

/// Part `index` of `count` equal parts. Empty when out of range.
pub(super) fn stack_slice(bytes: &SharedBytes, index: usize, count: usize) -> SharedBytes {
    let size = bytes.len() / count.max(1);
    let start = index.saturating_mul(size);
    bytes.slice(start..start.saturating_add(size)).unwrap_or_else(|| Vec::new().into())
}
