// Formats whose sub-blocks have a scale and no minimum.

fn affine(rows: Rows, sub: u32) -> Affine {
    return sub_scale(rows, sub);
}

// The accumulator of values times x, from that of numbers times x.
fn scaled(sum: vec4<f32>, sum_x: f32, affine: Affine) -> vec4<f32> {
    return sum * affine.scale;
}
