// Integer formats; the encoding defines scale and minimum.

// Accumulator of dequantized values from that of codes.
fn scaled(sum: vec4<f32>, sum_x: f32, affine: Affine) -> vec4<f32> {
    return fma(sum, affine.scale, sum_x * affine.min);
}
