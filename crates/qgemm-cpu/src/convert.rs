//! Conversion of dense values to and from f32, in bulk.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use qgemm_formats::DType;

/// Converts the first `out.len()` elements of `bytes` to f32.
///
/// # Panics
/// When `bytes` is shorter than that: callers have checked the extent of their operand.
pub fn to_f32(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    let bytes = &bytes[..out.len() * dtype.bytes()];
    // `half` picks the conversion instructions at run time. Rows that are not aligned to their elements, which
    // the caller's memory may hold, go one by one.
    match dtype {
        DType::F32 => bytemuck::cast_slice_mut::<f32, u8>(out).copy_from_slice(bytes),
        DType::F16 => match bytemuck::try_cast_slice::<u8, f16>(bytes) {
            Ok(values) => values.convert_to_f32_slice(out),
            Err(_) => each(dtype, bytes, out),
        },
        DType::BF16 => match bytemuck::try_cast_slice::<u8, bf16>(bytes) {
            Ok(values) => values.convert_to_f32_slice(out),
            Err(_) => each(dtype, bytes, out),
        },
    }
}

/// Rounds `values` to `dtype`.
///
/// # Panics
/// When `out` is not as long.
pub fn from_f32(dtype: DType, values: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), values.len() * dtype.bytes(), "elements have the type's size");
    match dtype {
        DType::F32 => out.copy_from_slice(bytemuck::cast_slice(values)),
        DType::F16 => match bytemuck::try_cast_slice_mut::<u8, f16>(out) {
            Ok(out) => out.convert_from_f32_slice(values),
            Err(_) => each_from(dtype, values, out),
        },
        DType::BF16 => match bytemuck::try_cast_slice_mut::<u8, bf16>(out) {
            Ok(out) => out.convert_from_f32_slice(values),
            Err(_) => each_from(dtype, values, out),
        },
    }
}

fn each_from(dtype: DType, values: &[f32], out: &mut [u8]) {
    for (i, &value) in values.iter().enumerate() {
        dtype.write(out, i, value);
    }
}

fn each(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    for (i, value) in out.iter_mut().enumerate() {
        *value = dtype.read(bytes, i);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bulk_conversion_agrees_with_single_reads_at_any_alignment() {
        let values: Vec<f32> = (0..37).map(|i| (i as f32 - 18.0) * 0.37).collect();
        for dtype in DType::ALL {
            for shift in 0..4 {
                let bytes = [vec![0; shift], dtype.encode(&values)].concat();
                let mut out = vec![0.0; values.len()];
                to_f32(dtype, &bytes[shift..], &mut out);
                assert_eq!(out, dtype.decode(&bytes[shift..]), "{dtype} shifted by {shift}");
                let mut back = vec![0; bytes.len()];
                from_f32(dtype, &values, &mut back[shift..]);
                assert_eq!(back[shift..], bytes[shift..], "{dtype} shifted by {shift}");
            }
        }
    }
}
