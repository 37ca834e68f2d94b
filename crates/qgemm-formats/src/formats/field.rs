//! Block fields: little-endian f16, and the float-to-integer
//! conversions of C that quantizers rely on.

use half::f16;

/// Reads the f16 at byte `at` of `block` as f32.
pub(crate) fn read_f16(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Writes `value`, rounded to f16, at byte `at` of `block`.
pub(crate) fn write_f16(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// Inverse scale `1 / d`; 0 for a block of zeros.
pub(crate) fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// Truncates towards zero as x86 does. Values outside i32
/// become `i32::MIN`.
///
/// An infinite `value` comes from the inverse of a subnormal
/// scale, which f16 rounds to zero. The codes of such a block
/// have no effect, but must still match ggml's bytes.
pub(crate) fn truncate(value: f32) -> i32 {
    if value.abs() < 2_147_483_648.0 { value as i32 } else { i32::MIN }
}

/// Minimum and maximum of `values`, `(∞, −∞)` when empty.
pub(crate) fn min_max(values: &[f32]) -> (f32, f32) {
    values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(lo, hi), &v| {
        (if v < lo { v } else { lo }, if v > hi { v } else { hi })
    })
}

/// First value of largest magnitude, with its
/// sign. 0 when empty.
pub(crate) fn extreme(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |best: f32, &v| if v.abs() > best.abs() { v } else { best })
}
