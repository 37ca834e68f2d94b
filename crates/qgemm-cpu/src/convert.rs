//! Bulk rounding of f32 to dense element types.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use qgemm_formats::DType;

/// Rounds `values` to `dtype`.
///
/// # Panics
/// When `out` has another length.
pub fn from_f32(dtype: DType, values: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), values.len() * dtype.bytes(), "elements have the type's size");
    // `half` picks the conversion instructions at run time. Rows that
    // are not aligned to their elements, as caller-owned memory may
    // be, are converted one by one.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bulk_rounding_agrees_with_single_writes_at_any_alignment() {
        let values: Vec<f32> = (0..37).map(|i| (i as f32 - 18.0) * 0.37).collect();
        for dtype in DType::ALL {
            let expected = dtype.encode(&values);
            for shift in 0..4 {
                let mut out = vec![0; shift + expected.len()];
                from_f32(dtype, &values, &mut out[shift..]);
                assert_eq!(out[shift..], expected, "{dtype} shifted by {shift}");
            }
        }
    }
}
