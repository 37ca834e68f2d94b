// Power-of-two scales as two factors.
// A scale may be subnormal in f32, and adapters may flush
// subnormals to 0.
// So `Affine` holds two factors that are normal numbers.
// Exponent 255 is NaN.

fn affine(rows: Rows, sub: u32) -> Affine {
    return sub_scale(rows, sub);
}

// 2^(exponent - 128), half of the E8M0 value.
fn half_e8m0(exponent: vec4<u32>) -> Affine {
    let first = exponent / vec4<u32>(2u);
    return Affine(or_nan(first + vec4<u32>(63u), exponent), power_of_two(exponent - first + vec4<u32>(63u)));
}

// 2^(exponent - 127)
fn e8m0(exponent: vec4<u32>) -> Affine {
    let first = exponent / vec4<u32>(2u);
    return Affine(or_nan(first + vec4<u32>(64u), exponent), power_of_two(exponent - first + vec4<u32>(63u)));
}

// 2^(biased - 127)
fn power_of_two(biased: vec4<u32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(biased << vec4<u32>(23u));
}

// 2^(biased - 127), or NaN where `exponent` is 255.
fn or_nan(biased: vec4<u32>, exponent: vec4<u32>) -> vec4<f32> {
    let nan = bitcast<vec4<f32>>(vec4<u32>(0x7fc00000u));
    return select(power_of_two(biased), nan, exponent == vec4<u32>(255u));
}

// Applies both factors to an accumulator.
fn scaled(sum: vec4<f32>, sum_x: f32, affine: Affine) -> vec4<f32> {
    return sum * affine.scale * affine.min;
}
