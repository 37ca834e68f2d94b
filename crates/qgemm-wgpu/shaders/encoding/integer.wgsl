// Integer codes. GPUs convert integers at a reduced rate.
// So a code goes to the upper mantissa bits of 1.0:
// the number is `1 + code / CODES`.
// Scale and minimum compensate for it.

fn begin(thread: u32) {}

fn affine(rows: Rows, sub: u32) -> Affine {
    let of_codes = sub_scale(rows, sub);
    let scale = of_codes.scale * CODES;
    return Affine(scale, of_codes.min - scale);
}

fn number(low: vec4<u32>, high: vec4<u32>, low_bit: u32, high_bit: u32) -> vec4<f32> {
    var bits = moved(low, low_bit, 23u - CODE_BITS) & vec4<u32>(((1u << LOW_BITS) - 1u) << (23u - CODE_BITS));
    if (HIGH_BITS > 0u) {
        bits |= moved(high, high_bit, 23u - HIGH_BITS) & vec4<u32>(((1u << HIGH_BITS) - 1u) << (23u - HIGH_BITS));
    }
    return bitcast<vec4<f32>>(bits | vec4<u32>(0x3f800000u));
}

// Moves bit `from_bit` to bit `to_bit`.
fn moved(word: vec4<u32>, from_bit: u32, to_bit: u32) -> vec4<u32> {
    if (from_bit > to_bit) {
        return word >> vec4<u32>(from_bit - to_bit);
    }
    return word << vec4<u32>(to_bit - from_bit);
}
