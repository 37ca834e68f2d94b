//! FP8 (E4M3, E5M2), FP4 (E2M1) and E8M0: exact decoding, and encoding to nearest even.
//!
//! Encoders saturate like the `satfinite` conversions of GPUs: infinities become
//! the largest finite number. Definitions: OCP "8-bit Floating Point Specification" 1.0
//! and "Microscaling Formats" 1.0.

/// Largest finite E4M3 number.
pub const E4M3_MAX: f32 = 448.0;
/// Largest finite E5M2 number.
pub const E5M2_MAX: f32 = 57344.0;
/// Largest E2M1 number.
pub const E2M1_MAX: f32 = 6.0;

/// E2M1 values times 2, so that all are integers.
pub static E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

static E4M3_TABLE: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = e4m3_decode(code as u8);
        code += 1;
    }
    table
};

static E5M2_TABLE: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = e5m2_decode(code as u8);
        code += 1;
    }
    table
};

/// Decodes an E4M3 code. NaN for 0x7f and 0xff.
#[inline]
pub fn e4m3_to_f32(code: u8) -> f32 {
    E4M3_TABLE[usize::from(code)]
}

/// Decodes an E5M2 code, infinities and NaN included.
#[inline]
pub fn e5m2_to_f32(code: u8) -> f32 {
    E5M2_TABLE[usize::from(code)]
}

/// Decodes an E8M0 code: `2^(code − 127)`, NaN for 0xff.
#[inline]
pub fn e8m0_to_f32(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        0xff => f32::NAN,
        e => f32::from_bits(u32::from(e) << 23),
    }
}

/// Nearest E4M3 code of `value`. NaN becomes 0x7f.
#[inline]
pub fn f32_to_e4m3(value: f32) -> u8 {
    if value.is_nan() { 0x7f } else { sign_bit(value, 7) | encode_magnitude(value.abs(), 3, 7, 0x7e) }
}

/// Nearest E5M2 code of `value`. NaN becomes 0x7f.
#[inline]
pub fn f32_to_e5m2(value: f32) -> u8 {
    if value.is_nan() { 0x7f } else { sign_bit(value, 7) | encode_magnitude(value.abs(), 2, 15, 0x7b) }
}

/// Nearest E2M1 code (0..16) of `value`. NaN becomes the largest number, as on GPUs,
/// because E2M1 has no NaN.
#[inline]
pub fn f32_to_e2m1(value: f32) -> u8 {
    if value.is_nan() { 7 } else { sign_bit(value, 3) | encode_magnitude(value.abs(), 1, 1, 7) }
}

fn sign_bit(value: f32, position: u32) -> u8 {
    u8::from(value.is_sign_negative()) << position
}

/// Rounds a magnitude to a float with `mantissa` bits and exponent bias `bias`,
/// saturating at `max_code`.
fn encode_magnitude(magnitude: f32, mantissa: u32, bias: u32, max_code: u8) -> u8 {
    // Subnormals are counted in subnormal steps, because rebiasing would make
    // their exponent negative.
    let rebias = 127 - bias;
    let smallest_normal = f32::from_bits((rebias + 1) << 23);
    if magnitude < smallest_normal {
        let steps_per_unit = f32::from_bits((127 + bias - 1 + mantissa) << 23);
        // Rounding up to `1 << mantissa` yields the smallest normal, as it should.
        return (magnitude * steps_per_unit).round_ties_even() as u8;
    }
    let dropped = 23 - mantissa;
    let bits = magnitude.to_bits() - (rebias << 23);
    let half_less_one = (1 << (dropped - 1)) - 1;
    let rounded = (bits + half_less_one + ((bits >> dropped) & 1)) >> dropped;
    rounded.min(u32::from(max_code)) as u8
}

const fn e4m3_decode(code: u8) -> f32 {
    let (exponent, mantissa) = ((code >> 3 & 15) as u32, (code & 7) as u32);
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        (0, m) => m as f32 / 512.0,
        (e, m) => f32::from_bits((e + 120) << 23 | m << 20),
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

const fn e5m2_decode(code: u8) -> f32 {
    let (exponent, mantissa) = ((code >> 2 & 31) as u32, (code & 3) as u32);
    let magnitude = match (exponent, mantissa) {
        (31, 0) => f32::INFINITY,
        (31, _) => f32::NAN,
        (0, m) => m as f32 / 65536.0,
        (e, m) => f32::from_bits((e + 112) << 23 | m << 21),
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decodes a code by definition in f64: sign, exponent and mantissa fields.
    fn by_definition(code: u8, exponent_bits: u32, mantissa_bits: u32, bias: i32) -> f64 {
        let mantissa = f64::from(u32::from(code) & ((1 << mantissa_bits) - 1)) / f64::from(1u32 << mantissa_bits);
        let exponent = i32::from(code >> mantissa_bits & ((1 << exponent_bits) - 1));
        let magnitude =
            if exponent == 0 { mantissa * 2f64.powi(1 - bias) } else { (1.0 + mantissa) * 2f64.powi(exponent - bias) };
        if code >> (exponent_bits + mantissa_bits) & 1 == 1 { -magnitude } else { magnitude }
    }

    #[test]
    fn every_code_decodes_by_definition() {
        for code in 0..=255u8 {
            let e4m3 = e4m3_to_f32(code);
            if code & 0x7f == 0x7f {
                assert!(e4m3.is_nan());
            } else {
                assert_eq!(f64::from(e4m3), by_definition(code, 4, 3, 7), "e4m3 {code:#x}");
            }
            let e5m2 = e5m2_to_f32(code);
            match code & 0x7f {
                0x7c => assert_eq!(e5m2.abs(), f32::INFINITY),
                0x7d.. => assert!(e5m2.is_nan()),
                _ => assert_eq!(f64::from(e5m2), by_definition(code, 5, 2, 15), "e5m2 {code:#x}"),
            }
            if code < 16 {
                assert_eq!(f64::from(E2M1_DOUBLED[usize::from(code)]) / 2.0, by_definition(code, 2, 1, 1));
            }
            if code != 255 {
                assert_eq!(f64::from(e8m0_to_f32(code)), 2f64.powi(i32::from(code) - 127));
            }
        }
        assert!(e8m0_to_f32(255).is_nan());
        assert_eq!((e4m3_to_f32(0x7e), e5m2_to_f32(0x7b)), (E4M3_MAX, E5M2_MAX));
    }

    #[test]
    fn every_finite_code_encodes_to_itself() {
        for code in 0..=255u8 {
            if e4m3_to_f32(code).is_finite() {
                assert_eq!(f32_to_e4m3(e4m3_to_f32(code)), code);
            }
            if e5m2_to_f32(code).is_finite() {
                assert_eq!(f32_to_e5m2(e5m2_to_f32(code)), code);
            }
        }
        for code in (0..16u8).filter(|&c| c != 8) {
            assert_eq!(f32_to_e2m1(f32::from(E2M1_DOUBLED[usize::from(code)]) / 2.0), code);
        }
        assert_eq!((f32_to_e4m3(f32::NAN), f32_to_e5m2(f32::NAN)), (0x7f, 0x7f));
        assert_eq!((f32_to_e4m3(f32::NEG_INFINITY), f32_to_e5m2(1e30), f32_to_e2m1(-9.0)), (0xfe, 0x7b, 0xf));
        assert_eq!((f32_to_e4m3(-0.0), f32_to_e2m1(-0.0)), (0x80, 8));
    }

    /// Nearest of `magnitudes` (codes 0, 1, …, ascending) to `value`, ties to the even
    /// code.
    fn nearest(magnitudes: &[f32], value: f32) -> u8 {
        // Saturates first, because f64 cannot resolve distances of very large values.
        let value = f64::from(value.min(magnitudes[magnitudes.len() - 1]));
        let distance = |code: usize| (f64::from(magnitudes[code]) - value).abs();
        let best = (0..magnitudes.len())
            .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))))
            .expect("not empty");
        best as u8
    }

    #[test]
    fn encoding_is_nearest_even() {
        let e4m3: Vec<f32> = (0..0x7f).map(e4m3_to_f32).collect();
        let e5m2: Vec<f32> = (0..0x7c).map(e5m2_to_f32).collect();
        let e2m1: Vec<f32> = (0..8).map(|c| f32::from(E2M1_DOUBLED[c]) / 2.0).collect();
        let check = |value: f32| {
            assert_eq!(f32_to_e4m3(value), nearest(&e4m3, value), "e4m3 {value:e}");
            assert_eq!(f32_to_e5m2(value), nearest(&e5m2, value), "e5m2 {value:e}");
            assert_eq!(f32_to_e2m1(value), nearest(&e2m1, value), "e2m1 {value:e}");
            let opposite = f32_to_e4m3(-value);
            assert_eq!(opposite, f32_to_e4m3(value) | 0x80);
        };
        // Every midpoint and its neighbours on both sides.
        for table in [&e4m3, &e5m2, &e2m1] {
            for pair in table.windows(2) {
                let middle = (pair[0] + pair[1]) / 2.0;
                for value in [middle, f32::from_bits(middle.to_bits() - 1), f32::from_bits(middle.to_bits() + 1)] {
                    check(value);
                }
            }
        }
        let mut state = 9u32;
        for _ in 0..200_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from_bits(state & 0x7fff_ffff);
            if value.is_finite() {
                check(value);
            }
        }
        // Values in the formats' range, which random bit patterns rarely hit.
        for i in 0..100_000u32 {
            check(i as f32 * 0.00613);
        }
    }
}
