// Sub-blocks with a scale and no minimum.

fn affine(rows: Rows, sub: u32) -> Affine {
    return sub_scale(rows, sub);
}

// Accumulator of dequantized values from that of codes.
fn scaled(sum: vec4<f32>, sum_x: f32, affine: Affine) -> vec4<f32> {
    return sum * affine.scale;
}
