// Integer formats. Their encoding defines what scale and minimum act on.

// The accumulator of values times x, from that of numbers times x.
fn scaled(sum: vec4<f32>, sum_x: f32, affine: Affine) -> vec4<f32> {
    return fma(sum, affine.scale, sum_x * affine.min);
}
