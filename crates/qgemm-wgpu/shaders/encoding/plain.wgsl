// Unquantized weights.

fn begin(thread: u32) {}

fn affine(rows: Rows, sub: u32) -> Affine {
    return Affine();
}

// Accumulator of dequantized values from that of codes.
fn scaled(sum: vec4<f32>, sum_x: f32, affine: Affine) -> vec4<f32> {
    return sum;
}
