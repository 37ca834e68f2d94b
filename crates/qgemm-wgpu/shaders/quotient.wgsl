// Quotients to the bit, from integers: those of numbers may be off by more than their rounding.

// A magnitude is its mantissa, which has 24 bits, times 2^(exponent - 150).
struct Magnitude {
    mantissa: u32,
    exponent: i32,
}

// Given the bits of a finite number that is not 0.
fn magnitude_of_bits(bits: u32) -> Magnitude {
    if (bits >= 0x800000u) {
        return Magnitude((bits & 0x7fffffu) | 0x800000u, i32(bits >> 23u));
    }
    let shift = countLeadingZeros(bits) - 8u;
    return Magnitude(bits << shift, 1 - i32(shift));
}

// a / b, of magnitudes given by their bits, rounded to nearest even; 0 below 2^-126. Both are finite, and b is not 0.
fn quotient(a: u32, b: u32) -> u32 {
    if (a == 0u) {
        return 0u;
    }
    var x = magnitude_of_bits(a);
    let y = magnitude_of_bits(b);
    if (x.mantissa < y.mantissa) {
        x.mantissa *= 2u;
        x.exponent -= 1;
    }
    // A bit before the point and 24 after it, eight at a time. With the rest, the last says how to round.
    var digits = 1u;
    var rest = x.mantissa - y.mantissa;
    for (var i = 0u; i < 3u; i++) {
        let wide = rest << 8u;
        let eight = wide / y.mantissa;
        rest = wide - eight * y.mantissa;
        digits = (digits << 8u) | eight;
    }
    let exponent = x.exponent - y.exponent + 127;
    if (exponent <= 0) {
        return 0u;
    }
    let rounded = digits / 2u + (digits & u32(rest > 0u || (digits & 2u) != 0u));
    return min((u32(min(exponent, 255)) << 23u) + rounded - 0x800000u, 0x7f800000u);
}
