//! X quantization by rows, the bit-exact reference of all devices' kernels.
//!
//! A quantized X has up to four *planes*. Each is row-major with its own row stride:
//!
//! | plane | contents of a row |
//! |---|---|
//! | codes | one byte a column, or a nibble (even columns low); zeros after column K |
//! | scales | one per scale block, in order: f32, E8M0 or E4M3 |
//! | factors | one f32 (NVFP4 only), unless one is given for all of X |
//! | sums | `scale · Σ codes` in f32 of every 32 or 16 columns (Q8_1 only) |
//!
//! Arithmetic is single f32 operations, rounded to nearest even, in this
//! order, so that devices agree:
//!
//! - f32 scales: `scale = max(max|x| / largest, 2⁻¹²⁶)`,
//!   `code = round(x · (1 / scale))`. The largest code is 127 or 448.
//! - E8M0: the power of two that puts `max|x|` just below 448 (E4M3), or into the top
//!   binade (E2M1), or twice that. At least 2⁻¹²⁶.
//! - NVFP4: `factor = max(max|x| / 1536, 2⁻¹²⁶)` over the token's finite values.
//!   `scale = e4m3(max|x| · (1 / factor) · (1 / 6))`, or with `1 / 4` or `1 / 6.5`.
//!   `code = e2m1(x · (1 / factor) · (1 / scale))`.
//! - E2M1 blocks use the candidate scale with the least error, the first on a tie.
//!   The error is the sum of `round(32 · (h − e2m1(h)))²`, an integer below 2²⁴, times
//!   `scale²`. For the first candidate `h = f16(min(|x| · (1 / factor) · (1 / first),
//!   8))`. For the others `f16(h · f16(first · (1 / scale)))`. A scale of 0 is chosen
//!   last. Candidates beyond the first exist because E2M1 has nothing between 4 and 6,
//!   where the second largest values of a block often are. (Cook et al., "Four Over
//!   Six", 2025, use `1 / 4`.)
//!
//! Codes saturate. If values of one scale are not all finite, the scale is NaN and
//! their codes are 0. E4M3 with a given scale has NaN codes instead. Floating-point
//! codes keep the sign of −0.

use half::f16;

use crate::activation::Q8_BLOCK;
use crate::desc::{Encoding, ScaleType};
use crate::element::ElementType;
use crate::float8::{E2M1_DOUBLED, E2M1_MAX, E4M3_MAX, e4m3_to_f32, e8m0_to_f32, f32_to_e2m1, f32_to_e4m3};
use crate::x_format::{ScaleSpan, XFormat};

/// Largest INT8 code. −128 is unused.
const S8_MAX: f32 = 127.0;
/// Scaled magnitude of a token's largest value in NVFP4: the largest code times a scale
/// `s` for which `1.5 s` is also an E4M3 number.
const NVFP4_MAX: f32 = 256.0 * E2M1_MAX;
/// Scaled magnitude of a block's largest value, per NVFP4 candidate scale.
const NVFP4_LARGEST: [f32; 3] = [E2M1_MAX, 4.0, 6.5];
/// Fixed-point unit of errors, and the limit of scaled magnitudes.
const ERROR_PARTS: f32 = 32.0;
const ERROR_MOST: f32 = 8.0;
/// Exponents of the largest numbers.
const E4M3_EXPONENT: u32 = 8;
const E2M1_EXPONENT: u32 = 2;
/// f32 fraction bits of 448 = 1.75 · 2⁸.
const E4M3_MAX_FRACTION: u32 = 0x60_0000;
/// Allowed columns per X block sum.
pub const SUM_SPANS: [usize; 2] = [32, 16];
/// Alignment of a row of one-byte scales.
const WORD: usize = 4;
const INFINITY_BITS: u32 = 0x7f80_0000;
/// 1.5 · 2²³: the spacing of f32 there is 1, so that an addition rounds to an
/// integer in the low bits.
const ROUNDER: f32 = 12_582_912.0;

/// Element type of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum XCode {
    /// Signed bytes.
    Int8,
    /// FP8 E4M3.
    E4M3,
    /// FP4 E2M1.
    E2M1,
}

impl XCode {
    /// Element type of memory that holds these codes.
    pub const fn element(self) -> ElementType {
        match self {
            XCode::Int8 => ElementType::Int8,
            XCode::E4M3 | XCode::E2M1 => ElementType::Bytes,
        }
    }
}

/// Source of the factor beside scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum XFactor {
    /// No factor.
    None,
    /// Given by the caller for all of X: an f32 from 2⁻¹²⁶ to 2¹²⁶. Any other
    /// value makes all of X NaN.
    Given,
    /// Computed per token by the quantizer.
    PerToken,
}

/// Planes of a quantized X, by [`XFormat::parts`]; see the [module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct XParts {
    /// Element type of codes.
    pub code: XCode,
    /// Columns per scale. `None` means one scale per token.
    pub block: Option<usize>,
    /// Element type of scales. `None` when the given factor is the only scale.
    pub scale: Option<ScaleType>,
    /// Source of the factor.
    pub factor: XFactor,
    /// Columns per sum, if there are sums.
    pub sum_span: Option<usize>,
}

/// Output planes of one row.
#[derive(Debug)]
pub struct XRow<'a> {
    /// [`XParts::code_bytes`] bytes.
    pub codes: &'a mut [u8],
    /// [`XParts::scale_bytes`] bytes, little-endian.
    pub scales: &'a mut [u8],
    /// Four bytes for each of [`XParts::sums`], little-endian.
    pub sums: &'a mut [u8],
}

impl XFormat {
    /// Planes of this format. `None` for plain types.
    ///
    /// `given_factor` selects NVFP4 with one factor for all of X. `sum_span` selects Q8_1
    /// with a sum per 16 columns instead of 32. Other formats ignore them. `None` also for
    /// other values of `sum_span`.
    pub fn parts(self, given_factor: bool, sum_span: Option<usize>) -> Option<XParts> {
        let desc = self.desc();
        let code = match desc.encoding {
            Encoding::Plain(_) => return None,
            Encoding::E4M3 => XCode::E4M3,
            Encoding::Codebook(_) => XCode::E2M1,
            _ => XCode::Int8,
        };
        let is_nested = desc.scale == Some(ScaleType::E4M3);
        let (block, scale) = match desc.scale_span {
            ScaleSpan::Block(block) => (Some(block), desc.scale),
            ScaleSpan::Token => (None, desc.scale),
            ScaleSpan::None | ScaleSpan::Tensor => (None, None),
        };
        let factor = match scale {
            None => XFactor::Given,
            Some(_) if is_nested && given_factor => XFactor::Given,
            Some(_) if is_nested => XFactor::PerToken,
            Some(_) => XFactor::None,
        };
        if sum_span.is_some_and(|span| !SUM_SPANS.contains(&span)) {
            return None;
        }
        let sum_span = desc.sum_span.map(|span| sum_span.unwrap_or(span));
        Some(XParts { code, block, scale, factor, sum_span })
    }
}

impl XParts {
    /// Alignment of stored columns: whole blocks, and whole words of scales.
    pub fn column_multiple(&self) -> usize {
        match (self.block, self.scale) {
            (Some(block), Some(ScaleType::F32)) => block.max(Q8_BLOCK),
            (Some(block), Some(_)) => block.max(1).saturating_mul(WORD),
            _ => Q8_BLOCK,
        }
    }

    /// Stored columns for K = `k`, saturating at `usize::MAX`.
    pub fn columns(&self, k: usize) -> usize {
        k.checked_next_multiple_of(self.column_multiple()).unwrap_or(usize::MAX)
    }

    /// Bytes of a row of codes.
    pub fn code_bytes(&self, k: usize) -> usize {
        self.bytes_of(self.columns(k))
    }

    /// Bytes of codes of `columns` columns.
    fn bytes_of(&self, columns: usize) -> usize {
        match self.code {
            XCode::Int8 | XCode::E4M3 => columns,
            XCode::E2M1 => columns / 2,
        }
    }

    /// Scales per row.
    pub fn scales(&self, k: usize) -> usize {
        match (self.scale, self.block) {
            (None, _) => 0,
            (Some(_), None) => 1,
            (Some(_), Some(block)) => self.columns(k) / block.max(1),
        }
    }

    /// Bytes per scale.
    pub fn scale_width(&self) -> usize {
        self.scale.map_or(0, ScaleType::bytes)
    }

    /// Bytes of a row of scales, in whole words.
    pub fn scale_bytes(&self, k: usize) -> usize {
        self.scales(k).saturating_mul(self.scale_width())
    }

    /// Sums per row.
    pub fn sums(&self, k: usize) -> usize {
        self.sum_span.map_or(0, |span| self.columns(k) / span.max(1))
    }

    /// Quantizes a row. Returns the row's factor if it has one.
    ///
    /// # Panics
    /// When the planes of `row` are too short, or a required factor is missing.
    pub fn quantize_row(&self, values: &[f32], given: Option<f32>, row: XRow<'_>) -> Option<f32> {
        let k = values.len();
        let XRow { codes, scales, sums } = row;
        let codes = &mut codes[..self.code_bytes(k)];
        codes.fill(0);
        let factor = match self.factor {
            XFactor::None => None,
            XFactor::Given => Some(given.expect("a factor is given")),
            XFactor::PerToken => Some(f32_scale(largest(values, true), NVFP4_MAX)),
        };
        let inverse_factor = factor.map_or(1.0, checked_inverse);
        let columns = self.block.unwrap_or(self.columns(k));
        for (i, codes) in codes.chunks_mut(self.bytes_of(columns)).enumerate() {
            let x = &values[(i * columns).min(k)..((i + 1) * columns).min(k)];
            let bits = largest(x, false);
            let inverse = match self.scale {
                None => {
                    encode_given(x, inverse_factor, codes);
                    continue;
                }
                Some(ScaleType::E8M0 | ScaleType::E4M3) => {
                    scales[i] = self.byte_scale(x, bits, inverse_factor);
                    self.byte_inverse(scales[i])
                }
                Some(_) => {
                    let most = if self.code == XCode::E4M3 { E4M3_MAX } else { S8_MAX };
                    let scale = if bits < INFINITY_BITS { f32_scale(bits, most) } else { f32::NAN };
                    scales[i * 4..][..4].copy_from_slice(&scale.to_le_bytes());
                    1.0 / scale
                }
            };
            if !inverse.is_nan() {
                self.encode(x, inverse_factor, inverse, codes);
            }
            if let Some(span) = self.sum_span {
                let scale = f32::from_le_bytes([0, 1, 2, 3].map(|byte| scales[i * 4 + byte]));
                let sums = sums[i * (columns / span) * 4..].as_chunks_mut::<4>().0;
                for (sum, codes) in sums.iter_mut().zip(codes.chunks_exact(span)) {
                    let total: i32 = codes.iter().map(|&code| i32::from(code as i8)).sum();
                    *sum = (total as f32 * scale).to_le_bytes();
                }
            }
        }
        factor.filter(|_| self.factor == XFactor::PerToken)
    }

    /// Dequantizes `k` values of a row. `factor` is the row's or the given one.
    pub fn dequantize_row(&self, codes: &[u8], scales: &[u8], factor: Option<f32>, k: usize) -> Vec<f32> {
        let factor = factor.unwrap_or(1.0);
        let value = |column: usize| {
            let at = self.block.map_or(0, |block| column / block);
            let scale = match self.scale {
                None => 1.0,
                Some(ScaleType::E8M0) => e8m0_to_f32(scales[at]),
                Some(ScaleType::E4M3) => e4m3_to_f32(scales[at]),
                Some(_) => f32::from_le_bytes([0, 1, 2, 3].map(|byte| scales[at * 4 + byte])),
            };
            let number = match self.code {
                XCode::Int8 => f32::from(codes[column] as i8),
                XCode::E4M3 => e4m3_to_f32(codes[column]),
                XCode::E2M1 => f32::from(E2M1_DOUBLED[usize::from(codes[column / 2] >> (4 * (column % 2)) & 15)]) * 0.5,
            };
            factor * (scale * number)
        };
        (0..k).map(value).collect()
    }

    /// One-byte scale of a block. `bits` is its largest magnitude. E2M1 takes the
    /// candidate with the least error.
    fn byte_scale(&self, x: &[f32], bits: u32, inverse_factor: f32) -> u8 {
        if bits >= INFINITY_BITS || inverse_factor.is_nan() {
            return if self.scale == Some(ScaleType::E4M3) { 0x7f } else { 0xff };
        }
        let choices = self.choices(bits, inverse_factor);
        if self.code != XCode::E2M1 {
            return choices[0].0;
        }
        let [first, others @ ..] = choices;
        let inverse = self.byte_inverse(first.0);
        let halves = || x.iter().map(move |v| f16::from_f32((v.abs() * inverse_factor * inverse).min(ERROR_MOST)));
        let error = |(scale, square): (u8, f32)| {
            let ratio = f16::from_f32(self.byte_number(first.0) * self.byte_inverse(scale));
            // A scale of 0 has no error, so it must not win.
            if square == 0.0 { f32::INFINITY } else { e2m1_error(halves().map(|half| half * ratio)) as f32 * square }
        };
        let nearer = |(best, least): (u8, f32), choice: (u8, f32)| {
            let error = error(choice);
            if error < least { (choice.0, error) } else { (best, least) }
        };
        others.into_iter().fold((first.0, error(first)), nearer).0
    }

    /// Candidate scales of an E2M1 block, possibly with duplicates. For other
    /// codes the first is the scale.
    ///
    /// Each has its square. E8M0 has the square relative to the first candidate, since
    /// squares of powers of two may overflow.
    fn choices(&self, bits: u32, inverse_factor: f32) -> [(u8, f32); 3] {
        if self.scale == Some(ScaleType::E4M3) {
            let of_factor = f32::from_bits(bits) * inverse_factor;
            let scales = NVFP4_LARGEST.map(|largest| f32_to_e4m3(of_factor * (1.0 / largest)));
            return scales.map(|scale| (scale, e4m3_to_f32(scale).powi(2)));
        }
        let power = self.power(bits);
        let second = (power.saturating_add(1), 4.0);
        [(power, 1.0), second, second]
    }

    /// Candidate scales of an E2M1 block with finite largest magnitude `largest`.
    /// Duplicates are possible.
    ///
    /// `factor` is the row's or the given one.
    ///
    /// ```
    /// # use qgemm_formats::XFormat;
    /// let parts = XFormat::MxFp4.parts(false, None).expect("it has codes");
    /// assert_eq!(parts.e2m1_scales(5.0, None)[..2], [1.0, 2.0]);
    /// ```
    pub fn e2m1_scales(&self, largest: f32, factor: Option<f32>) -> [f32; 3] {
        let choices = self.choices(largest.to_bits(), factor.map_or(1.0, checked_inverse));
        choices.map(|(scale, _)| self.byte_number(scale))
    }

    /// Value of a one-byte scale.
    fn byte_number(&self, scale: u8) -> f32 {
        if self.scale == Some(ScaleType::E8M0) { e8m0_to_f32(scale) } else { e4m3_to_f32(scale) }
    }

    /// Multiplier of values for a one-byte scale: its inverse, NaN for NaN, 0 for 0.
    fn byte_inverse(&self, scale: u8) -> f32 {
        if self.scale == Some(ScaleType::E8M0) {
            return e8m0_inverse(scale);
        }
        match e4m3_to_f32(scale) {
            0.0 => 0.0,
            scale => 1.0 / scale,
        }
    }

    /// E8M0 code of a block with this largest magnitude. For E2M1, the
    /// first of two candidates.
    fn power(&self, bits: u32) -> u8 {
        if bits >= INFINITY_BITS {
            return 0xff;
        }
        let exponent = bits >> 23;
        let code = match self.code {
            // The OCP specification's floor would clip values between 448 and 512.
            XCode::E4M3 => (exponent + u32::from(bits & 0x7f_ffff > E4M3_MAX_FRACTION)).saturating_sub(E4M3_EXPONENT),
            _ => exponent.saturating_sub(E2M1_EXPONENT),
        };
        // 2⁻¹²⁷ is subnormal, which some devices flush to 0.
        code.max(1) as u8
    }

    /// Encodes values of one scale.
    fn encode(&self, x: &[f32], inverse_factor: f32, inverse: f32, codes: &mut [u8]) {
        match self.code {
            XCode::Int8 => {
                for (code, &v) in codes.iter_mut().zip(x) {
                    *code = (v * inverse + ROUNDER).to_bits() as u8;
                }
            }
            XCode::E4M3 => {
                for (code, &v) in codes.iter_mut().zip(x) {
                    *code = f32_to_e4m3(v * inverse);
                }
            }
            XCode::E2M1 => {
                for (code, pair) in codes.iter_mut().zip(x.chunks(2)) {
                    let each = |v: f32| f32_to_e2m1(v * inverse_factor * inverse);
                    *code = each(pair[0]) | pair.get(1).map_or(0, |&v| each(v) << 4);
                }
            }
        }
    }
}

/// Quantization error of E2M1 codes, in squares of fixed-point units of the scale.
fn e2m1_error(magnitudes: impl Iterator<Item = f16>) -> u32 {
    let error = |magnitude: f16| {
        let magnitude = magnitude.to_f32();
        let number = f32::from(E2M1_DOUBLED[usize::from(f32_to_e2m1(magnitude))]) * 0.5;
        let parts = ((magnitude - number) * ERROR_PARTS + ROUNDER).to_bits() as i32 - ROUNDER.to_bits() as i32;
        parts.unsigned_abs().pow(2)
    };
    magnitudes.map(error).sum()
}

/// E4M3 with a given scale: only codes can mark values that are not finite.
fn encode_given(x: &[f32], inverse: f32, codes: &mut [u8]) {
    // Without a finite inverse, padding columns become NaN as well.
    codes.fill(f32_to_e4m3(0.0 * inverse));
    for (code, &v) in codes.iter_mut().zip(x) {
        *code = if v.is_finite() { f32_to_e4m3(v * inverse) } else { 0x7f };
    }
}

/// Bits of the largest magnitude; they order like numbers.
/// `of_finite` skips infinity and NaN.
fn largest(values: &[f32], of_finite: bool) -> u32 {
    let bits = values.iter().map(|v| v.to_bits() & 0x7fff_ffff);
    bits.fold(0, |most, bits| if of_finite && bits >= INFINITY_BITS { most } else { most.max(bits) })
}

/// Scale that maps this magnitude to `most`. At least the smallest normal number,
/// so that its inverse is finite.
fn f32_scale(bits: u32, most: f32) -> f32 {
    (f32::from_bits(bits) / most).max(f32::MIN_POSITIVE)
}

/// `1 / factor`. NaN when the factor or the inverse is not normal.
fn checked_inverse(factor: f32) -> f32 {
    let is_fit = (f32::MIN_POSITIVE..=1.0 / f32::MIN_POSITIVE).contains(&factor);
    if is_fit { 1.0 / factor } else { f32::NAN }
}

fn e8m0_inverse(code: u8) -> f32 {
    if code == 0xff { f32::NAN } else { f32::from_bits((254 - u32::from(code)) << 23) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::QuantizedActivations;

    struct Planes {
        codes: Vec<u8>,
        scales: Vec<u8>,
        sums: Vec<u8>,
        factor: Option<f32>,
    }

    fn quantized(parts: &XParts, x: &[f32], given: Option<f32>) -> Planes {
        let k = x.len();
        let (mut codes, mut scales) = (vec![0xee; parts.code_bytes(k)], vec![0xee; parts.scale_bytes(k)]);
        let mut sums = vec![0xee; parts.sums(k) * 4];
        let row = XRow { codes: &mut codes, scales: &mut scales, sums: &mut sums };
        let factor = parts.quantize_row(x, given, row);
        Planes { codes, scales, sums, factor: factor.or(given) }
    }

    fn all_parts() -> impl Iterator<Item = (XFormat, XParts)> {
        let of = |format: XFormat| [false, true].map(|given| format.parts(given, None).map(|parts| (format, parts)));
        XFormat::ALL.into_iter().flat_map(of).flatten()
    }

    fn wave(len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * i) as f32 * 0.37).sin() * (1.0 + (i % 7) as f32)).collect()
    }

    #[test]
    fn q8_blocks_are_those_of_the_integer_kernels() {
        let x = wave(300);
        for (format, block) in [(XFormat::Q8_0, 32), (XFormat::Q8_256, 256), (XFormat::Q8_1, 32)] {
            let parts = format.parts(false, Some(16)).expect("it has codes");
            let (got, expected) = (quantized(&parts, &x, None), QuantizedActivations::new(&x, block, 16));
            let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
            assert_eq!(got.codes, expected.codes.iter().map(|&code| code as u8).collect::<Vec<_>>(), "{format}");
            assert_eq!(got.scales, bytes(&expected.scales), "{format}");
            assert!(parts.sum_span.is_none() || got.sums == bytes(&expected.sums), "{format}");
        }
    }

    #[test]
    fn values_come_back_within_half_a_step() {
        let x = wave(333);
        for (format, parts) in all_parts() {
            let planes = quantized(&parts, &x, Some(0.02).filter(|_| parts.factor == XFactor::Given));
            let back = parts.dequantize_row(&planes.codes, &planes.scales, planes.factor, x.len());
            let (noise, energy) = x.iter().zip(&back).fold((0.0, 0.0), |(noise, energy), (&x, &q)| {
                (noise + f64::from(x - q).powi(2), energy + f64::from(x).powi(2))
            });
            let limit = match parts.code {
                XCode::Int8 => 2e-4,
                XCode::E4M3 => 2e-3,
                XCode::E2M1 => 3e-2,
            };
            assert!(noise / energy < limit, "{format}: {:e}", noise / energy);
        }
    }

    #[test]
    fn what_is_not_finite_stays_among_those_that_share_its_scale() {
        for (format, parts) in all_parts() {
            let given = Some(1.0).filter(|_| parts.factor == XFactor::Given);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = wave(512);
                let clean = quantized(&parts, &x, given);
                let of_clean = parts.dequantize_row(&clean.codes, &clean.scales, clean.factor, x.len());
                x[300] = bad;
                let planes = quantized(&parts, &x, given);
                let back = parts.dequantize_row(&planes.codes, &planes.scales, planes.factor, x.len());
                let shared = match (parts.scale, parts.block) {
                    (None, _) => 300..301,
                    (Some(_), None) => 0..512,
                    (Some(_), Some(block)) => 300 / block * block..(300 / block + 1) * block,
                };
                for (i, (value, clean)) in back.iter().zip(&of_clean).enumerate() {
                    assert_eq!(value.is_nan(), shared.contains(&i), "{format} {bad} at {i}");
                    assert!(shared.contains(&i) || value == clean, "{format} at {i}");
                }
            }
        }
    }

    #[test]
    fn zeros_tiny_and_huge_values_have_usable_scales() {
        for (format, parts) in all_parts() {
            for value in [0.0, -0.0, f32::from_bits(1), f32::MIN_POSITIVE, f32::MAX] {
                let given = Some(2f32.powi(-126)).filter(|_| parts.factor == XFactor::Given);
                let planes = quantized(&parts, &[value; 40], given);
                let back = parts.dequantize_row(&planes.codes, &planes.scales, planes.factor, 40);
                assert!(back.iter().all(|v| !v.is_nan()), "{format} {value:e}: {:?}", back[0]);
                assert!(value != 0.0 || back.iter().all(|&v| v == 0.0), "{format}");
            }
        }
    }

    #[test]
    fn a_factor_that_has_no_inverse_makes_nan() {
        for (format, parts) in all_parts().filter(|(_, parts)| parts.factor == XFactor::Given) {
            for factor in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-40, 2f32.powi(127)] {
                let planes = quantized(&parts, &[0.5; 64], Some(factor));
                let back = parts.dequantize_row(&planes.codes, &planes.scales, Some(1.0), 64);
                assert!(back.iter().all(|v| v.is_nan()), "{format} {factor:e}");
            }
        }
    }

    #[test]
    fn powers_of_two_fill_the_range_of_their_codes() {
        let power = |format: XFormat, max: f32| {
            let parts = format.parts(false, None).expect("it has codes");
            e8m0_to_f32(parts.power(max.to_bits()))
        };
        assert_eq!(
            [448.0, 449.0, 1.75, 1.76].map(|max| power(XFormat::MxFp8, max)),
            [1.0, 2.0, 2f32.powi(-8), 2f32.powi(-7)]
        );
        assert_eq!([4.0, 6.0, 7.9, 8.0].map(|max| power(XFormat::MxFp4, max)), [1.0, 1.0, 1.0, 2.0]);
        assert_eq!(power(XFormat::MxFp4, 0.0), 2f32.powi(-126));
    }

    #[test]
    fn rows_are_stored_in_whole_blocks_and_words() {
        for (format, parts) in all_parts() {
            for k in [1, 31, 33, 257] {
                let columns = parts.columns(k);
                assert!(columns >= k && parts.code_bytes(k).is_multiple_of(16), "{format}");
                assert!(parts.scale_bytes(k).is_multiple_of(4), "{format}");
                assert!(parts.block.is_none_or(|block| parts.scales(k) * block == columns), "{format}");
            }
        }
    }
}
