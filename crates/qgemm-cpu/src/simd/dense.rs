//! Conversion of dense values, such as rows of activations, to f32.

use qgemm_formats::DType;

use super::vector::{LANES, Vector};

/// The first `out.len()` values of `bytes` as f32.
/// No alignment is needed.
///
/// # Safety
/// The CPU must support the level's instructions.
///
/// # Panics
/// When `bytes` is shorter than that: callers have checked
/// the extent of their operand.
#[inline(always)]
pub unsafe fn to_f32<V: Vector>(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    let bytes = &bytes[..out.len() * dtype.bytes()];
    let whole = out.len() / LANES * LANES;
    for first in (0..whole).step_by(LANES) {
        // SAFETY: guaranteed by the caller; values from `first` on fill a
        // vector in both `bytes` and `out`.
        unsafe {
            let from = bytes.as_ptr().add(first * dtype.bytes());
            let floats = match dtype {
                DType::F32 => V::load(from.cast()),
                DType::F16 => V::half_bits_to_floats(V::load_halves(from)),
                DType::BF16 => V::bits_to_floats(V::shift_left(V::load_halves(from), 16)),
            };
            V::store(out.as_mut_ptr().add(first), floats);
        }
    }
    for (i, value) in out.iter_mut().enumerate().skip(whole) {
        *value = dtype.read(bytes, i);
    }
}
