// Values in types that are told at run time.

// Bits of a value in a type of 16 bits.
fn half_of(value: f32, dtype: u32) -> u32 {
    if (dtype == F16) {
        return f32_to_f16(value);
    }
    return f32_to_bf16(value);
}

// The value as its type has it.
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
