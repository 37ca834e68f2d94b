// Number types as bit patterns. Conversions are written out, because the built-in ones leave subnormal numbers
// and the direction of rounding to the adapter.

const F32: u32 = 0u;
const F16: u32 = 1u;
const BF16: u32 = 2u;

// Values of eight consecutive columns.
struct Eight {
    lo: vec4<f32>,
    hi: vec4<f32>,
}

fn f16_to_f32(half: vec4<u32>) -> vec4<f32> {
    let magnitude = half & vec4<u32>(0x7fffu);
    let normal = (magnitude << vec4<u32>(13u)) + vec4<u32>(112u << 23u);
    let subnormal = bitcast<vec4<u32>>(vec4<f32>(magnitude) * 0x1p-24f);
    let special = (magnitude << vec4<u32>(13u)) | vec4<u32>(0x7f800000u);
    let finite = select(normal, subnormal, magnitude < vec4<u32>(0x400u));
    let bits = select(finite, special, magnitude >= vec4<u32>(0x7c00u));
    return bitcast<vec4<f32>>(bits | ((half & vec4<u32>(0x8000u)) << vec4<u32>(16u)));
}

fn f16_scalar(half: u32) -> f32 {
    return f16_to_f32(vec4<u32>(half)).x;
}

fn e4m3_to_f32(code: vec4<u32>) -> vec4<f32> {
    let magnitude = code & vec4<u32>(0x7fu);
    let normal = (magnitude << vec4<u32>(20u)) + vec4<u32>(120u << 23u);
    let subnormal = bitcast<vec4<u32>>(vec4<f32>(magnitude) * 0x1p-9f);
    let finite = select(normal, subnormal, magnitude < vec4<u32>(8u));
    let bits = select(finite, vec4<u32>(0x7fc00000u), magnitude == vec4<u32>(0x7fu));
    return bitcast<vec4<f32>>(bits | ((code & vec4<u32>(0x80u)) << vec4<u32>(24u)));
}

// E5M2 is the upper byte of an f16.
fn e5m2_to_f32(code: vec4<u32>) -> vec4<f32> {
    return f16_to_f32(code << vec4<u32>(8u));
}

// Rounds to nearest even.
fn f32_to_f16(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return sign | 0x7e00u;
    }
    if (magnitude >= 0x47800000u) { // 65536
        return sign | 0x7c00u;
    }
    if (magnitude >= 0x38800000u) { // 2^-14; a carry out of 65504 ends in infinity, as it should
        let rebased = magnitude - (112u << 23u);
        return sign | ((rebased + 0xfffu + ((rebased >> 13u) & 1u)) >> 13u);
    }
    let exponent = magnitude >> 23u;
    if (exponent < 102u) { // below half of the smallest subnormal
        return sign;
    }
    let mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    let shift = 126u - exponent;
    return sign | ((mantissa + (1u << (shift - 1u)) - 1u + ((mantissa >> shift) & 1u)) >> shift);
}

// Rounds to nearest even.
fn f32_to_bf16(value: f32) -> u32 {
    let bits = bitcast<u32>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return (bits >> 16u) | 0x40u;
    }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

// The word of an array of `dtype` that element `index` stands in.
fn word_of(index: u32, dtype: u32) -> u32 {
    return select(index >> 1u, index, dtype == F32);
}

// Element `index`, given its word.
fn element(word: u32, index: u32, dtype: u32) -> f32 {
    if (dtype == F32) {
        return bitcast<f32>(word);
    }
    let half = (word >> ((index & 1u) * 16u)) & 0xffffu;
    if (dtype == F16) {
        return f16_scalar(half);
    }
    return bitcast<f32>(half << 16u);
}

// Four 16-bit elements from two words.
fn four_halves(low: u32, high: u32, dtype: u32) -> vec4<f32> {
    if (dtype == F16) {
        return f16_to_f32(vec4<u32>(low & 0xffffu, low >> 16u, high & 0xffffu, high >> 16u));
    }
    return bitcast<vec4<f32>>(vec4<u32>(low << 16u, low & 0xffff0000u, high << 16u, high & 0xffff0000u));
}
