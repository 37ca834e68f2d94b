//! Reading scales, and checking that they are numbers.

use half::f16;
use rayon::prelude::*;

use super::raw::{RawTensor, bad};
use crate::error::FormatError;
use crate::names::printable;
use crate::weight::HostWeight;

/// Relative change by rounding to f16 above which a warning is given: more than a normal f16 can lose.
const NOTABLE_LOSS: f32 = 1.0 / 1024.0;

/// Reader of (group, row) of group scales `[groups, n]`, as the f16 that blocks of integer groups hold: exact
/// for F16 and, within f16's normal range, BF16; F32 is rounded to nearest even, with a warning where that
/// changes a scale notably. A scale too large becomes infinite, which [`check`] refuses.
pub(super) fn group_scales(
    scales: &RawTensor,
    n: usize,
) -> Result<impl Fn(usize, usize) -> f16 + Sync + '_, FormatError> {
    let dtype = scales.scale_type()?;
    if dtype != crate::DType::F16 {
        let loss = |index: usize| {
            let value = dtype.read(&scales.bytes, index);
            if value == 0.0 { 0.0 } else { (f16::from_f32(value).to_f32() / value - 1.0).abs() }
        };
        let worst = (0..scales.elements()).map(loss).fold(0.0f32, f32::max);
        if worst > NOTABLE_LOSS {
            tracing::warn!(tensor = %scales.name, "scales lose up to {worst:e} of their value by rounding to f16");
        }
    }
    Ok(move |group: usize, row: usize| f16::from_f32(dtype.read(&scales.bytes, group * n + row)))
}

/// The scale of every one of `n` rows, from one scale a tensor or one a row.
pub(super) fn row_scales(scales: &RawTensor, n: usize) -> Result<Vec<f32>, FormatError> {
    let dtype = scales.scale_type()?;
    match scales.elements() {
        1 => Ok(vec![dtype.read(&scales.bytes, 0); n]),
        count if count == n => Ok(dtype.decode(&scales.bytes)),
        count => Err(bad(&scales.name, format!("expected 1 or {n} scales, got {count}: shape {:?}", scales.shape))),
    }
}

/// Checks every scale within the blocks of `weight`.
///
/// # Errors
/// [`FormatError::NonFiniteScale`] for the first that is NaN or infinite.
pub(super) fn check(name: &str, weight: &HostWeight) -> Result<(), FormatError> {
    let format = weight.format();
    if format.float_scales.is_empty() {
        return Ok(());
    }
    let bad_block = |row: usize| {
        let mut blocks = weight.row(row).chunks_exact(format.block_bytes);
        blocks.position(|block| !format.float_scales.iter().all(|scale| scale.is_finite(block)))
    };
    let found = (0..weight.n()).into_par_iter().find_map_first(|row| bad_block(row).map(|block| (row, block)));
    match found {
        None => Ok(()),
        Some((row, block)) => Err(FormatError::NonFiniteScale { what: printable(name), row, block }),
    }
}
