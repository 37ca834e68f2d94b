// Conversion to a runtime 16-bit type.

// Bits of a value in a 16-bit type.
fn half_of(value: f32, dtype: u32) -> u32 {
    if (dtype == F16) {
        return f32_to_f16(value);
    }
    return f32_to_bf16(value);
}

// The value rounded to `dtype`.
fn rounded_to(value: f32, dtype: u32) -> f32 {
    if (dtype == F32) {
        return value;
    }
    let half = half_of(value, dtype);
    if (dtype == F16) {
        return f16_scalar(half);
    }
    return bitcast<f32>(half << 16u);
}
