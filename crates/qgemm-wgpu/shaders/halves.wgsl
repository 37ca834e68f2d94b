// 16-bit elements of D.

fn to_half(value: f32) -> u32 {
    if (d_dtype() == F16) {
        return f32_to_f16(value);
    }
    return f32_to_bf16(value);
}
