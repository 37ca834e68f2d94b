//! Scales in f16 without rounding: a power of two of each
//! row, as its row scale, brings them into the range of f16.

use half::f16;
use rayon::prelude::*;

use super::raw::{RawTensor, unsupported};
use crate::desc::FormatDesc;
use crate::error::FormatError;
use crate::weight::SharedBytes;

/// Exponent of the largest number of a row in f16. Its
/// product with 8-bit codes is below f16's largest number.
const LARGEST: i32 = 7;

/// Tensor, row and group of a scale, for errors.
#[derive(Clone, Copy)]
pub(super) struct ExactScales<'a> {
    pub tensor: &'a RawTensor,
    pub row: usize,
    pub group: usize,
}

/// Power of two by which the scales and addends of a row are
/// divided.
pub(super) fn row_scale(records: &[[f32; 2]]) -> f32 {
    let finite = records.iter().flatten().map(|value| value.abs()).filter(|value| value.is_finite());
    let largest = finite.fold(0.0, f32::max);
    if largest == 0.0 {
        return 1.0;
    }
    let exponent = (largest.to_bits() >> 23) as i32 - 127 - LARGEST;
    // Values are multiples of 2^-24 times it. Above 2^-149, f32
    // holds them.
    2f32.powi(exponent.clamp(-100, 126))
}

/// Blocks of `n` rows, and each row's scale, which `write` returns.
///
/// # Errors
/// Those of `write`.
pub(super) fn scaled_rows(
    format: &FormatDesc,
    [n, k]: [usize; 2],
    write: impl Fn(usize, &mut [u8]) -> Result<f32, FormatError> + Sync,
) -> Result<(SharedBytes, Vec<f32>), FormatError> {
    let row_bytes = format.row_bytes(k);
    let mut blocks = vec![0u8; n * row_bytes];
    let rows = blocks.par_chunks_exact_mut(row_bytes).enumerate();
    let scales = rows.map(|(row, out)| write(row, out)).collect::<Result<_, _>>()?;
    Ok((blocks.into(), scales))
}

/// `value / factor` in f16. Loading refuses what is not
/// finite.
///
/// # Errors
/// [`FormatError::UnsupportedFile`] when it is no f16
/// number.
pub(super) fn exact_f16(value: f32, factor: f32, place: ExactScales<'_>) -> Result<f16, FormatError> {
    let stored = f16::from_f32(value * (1.0 / factor));
    if stored.to_f32() * factor == value || !value.is_finite() {
        return Ok(stored);
    }
    let ExactScales { tensor, row, group } = place;
    let what = format!(
        "{value:e} ({:?}) in row {row}, group {group}: with the other groups of the row, it is no f16 number times a \
         power of two",
        tensor.dtype
    );
    Err(unsupported(&tensor.name, what))
}
