// INT8 quantization of X, bit-identical to
// `QuantizedActivations` of `qgemm-formats`.
// A block of X_BLOCK columns has the factor `d = max |x| /
// 127` and codes `round(x * (1 / d))`.

const BLOCK_UNITS: u32 = X_BLOCK / UNIT;

const NAN_BITS: u32 = 0x7fc00000u;
const INFINITY_BITS: u32 = 0x7f800000u;
// Below 127 * 2^-126 factors would be subnormal; they
// are 2^-126 instead.
const LEAST_LARGEST: u32 = 0x03fe0000u;
const LEAST_FACTOR: u32 = 0x00800000u;

// Loads `units` units of X from column `s0` on.
// CHUNK is THREADS times a power of two.
fn load_x(m0: u32, s0: u32, units: u32, thread: u32) {
    for (var i = thread; i < CHUNK; i += THREADS) {
        let unit = i % CHUNK_UNITS;
        let at = i * UNIT_PITCH;
        let there = unit < units;
        var x: array<Eight, 4>;
        var largest = 0u;
        if (there) {
            let m = min(m0 + i / CHUNK_UNITS, tokens() - 1u);
            #for e 4
            x[$e] = x8(m, s0 + unit * UNIT + $eu * 8u);
            #end
            #for e 4
            largest = max(largest, largest_of(x[$e]));
            #end
        }
        if (BLOCK_UNITS > 1u) {
            tile[at].x = largest;
            workgroupBarrier();
            let block = (i - unit % BLOCK_UNITS) * UNIT_PITCH;
            for (var j = 0u; j < BLOCK_UNITS; j++) {
                largest = max(largest, tile[block + j * UNIT_PITCH].x);
            }
            workgroupBarrier();
        }
        if (there) {
            let d = factor(largest);
            let inverse = inverse_of(d);
            var sums: vec4<i32>;
            #for e 4
            let codes$e = codes_of(x[$e], inverse);
            sums[$e] = dot4I8Packed(codes$e.x, 0x01010101u) + dot4I8Packed(codes$e.y, 0x01010101u);
            #end
            tile[at] = vec4<u32>(codes0, codes1);
            tile[at + 1u] = vec4<u32>(codes2, codes3);
            let scale = bitcast<f32>(d);
            var spans = vec2<f32>(f32(sums.x + sums.y), f32(sums.z + sums.w)) * scale;
            if (SPANS == 1u) {
                spans.x = f32(sums.x + sums.y + sums.z + sums.w) * scale;
            }
            tile[at + 2u] = vec4<u32>(d, bitcast<u32>(spans.x), bitcast<u32>(spans.y), 0u);
        }
    }
}

// Bits of the largest magnitude.
// They order as finite < infinity < NaN.
fn largest_of(x: Eight) -> u32 {
    let magnitude = vec4<u32>(0x7fffffffu);
    let magnitudes = max(bitcast<vec4<u32>>(x.lo) & magnitude, bitcast<vec4<u32>>(x.hi) & magnitude);
    return max(max(magnitudes.x, magnitudes.y), max(magnitudes.z, magnitudes.w));
}

// Bits of `largest / 127`, rounded to nearest.
// WGSL's division may be less accurate. So the mantissa,
// extended by seven bits, is divided by 127 as an integer.
fn factor(largest: u32) -> u32 {
    if (largest >= INFINITY_BITS) {
        return NAN_BITS;
    }
    if (largest < LEAST_LARGEST) {
        return LEAST_FACTOR;
    }
    let dividend = ((largest & 0x7fffffu) | 0x800000u) << 7u;
    var quotient = dividend / 127u;
    let rest = dividend - quotient * 127u;
    var exponent = (largest >> 23u) - 7u;
    if (quotient >= 1u << 24u) {
        // One bit too long. Ties round to even; a tie needs
        // an exact division.
        let half = quotient & 1u;
        quotient >>= 1u;
        quotient += half & (quotient | u32(rest > 0u));
        exponent += 1u;
    } else {
        quotient += u32(2u * rest > 127u);
    }
    return (exponent << 23u) + quotient - 0x800000u;
}

// `1 / d`, rounded to nearest.
fn inverse_of(d: u32) -> f32 {
    if (d == NAN_BITS) {
        return 0.0;
    }
    let mantissa = (d & 0x7fffffu) | 0x800000u;
    // The quotient is accurate to a few units.
    // Its error is in the low 32 bits of 2^47 - quotient *
    // mantissa; the other bits are 0.
    var quotient = u32(0x1p47f / f32(mantissa));
    let rest = bitcast<i32>(0u - quotient * mantissa);
    let divisor = i32(mantissa);
    // Rounded down. Only a power of two has an exact quotient, and
    // no quotient is a tie.
    var correction = (2 * rest + divisor) / (2 * divisor);
    correction -= i32(2 * rest + divisor < correction * 2 * divisor);
    quotient = u32(i32(quotient) + correction);
    return bitcast<f32>(((253u - (d >> 23u)) << 23u) + quotient - 0x800000u);
}

// Eight codes; each quad in the order of W's words.
fn codes_of(x: Eight, inverse: f32) -> vec2<u32> {
    let lo = vec4<i32>(round(x.lo * inverse));
    let hi = vec4<i32>(round(x.hi * inverse));
    return vec2<u32>(pack4xI8(lo.xzyw), pack4xI8(hi.xzyw));
}
