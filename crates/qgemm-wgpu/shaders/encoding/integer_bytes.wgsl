// Integer codes as bytes.

fn begin(thread: u32) {}

// 8-bit codes become signed: code - 128.
fn affine(rows: Rows, sub: u32) -> Affine {
    let of_codes = sub_scale(rows, sub);
    if (CODE_BITS == 8u) {
        return Affine(of_codes.scale, of_codes.min + 128.0 * of_codes.scale);
    }
    return of_codes;
}

// Codes of a quad. In each byte the code starts at bit
// `low_bit`, its upper part at `high_bit`.
fn quad(low: vec4<u32>, high: vec4<u32>, low_bit: u32, high_bit: u32) -> vec4<u32> {
    var codes = (low >> vec4<u32>(low_bit)) & vec4<u32>(((1u << LOW_BITS) - 1u) * 0x01010101u);
    if (HIGH_BITS > 0u) {
        let upper = (high >> vec4<u32>(high_bit)) & vec4<u32>(((1u << HIGH_BITS) - 1u) * 0x01010101u);
        codes |= upper << vec4<u32>(LOW_BITS);
    }
    if (CODE_BITS == 8u) {
        codes ^= vec4<u32>(0x80808080u);
    }
    return codes;
}
