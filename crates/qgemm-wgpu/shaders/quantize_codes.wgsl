// Quantized activations, bit-identical to the host reference.
// Operations that adapters may compute differently (quotients,
// subnormals) are explicit.
// CODE, SCALE, FACTOR, BLOCK, SUM_SPAN and OF_TOKEN
// define the format.

const INT8: u32 = 0u;
const E4M3: u32 = 1u;
const E2M1: u32 = 2u;
const SCALE_NONE: u32 = 0u;
const SCALE_F32: u32 = 1u;
const SCALE_E8M0: u32 = 2u;
const SCALE_E4M3: u32 = 3u;
const FACTOR_GIVEN: u32 = 1u;
const FACTOR_PER_TOKEN: u32 = 2u;

const MAGNITUDE: u32 = 0x7fffffffu;
const INFINITY: u32 = 0x7f800000u;
const NAN: u32 = 0x7fc00000u;
const SMALLEST: u32 = 0x00800000u;  // 2^-126
const ONE: u32 = 0x3f800000u;

// Bits of the largest magnitude, which order like numbers.
fn magnitude_of(x: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(x) & vec4<u32>(MAGNITUDE);
    return max(max(bits.x, bits.y), max(bits.z, bits.w));
}

// Per-token factors use finite values only.
fn largest_of(x: vec4<f32>) -> u32 {
    if (FACTOR != FACTOR_PER_TOKEN) {
        return magnitude_of(x);
    }
    let bits = bitcast<vec4<u32>>(x) & vec4<u32>(MAGNITUDE);
    return magnitude_of(bitcast<vec4<f32>>(select(vec4<u32>(), bits, bits < vec4<u32>(INFINITY))));
}

struct Scale {
    stored: u32,   // stored form
    inverse: u32,  // bits of the multiplier of values
    is_number: bool,
}

// E2M1 blocks choose among several scales; this is `choice`.
fn scale_of(bits: u32, inverse_factor: u32, choice: u32) -> Scale {
    var scale = Scale(0u, ONE, bits < INFINITY);
    if (SCALE == SCALE_F32) {
        var f = SMALLEST;
        if (scale.is_number) {
            f = select(divided(bits, 127u, 7u, 7u), divided(bits, 7u, 3u, 9u), CODE == E4M3);
        }
        scale.stored = select(NAN, f, scale.is_number);
        scale.inverse = reciprocal(f);
    } else if (SCALE == SCALE_E8M0) {
        let exponent = i32(bits >> 23u);
        let beyond = select(0, 1, (bits & 0x7fffffu) > 0x600000u);
        let power = u32(max(select(exponent - 2, exponent + beyond - 8, CODE == E4M3), 1));
        let own = power + choice;
        scale.stored = select(0xffu, own, scale.is_number);
        scale.inverse = (254u - min(own, 253u)) << 23u;
    } else if (SCALE == SCALE_E4M3) {
        scale.is_number = scale.is_number && inverse_factor != 0u;
        let magnitude = bitcast<f32>(select(0u, bits, scale.is_number));
        let share = times(vec4<f32>(magnitude), inverse_factor) * select(select(1.0 / 6.5, 1.0 / 4.0, choice == 1u), 1.0 / 6.0, choice == 0u);
        let code = to_e4m3(share).x;
        scale.stored = select(0x7fu, code, scale.is_number);
        let f = bitcast<u32>(finite_e4m3_to_f32(vec4<u32>(max(code, 1u))).x);
        scale.inverse = select(reciprocal(f), 0u, code == 0u);
    }
    return scale;
}

// A finite magnitude divided by `odd` times a power of two,
// rounded to nearest even, at least 2^-126.
// The mantissa, extended by `left` bits and divided by `odd`,
// has at least 24 bits. `down` reduces the exponent.
fn divided(bits: u32, odd: u32, left: u32, down: u32) -> u32 {
    let wide = ((bits & 0x7fffffu) | 0x800000u) << left;
    var quotient = wide / odd;
    let rest = wide - quotient * odd;
    var exponent = i32(bits >> 23u) - i32(down);
    var up = 2u * rest > odd;
    if (quotient >= 0x1000000u) {
        let half = (quotient & 1u) == 1u;
        quotient >>= 1u;
        up = half && (rest > 0u || (quotient & 1u) == 1u);
        exponent += 1;
    }
    if (exponent <= 0 || bits < SMALLEST) {
        return SMALLEST;
    }
    return (u32(exponent) << 23u) + (quotient - 0x800000u) + select(0u, 1u, up);
}

// x| times the positive number `bits`.
// A subnormal x is its mantissa times 2^-149.
// The product may underflow to 0 if no code
// distinguishes it from 0.
fn times(x: vec4<f32>, bits: u32) -> vec4<f32> {
    let by = bitcast<f32>(bits);
    let magnitude = bitcast<vec4<u32>>(x) & vec4<u32>(MAGNITUDE);
    let tiny = vec4<f32>(magnitude & vec4<u32>(0x7fffffu)) * (by * 0x1p-75f) * 0x1p-74f;
    return select(bitcast<vec4<f32>>(magnitude) * by, tiny, magnitude < vec4<u32>(SMALLEST));
}

// x| divided by the factor (if any) and the scale.
fn scaled_of(x: vec4<f32>, inverse_factor: u32, inverse: u32) -> vec4<f32> {
    var of_token = x;
    if (FACTOR != 0u) {
        of_token = times(x, inverse_factor);
    }
    return times(of_token, inverse);
}

fn codes_of(x: vec4<f32>, inverse_factor: u32, inverse: u32) -> vec4<u32> {
    let sign = bitcast<vec4<u32>>(x) >> vec4<u32>(31u);
    let scaled = scaled_of(x, inverse_factor, inverse);
    if (CODE == INT8) {
        let magnitude = vec4<i32>(round(scaled));
        return bitcast<vec4<u32>>(select(magnitude, -magnitude, sign == vec4<u32>(1u))) & vec4<u32>(0xffu);
    }
    if (CODE == E4M3) {
        return to_e4m3(scaled) | (sign << vec4<u32>(7u));
    }
    return to_e2m1(scaled) | (sign << vec4<u32>(3u));
}

// E4M3 with a given scale.
// Invalid values become the NaN code.
fn given_codes(x: vec4<f32>, inverse_factor: u32) -> vec4<u32> {
    let bits = bitcast<vec4<u32>>(x);
    let is_finite = (bits & vec4<u32>(MAGNITUDE)) < vec4<u32>(INFINITY);
    let code = to_e4m3(times(x, inverse_factor)) | ((bits >> vec4<u32>(31u)) << vec4<u32>(7u));
    return select(vec4<u32>(0x7fu), code, is_finite & vec4<bool>(inverse_factor != 0u));
}

// Magnitude → E2M1, nearest even.
// Below 1 codes are multiples of 1/2.
fn to_e2m1(magnitude: vec4<f32>) -> vec4<u32> {
    let bits = bitcast<vec4<u32>>(magnitude);
    let normal = (bits - vec4<u32>(126u << 23u) + vec4<u32>(0x1fffffu) + ((bits >> vec4<u32>(22u)) & vec4<u32>(1u))) >> vec4<u32>(22u);
    let subnormal = vec4<u32>(round(min(magnitude, vec4<f32>(1.0)) * 2.0));
    return min(select(normal, subnormal, bits < vec4<u32>(ONE)), vec4<u32>(7u));
}

// A positive number rounded to f16.
// f16 subnormals keep full precision; the errors do
// not depend on it.
fn rounded_to_f16(x: vec4<f32>) -> vec4<f32> {
    let bits = bitcast<vec4<u32>>(x);
    let odd = (bits >> vec4<u32>(13u)) & vec4<u32>(1u);
    return bitcast<vec4<f32>>((bits + vec4<u32>(0xfffu) + odd) & vec4<u32>(0xffffe000u));
}

// Magnitudes of columns in f16, under the block's first scale.
fn halves_of(x: vec4<f32>, inverse_factor: u32, inverse: u32) -> vec4<f32> {
    return rounded_to_f16(min(scaled_of(x, inverse_factor, inverse), vec4<f32>(8.0)));
}

// Squared E2M1 error of magnitudes, in units of
// 1/32 of the scale.
// Each error is rounded to an integer.
fn error_of(magnitude: vec4<f32>) -> u32 {
    let code = to_e2m1(magnitude);
    let binade = max(code / 2u, vec4<u32>(1u)) - 1u;
    // In halves: 0..4, then 2, 3 doubled, then times four.
    let halves = (code - 2u * binade) << binade;
    let parts = vec4<i32>(round((magnitude - 0.5 * vec4<f32>(halves)) * 32.0));
    let squares = parts * parts;
    return u32(squares.x + squares.y + squares.z + squares.w);
}

// Errors of each invocation's columns.
var<workgroup> block_errors: array<u32, THREADS>;

// Scale of a block with the largest magnitude `bits`; for E2M1
// the scale of least error.
// `lo` and `hi` are the invocation's columns.
// All invocations take part.
fn nearest_scale(thread: u32, lo: vec4<f32>, hi: vec4<f32>, bits: u32, inverse_factor: u32) -> Scale {
    var best = scale_of(bits, inverse_factor, 0u);
    if (CODE != E2M1) {
        return best;
    }
    let lanes = max(BLOCK / 8u, 1u);
    let first = thread / lanes * lanes;
    let low = halves_of(lo, inverse_factor, best.inverse);
    let high = halves_of(hi, inverse_factor, best.inverse);
    let first_stored = best.stored;
    var least = 0.0;
    for (var choice = 0u; choice < select(2u, 3u, SCALE == SCALE_E4M3); choice++) {
        let scale = scale_of(bits, inverse_factor, choice);
        if (choice == 0u) {
            block_errors[thread] = error_of(low) + error_of(high);
        } else {
            var ratio = 0.5;
            if (SCALE == SCALE_E4M3) {
                let number = finite_e4m3_to_f32(vec4<u32>(first_stored));
                ratio = rounded_to_f16(number * bitcast<f32>(scale.inverse)).x;
            }
            block_errors[thread] = error_of(rounded_to_f16(low * ratio)) + error_of(rounded_to_f16(high * ratio));
        }
        workgroupBarrier();
        var sum = 0u;
        for (var lane = first; lane < first + lanes; lane++) {
            sum += block_errors[lane];
        }
        workgroupBarrier();
        // The square of a power of two may overflow.
        // So E8M0 compares errors relative to the first scale.
        var square = select(4.0, 1.0, choice == 0u);
        if (SCALE == SCALE_E4M3) {
            let number = finite_e4m3_to_f32(vec4<u32>(scale.stored)).x;
            square = number * number;
        }
        // A zero scale never wins the comparison.
        let error = select(0x1p100f, f32(sum) * square, square > 0.0);
        if (choice == 0u || (scale.is_number && error < least)) {
            best = scale;
            least = error;
        }
    }
    return best;
}

fn bytes(code: vec4<u32>) -> u32 {
    return code.x | (code.y << 8u) | (code.z << 16u) | (code.w << 24u);
}

fn nibbles(code: vec4<u32>) -> u32 {
    return code.x | (code.y << 4u) | (code.z << 8u) | (code.w << 12u);
}

// Sum of signed bytes.
fn sum_of(code: vec4<u32>) -> i32 {
    let signed = bitcast<vec4<i32>>(code << vec4<u32>(24u)) >> vec4<u32>(24u);
    return signed.x + signed.y + signed.z + signed.w;
}
