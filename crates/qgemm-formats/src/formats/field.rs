//! Fields of a block: little-endian halves, and C's float-to-integer conversions that quantizers rely on.

use half::f16;

/// The f16 at byte `at` of `block`, as f32.
pub(crate) fn read_f16(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Stores `value`, rounded to f16, at byte `at` of `block`.
pub(crate) fn write_f16(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// `1 / d`, and 0 for 0: the factor that blocks of zeros are quantized with.
pub(crate) fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// Truncation towards zero as x86 does it: what does not fit an i32 (an infinite `value`, from the inverse of
/// a denormal scale) becomes `i32::MIN`. The codes of such blocks have no influence, since their scale rounds
/// to zero in f16, but they decide whether the bytes equal those of ggml.
pub(crate) fn truncate(value: f32) -> i32 {
    if value.abs() < 2_147_483_648.0 { value as i32 } else { i32::MIN }
}

/// Smallest and largest of `values`, `(∞, −∞)` where there are none.
pub(crate) fn min_max(values: &[f32]) -> (f32, f32) {
    values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(lo, hi), &v| {
        (if v < lo { v } else { lo }, if v > hi { v } else { hi })
    })
}

/// The first value of largest magnitude, with its sign; 0 where there are none.
pub(crate) fn extreme(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |best: f32, &v| if v.abs() > best.abs() { v } else { best })
}
