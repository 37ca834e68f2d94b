// Number types as bit patterns.
// Built-in conversions leave subnormals and rounding to the
// adapter, so conversions are explicit.

const F32: u32 = 0u;
const F16: u32 = 1u;
const BF16: u32 = 2u;

// Values of eight consecutive columns.
struct Eight {
    lo: vec4<f32>,
    hi: vec4<f32>,
}

// Subnormals get the exponent of 2^-14, the least normal number.
// Then its implicit leading 1 is subtracted.
fn finite_f16_to_f32(half: vec4<u32>) -> vec4<f32> {
    let magnitude = half & vec4<u32>(0x7fffu);
    let normal = bitcast<vec4<f32>>((magnitude << vec4<u32>(13u)) + vec4<u32>(112u << 23u));
    let subnormal = bitcast<vec4<f32>>((magnitude << vec4<u32>(13u)) + vec4<u32>(113u << 23u)) - vec4<f32>(0x1p-14f);
    let finite = bitcast<vec4<u32>>(select(normal, subnormal, magnitude < vec4<u32>(0x400u)));
    return bitcast<vec4<f32>>(finite | ((half & vec4<u32>(0x8000u)) << vec4<u32>(16u)));
}

fn f16_to_f32(half: vec4<u32>) -> vec4<f32> {
    let finite = finite_f16_to_f32(half);
    let special = (half << vec4<u32>(13u)) | ((half & vec4<u32>(0x8000u)) << vec4<u32>(16u)) | vec4<u32>(0x7f800000u);
    return select(finite, bitcast<vec4<f32>>(special), (half & vec4<u32>(0x7c00u)) == vec4<u32>(0x7c00u));
}

fn f16_scalar(half: u32) -> f32 {
    return f16_to_f32(vec4<u32>(half)).x;
}

// As for f16, with 2^-6 as the least normal number.
// NaN becomes 480.
fn finite_e4m3_to_f32(code: vec4<u32>) -> vec4<f32> {
    let magnitude = code & vec4<u32>(0x7fu);
    let normal = bitcast<vec4<f32>>((magnitude << vec4<u32>(20u)) + vec4<u32>(120u << 23u));
    let subnormal = bitcast<vec4<f32>>((magnitude << vec4<u32>(20u)) + vec4<u32>(121u << 23u)) - vec4<f32>(0x1p-6f);
    let finite = bitcast<vec4<u32>>(select(normal, subnormal, magnitude < vec4<u32>(8u)));
    return bitcast<vec4<f32>>(finite | ((code & vec4<u32>(0x80u)) << vec4<u32>(24u)));
}

// NaN is tested by its code.
fn e4m3_to_f32(code: vec4<u32>) -> vec4<f32> {
    let nan = bitcast<vec4<f32>>(vec4<u32>(0x7fc00000u));
    return select(finite_e4m3_to_f32(code), nan, (code & vec4<u32>(0x7fu)) == vec4<u32>(0x7fu));
}

// Magnitude → E4M3, nearest even, saturating at 448.
// Below 2^-6 codes are multiples of 2^-9.
fn to_e4m3(magnitude: vec4<f32>) -> vec4<u32> {
    let bits = bitcast<vec4<u32>>(magnitude);
    let normal = (bits - vec4<u32>(120u << 23u) + vec4<u32>(0x7ffffu) + ((bits >> vec4<u32>(20u)) & vec4<u32>(1u))) >> vec4<u32>(20u);
    let subnormal = vec4<u32>(round(min(magnitude, vec4<f32>(1.0)) * 512.0));
    return min(select(normal, subnormal, bits < vec4<u32>(0x3c800000u)), vec4<u32>(0x7eu));
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
    if (magnitude >= 0x38800000u) { // 2^-14; a carry out of 65504 correctly gives infinity
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

// 1 / f, rounded to nearest, for bits of a positive f whose
// inverse is normal.
fn reciprocal(bits: u32) -> u32 {
    let mantissa = (bits & 0x7fffffu) | 0x800000u;
    if (mantissa == 0x800000u) {
        return (254u - (bits >> 23u)) << 23u;
    }
    // 2^47 / mantissa; an adapter's quotient may be slightly off.
    // 2^47 is 0 modulo 2^32, and the remainder is small.
    var quotient = u32((1.0 / f32(mantissa)) * 0x1p47f);
    var rest = bitcast<i32>(0u - quotient * mantissa);
    for (var i = 0; i < 8; i++) {
        if (rest < 0) {
            quotient -= 1u;
            rest += i32(mantissa);
        } else if (rest >= i32(mantissa)) {
            quotient += 1u;
            rest -= i32(mantissa);
        }
    }
    let up = 2u * u32(rest) > mantissa;
    return ((253u - (bits >> 23u)) << 23u) + (quotient - 0x800000u) + select(0u, 1u, up);
}

// Word of element `index` in an array of `dtype`.
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

// `word_of` for four elements.
fn words_of(index: vec4<u32>, dtype: u32) -> vec4<u32> {
    return select(index >> vec4<u32>(1u), index, dtype == F32);
}

// Four elements, given their words.
fn elements(words: vec4<u32>, index: vec4<u32>, dtype: u32) -> vec4<f32> {
    if (dtype == F32) {
        return bitcast<vec4<f32>>(words);
    }
    let halves = (words >> ((index & vec4<u32>(1u)) * 16u)) & vec4<u32>(0xffffu);
    if (dtype == F16) {
        return f16_to_f32(halves);
    }
    return bitcast<vec4<f32>>(halves << vec4<u32>(16u));
}

// Four 16-bit elements from two words.
fn four_halves(low: u32, high: u32, dtype: u32) -> vec4<f32> {
    if (dtype == F16) {
        return f16_to_f32(vec4<u32>(low & 0xffffu, low >> 16u, high & 0xffffu, high >> 16u));
    }
    return bitcast<vec4<f32>>(vec4<u32>(low << 16u, low & 0xffff0000u, high << 16u, high & 0xffff0000u));
}
