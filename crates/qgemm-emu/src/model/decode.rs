//! Exact conversion of operand formats to f32.

/// f16 to f32. Branch-free, so that loops over a fragment vectorise.
#[inline]
pub(crate) fn f16(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // The exponent field counts from 2^-15 instead of 2^-127. The
    // product is exact, subnormals included.
    let scaled = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
    let special = magnitude | 0x7f80_0000;
    f32::from_bits(sign | if magnitude >= 0x0f80_0000 { special } else { scaled })
}

/// bf16 to f32.
#[inline]
pub(crate) fn bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Decodes the lowest bits of `code`: sign, `exponent_bits` with bias
/// `bias`, `fraction_bits`. No special values.
const fn small_float(code: u8, exponent_bits: u32, fraction_bits: u32, bias: i32) -> f32 {
    let fraction = code as u32 & ((1 << fraction_bits) - 1);
    let exponent = (code as u32 >> fraction_bits) & ((1 << exponent_bits) - 1);
    let (significand, exponent) =
        if exponent == 0 { (fraction, 1) } else { (fraction | (1 << fraction_bits), exponent as i32) };
    let power = f32::from_bits(((exponent - bias - fraction_bits as i32 + 127) as u32) << 23);
    let magnitude = significand as f32 * power;
    if code >> (exponent_bits + fraction_bits) & 1 == 1 { -magnitude } else { magnitude }
}

const fn e4m3_table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let nan = code & 0x7f == 0x7f;
        table[code] = if nan { f32::NAN } else { small_float(code as u8, 4, 3, 7) };
        code += 1;
    }
    table
}

const fn e5m2_table() -> [f32; 256] {
    let mut table = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        table[code] = match code & 0x7f {
            0x7c => f32::from_bits(0x7f80_0000 | (code as u32 & 0x80) << 24),
            0x7d.. => f32::NAN,
            _ => small_float(code as u8, 5, 2, 15),
        };
        code += 1;
    }
    table
}

static E4M3: [f32; 256] = e4m3_table();
static E5M2: [f32; 256] = e5m2_table();
/// Twice the E2M1 values.
const E2M1_DOUBLED: [i16; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// E4M3 (no infinity, magnitude 0x7f is NaN) to f32.
#[inline]
pub(crate) fn e4m3(code: u8) -> f32 {
    E4M3[usize::from(code)]
}

/// E5M2 to f32.
#[inline]
pub(crate) fn e5m2(code: u8) -> f32 {
    E5M2[usize::from(code)]
}

/// Twice an E2M1 value, from the lowest four bits. Negative zero
/// becomes zero, which does not change a sum.
#[inline]
pub(crate) fn e2m1_doubled(code: u8) -> i16 {
    E2M1_DOUBLED[usize::from(code & 0xf)]
}

/// Block scale: its value (may be NaN), and its
/// exponent for aligning terms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scale {
    pub(crate) value: f64,
    pub(crate) exponent: i32,
}

/// UE8M0: a power of two; 0xff is NaN.
pub(crate) fn ue8m0(code: u8) -> Scale {
    let exponent = i32::from(code) - 127;
    Scale { value: if code == 0xff { f64::NAN } else { 2f64.powi(exponent) }, exponent }
}

/// UE4M3: E4M3 with an ignored sign bit.
pub(crate) fn ue4m3(code: u8) -> Scale {
    Scale { value: f64::from(e4m3(code & 0x7f)), exponent: i32::from(code >> 3 & 0xf).max(1) - 7 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_and_bf16() {
        for bits in 0..=u16::MAX {
            let expected = half::f16::from_bits(bits).to_f32();
            assert!(f16(bits).to_bits() == expected.to_bits() || f16(bits).is_nan() && expected.is_nan(), "{bits:#x}");
            let expected = half::bf16::from_bits(bits).to_f32();
            assert!(
                bf16(bits).to_bits() == expected.to_bits() || bf16(bits).is_nan() && expected.is_nan(),
                "{bits:#x}"
            );
        }
    }

    #[test]
    fn every_fp8_is_an_f16() {
        for code in 0..=u8::MAX {
            // E5M2 is the upper byte of an f16. E4M3 is that
            // of an f16 with another bias and no infinity.
            let expected = half::f16::from_bits(u16::from(code) << 8).to_f32();
            let got = e5m2(code);
            assert!(got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan(), "{code:#x}");
            let bits = u16::from(code & 0x80) << 8 | u16::from(code & 0x7f) << 7;
            let expected = half::f16::from_bits(bits).to_f32() * 256.0;
            let got = e4m3(code);
            assert!(if code & 0x7f == 0x7f { got.is_nan() } else { got.to_bits() == expected.to_bits() }, "{code:#x}");
        }
    }

    #[test]
    fn fp4_and_scales_by_hand() {
        let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (code, magnitude) in magnitudes.into_iter().enumerate() {
            assert_eq!(f32::from(e2m1_doubled(code as u8)), 2.0 * magnitude);
            assert_eq!(f32::from(e2m1_doubled(code as u8 | 8)), -2.0 * magnitude);
        }
        assert_eq!(ue8m0(127), Scale { value: 1.0, exponent: 0 });
        assert_eq!(ue8m0(0), Scale { value: 2f64.powi(-127), exponent: -127 });
        assert_eq!(ue8m0(254).value, 2f64.powi(127));
        assert!(ue8m0(255).value.is_nan());
        assert_eq!(ue4m3(0x3c), Scale { value: 1.5, exponent: 0 });
        assert_eq!(ue4m3(0xbc), ue4m3(0x3c));
        assert_eq!(ue4m3(1), Scale { value: 2f64.powi(-9), exponent: -6 });
        assert_eq!(ue4m3(0x7e), Scale { value: 448.0, exponent: 8 });
        assert!(ue4m3(0x7f).value.is_nan());
    }
}
