//! Row-wise quantizers and shape checks, for formats whose scales cover a row or
//! more.

use rayon::prelude::*;

use crate::desc::{Format, FormatDesc};
use crate::error::FormatError;
use crate::weight::HostWeight;

/// Largest magnitude, `max|x|`.
pub(super) fn absmax(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |max, v| v.abs().max(max))
}

/// Checks that `values` is a finite `[n, k]` matrix for `format`.
/// Returns its canonical size.
pub(crate) fn check(format: &'static FormatDesc, values: &[f32], n: usize, k: usize) -> Result<usize, FormatError> {
    if n == 0 {
        return Err(FormatError::ZeroDimension { name: "N" });
    }
    format.check_k(k)?;
    let overflow = || FormatError::Overflow { what: format!("{} weight", format.name), dims: vec![n as u64, k as u64] };
    let expected = n.checked_mul(k).and_then(|count| count.checked_mul(4)).ok_or_else(overflow)?;
    if values.len() != expected / 4 {
        return Err(FormatError::WrongLength {
            what: format!("f32 values of {n} x {k}"),
            expected,
            got: values.len() * 4,
        });
    }
    if !values.iter().all(|v| v.is_finite()) {
        return Err(FormatError::NotQuantizable { format: format.name, why: "a value is NaN or infinite" });
    }
    format.row_bytes(k).checked_mul(n).ok_or_else(overflow)
}

/// Quantizes a format with one byte per value and one scale per row.
///
/// `row(values, codes)` writes the `k` codes of a row and returns its scale.
/// `padding` is the code of 0 for a ragged last block.
pub(super) fn quantize_rows(
    format: &'static FormatDesc,
    values: &[f32],
    n: usize,
    k: usize,
    padding: u8,
    row: impl Fn(&[f32], &mut [u8]) -> f32 + Sync,
) -> Result<HostWeight, FormatError> {
    let bytes = check(format, values, n, k)?;
    let mut blocks = vec![padding; bytes];
    let scales =
        blocks.par_chunks_mut(format.row_bytes(k)).zip(values.par_chunks(k)).map(|(codes, x)| row(x, &mut codes[..k]));
    let scales: Vec<f32> = scales.collect();
    HostWeight::new(Format::new(format), n, k, blocks.into())?.with_row_scale(scales)
}
