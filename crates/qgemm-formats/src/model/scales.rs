//! Scale readers and checks for finite scales.

use half::f16;
use rayon::prelude::*;
use safetensors::tensor::Dtype;

use super::raw::{RawTensor, bad};
use crate::dtype::DType;
use crate::error::FormatError;
use crate::float8::e8m0_to_f32;
use crate::names::printable;
use crate::weight::HostWeight;

/// Relative error of f16 rounding that is worth a warning.
/// Normal f16 numbers lose less.
const NOTABLE_LOSS: f32 = 1.0 / 1024.0;

/// Reader of group scales `[groups, n]` by (group, row), as f16 by
/// [`scales_in_f16`].
pub(super) fn group_scales(
    scales: &RawTensor,
    n: usize,
) -> Result<impl Fn(usize, usize) -> f16 + Sync + '_, FormatError> {
    scales_in_f16(scales, move |group, row| group * n + row)
}

/// Reader of group scales by (group, row), as f16. `index` is the place of
/// a scale in the tensor.
///
/// F16 is exact, as is BF16 within f16's normal range. F32 rounds to nearest even, with
/// a warning on a notable change. Overflow becomes infinity, which [`check`] refuses.
pub(super) fn scales_in_f16<'a>(
    scales: &'a RawTensor,
    index: impl Fn(usize, usize) -> usize + Sync + 'a,
) -> Result<impl Fn(usize, usize) -> f16 + Sync + 'a, FormatError> {
    let dtype = scales.scale_type()?;
    if dtype != DType::F16 {
        let loss = |index: usize| {
            let value = dtype.read(&scales.bytes, index);
            if value == 0.0 { 0.0 } else { (f16::from_f32(value).to_f32() / value - 1.0).abs() }
        };
        let worst = (0..scales.elements()).map(loss).fold(0.0f32, f32::max);
        if worst > NOTABLE_LOSS {
            tracing::warn!(tensor = %scales.name, "scales lose up to {worst:e} of their value by rounding to f16");
        }
    }
    Ok(move |group: usize, row: usize| f16::from_f32(dtype.read(&scales.bytes, index(group, row))))
}

/// Scales of any element type, read as f32.
pub(super) struct Scales<'a> {
    tensor: &'a RawTensor,
    /// `None` for E8M0.
    dtype: Option<DType>,
}

impl<'a> Scales<'a> {
    /// Scales of a float tensor, or of E8M0 bytes.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] for any other type.
    pub fn of(tensor: &'a RawTensor) -> Result<Self, FormatError> {
        let dtype = if is_e8m0(tensor) { None } else { Some(tensor.scale_type()?) };
        Ok(Self { tensor, dtype })
    }

    /// Scale at `index`.
    pub fn read(&self, index: usize) -> f32 {
        match self.dtype {
            Some(dtype) => dtype.read(&self.tensor.bytes, index),
            None => e8m0_to_f32(self.tensor.bytes[index]),
        }
    }

    /// Checks that all scales are powers of two in E8M0's range.
    ///
    /// # Errors
    /// [`FormatError::ScaleNotPowerOfTwo`] for the first that is not.
    pub fn check_ue8m0(&self) -> Result<(), FormatError> {
        if self.dtype.is_none() {
            return Ok(());
        }
        let wrong = (0..self.tensor.elements()).map(|index| (index, self.read(index)));
        match wrong.into_iter().find(|(_, value)| e8m0_of(*value).is_none()) {
            None => Ok(()),
            Some((index, value)) => {
                Err(FormatError::ScaleNotPowerOfTwo { tensor: printable(&self.tensor.name), index, value })
            }
        }
    }
}

/// Whether a tensor of scales is E8M0.
pub(super) fn is_e8m0(tensor: &RawTensor) -> bool {
    matches!(tensor.dtype, Dtype::F8_E8M0 | Dtype::U8)
}

/// E8M0 code of a power of two. `None` for other numbers, or outside E8M0's range.
pub(super) fn e8m0_of(value: f32) -> Option<u8> {
    // 2^-127 is the only subnormal.
    match (value.to_bits() >> 23, value.to_bits() & 0x7f_ffff) {
        (0, fraction) if fraction == 1 << 22 => Some(0),
        (exponent @ 1..=254, 0) => Some(exponent as u8),
        _ => None,
    }
}

/// Scales of `n` rows, from one scale per tensor or per row.
pub(super) fn row_scales(scales: &RawTensor, n: usize) -> Result<Vec<f32>, FormatError> {
    let all = Scales::of(scales)?;
    match scales.elements() {
        1 => Ok(vec![all.read(0); n]),
        count if count == n => Ok((0..n).map(|row| all.read(row)).collect()),
        count => Err(bad(&scales.name, format!("expected 1 or {n} scales, got {count}: shape {:?}", scales.shape))),
    }
}

/// Checks every scale in the blocks of `weight`.
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
