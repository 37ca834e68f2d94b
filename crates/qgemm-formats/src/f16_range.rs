//! f16 range check: whether a weight can be converted to f16 once, for
//! the matrix instructions of large M.

use half::f16;
use rayon::prelude::*;

use crate::desc::{Encoding, Format, ScaleType};
use crate::dtype::DType;
use crate::sub_scale::Minimum;
use crate::weight::HostWeight;

/// Smallest normal f16.
const SMALLEST_NORMAL: f32 = 1.0 / 16384.0;
/// Limit for the squared error from f16 subnormals, relative to the row's
/// Σw². It is a quarter of normal rounding error.
const MOST_LOST: f64 = 1.0 / (1 << 24) as f64;
/// Maximum squared error of one subnormal rounding: (half of 2^-24)².
const MOST_LOST_BY_ONE: f64 = 1.0 / (1u64 << 50) as f64;

impl HostWeight {
    /// Whether f16 arithmetic on this weight's values (without row scales) is
    /// safe:
    ///
    /// - Range: no block scale, nor its product
    ///   with sub-scales and any code, exceeds 65504
    ///   ([`FormatDesc::unit_range`](crate::FormatDesc::unit_range)).
    ///   For formats without such scales, no value does.
    /// - Precision: in each row, f16 subnormals lose at most 2^-24 of the row's
    ///   Σw². Formats of integers with f16 or E4M3 scales lose nothing, since
    ///   their values are multiples of 2^-24.
    ///
    /// Infinite or NaN codes (FP8, F16) are ignored: f16 represents them.
    /// Reads scales, and values only for the second rule. Runs on all threads
    /// of the current rayon pool.
    pub fn fits_f16(&self) -> bool {
        self.fits_f16_times(&|_| None)
    }

    /// [`HostWeight::fits_f16`] with row scales applied.
    pub fn fits_f16_scaled(&self) -> bool {
        let scales = self.row_scale();
        self.fits_f16_times(&|n| scales.map(|scales| scales[n]))
    }

    /// Checks both rules on rows times their factors.
    fn fits_f16_times(&self, factor: &(dyn Fn(usize) -> Option<f32> + Sync)) -> bool {
        let format = self.format();
        let largest_scale = f16::MAX.to_f32() / format.unit_range;
        (0..self.n()).into_par_iter().all(|n| {
            let (row, factor) = (self.row(n), factor(n));
            let times = factor.unwrap_or(1.0).abs();
            let mut blocks = row.chunks_exact(format.block_bytes);
            let largest = |dtype: DType, block: &[u8]| dtype.read(block, 0).abs() * times <= f16::MAX.to_f32();
            let in_range = match format.encoding {
                // Values that are infinite already are ignored.
                Encoding::Plain(DType::F16) => {
                    factor.is_none() || blocks.all(|b| largest(DType::F16, b) || !DType::F16.read(b, 0).is_finite())
                }
                Encoding::Plain(dtype) => blocks.all(|b| largest(dtype, b)),
                _ if format.float_scales.is_empty() => format.unit_range * times <= f16::MAX.to_f32(),
                _ => blocks.all(|b| format.float_scales.iter().all(|s| s.read(b).abs() * times <= largest_scale)),
            };
            let may_be_small = factor.is_some() || loses_small_values(format);
            in_range && (!may_be_small || keeps_small_values(format, row, times))
        })
    }
}

/// Whether the format can encode values below the smallest f16 step.
fn loses_small_values(format: Format) -> bool {
    match format.encoding {
        Encoding::Plain(dtype) => dtype != DType::F16,
        _ => format.float_scales.iter().any(|s| match s.kind {
            ScaleType::F32 | ScaleType::E8M0 => true,
            ScaleType::F16 => has_fractions(format),
            ScaleType::E4M3 => false,
        }),
    }
}

/// Whether values are fractions of the block's scale.
fn has_fractions(format: Format) -> bool {
    format.sub_scales.times < 1.0 || matches!(format.sub_scales.minimum, Minimum::Eighths(_))
}

/// Precision rule for one row times a factor.
fn keeps_small_values(format: Format, row: &[u8], factor: f32) -> bool {
    // Maximum error of the whole row. Most rows reach the threshold
    // in their first blocks.
    let enough = (row.len() / format.block_bytes * format.block_len) as f64 * (MOST_LOST_BY_ONE / MOST_LOST);
    let (mut energy, mut lost) = (0.0, 0.0);
    let mut values = vec![0.0; format.block_len];
    for block in row.chunks_exact(format.block_bytes) {
        (format.dequantize_block)(block, &mut values);
        for value in values.iter().map(|v| v * factor).filter(|v| v.is_finite()) {
            energy += f64::from(value).powi(2);
            if value.abs() < SMALLEST_NORMAL {
                lost += f64::from(value - f16::from_f32(value).to_f32()).powi(2);
            }
        }
        if energy >= enough {
            return true;
        }
    }
    lost <= MOST_LOST * energy
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SharedBytes;

    fn weight(name: &str, n: usize, k: usize, blocks: Vec<u8>) -> HostWeight {
        HostWeight::new(name.parse().expect("a format"), n, k, SharedBytes::from(blocks)).expect("valid")
    }

    /// Four rows of two MXFP4 blocks filled with one code. The last block
    /// alone has exponent `e8m0`.
    fn mxfp4(code: u8, e8m0: u8) -> bool {
        let mut blocks = [127].iter().chain(&[code << 4 | code; 16]).copied().collect::<Vec<u8>>().repeat(8);
        blocks[7 * 17] = e8m0;
        weight("mxfp4", 4, 64, blocks).fits_f16()
    }

    #[test]
    fn powers_of_two_beyond_f16_are_found_in_one_block() {
        const SIX: u8 = 7;
        assert!(mxfp4(SIX, 127 + 13), "6 · 2^13 is 49152");
        assert!(!mxfp4(SIX, 127 + 14), "6 · 2^14 is 98304");
        assert!(!mxfp4(0, 254), "codes of 0 with an infinite scale would be NaN");
        // The block's loss is small relative to the rest of the row.
        assert!(mxfp4(SIX, 0));
    }

    #[test]
    fn a_row_of_small_powers_of_two_is_exact_or_lost() {
        let all =
            |e8m0: u8| weight("mxfp4", 1, 64, [e8m0].iter().chain(&[0x11; 16]).copied().collect::<Vec<u8>>().repeat(2));
        assert!(all(127 - 23).fits_f16(), "half of 2^-23 is f16's smallest step");
        assert!(!all(127 - 24).fits_f16());
        assert!(!all(1).fits_f16());
        assert!(!all(0).fits_f16());
    }

    #[test]
    fn eighths_of_the_smallest_scale_are_lost() {
        // Codes of 3 bits, nibbles of scales, d.
        let row = |code: u8, d: u8| {
            let codes = [
                code | code << 3 | code << 6,
                code >> 2 | code << 1 | code << 4 | code << 7,
                code >> 1 | code << 2 | code << 5,
            ];
            weight("iq2", 1, 256, [&codes.repeat(32)[..], &[0; 8], &[d, 0]].concat()).fits_f16()
        };
        assert!(row(0, 1), "8 eighths of 2^-24");
        assert!(!row(1, 1), "25 eighths of 2^-24");
        assert!(row(1, 8), "25 · 2^-24");
    }

    #[test]
    fn zeros_fit_whatever_their_exponent_is() {
        let zeros: Vec<u8> = [0].iter().chain(&[0; 16]).copied().collect::<Vec<u8>>().repeat(2);
        assert!(weight("mxfp4", 1, 64, zeros).fits_f16());
        assert!(weight("fp8_e4m3_block128", 2, 128, vec![0; 2 * 132]).fits_f16());
        assert!(weight("f32", 3, 5, vec![0; 60]).fits_f16());
    }

    /// Two rows of 256 codes. The last of their four blocks
    /// has the scale `scale`.
    fn fp8(name: &str, codes: [u8; 2], scale: f32) -> bool {
        let mut blocks = Vec::new();
        for i in 0..4 {
            blocks.extend(codes.repeat(64));
            blocks.extend(if i < 3 { 0.01f32 } else { scale }.to_le_bytes());
        }
        weight(name, 2, 256, blocks).fits_f16()
    }

    #[test]
    fn f32_scales_are_held_against_the_largest_code() {
        assert!(fp8("fp8_e4m3_block128", [0x38, 0x30], 146.0), "448 · 146 is 65408");
        assert!(!fp8("fp8_e4m3_block128", [0x38, 0x30], 147.0));
        assert!(!fp8("fp8_e4m3_block128", [0, 0], -147.0));
        assert!(!fp8("fp8_e4m3_block128", [0, 0], f32::MAX));
        assert!(fp8("fp8_e5m2_block128", [0x3c, 0x38], 1.125));
        assert!(!fp8("fp8_e5m2_block128", [0x3c, 0x38], 1.25));
        assert!(fp8("fp8_e4m3_block128", [0x38, 0x30], 1e-30), "the row's other block outweighs it");
    }

    #[test]
    fn row_scales_count_where_they_are_applied() {
        let scaled = |name: &str, codes: Vec<u8>, scale: f32| {
            let weight = weight(name, 1, 256, codes).with_row_scale(vec![scale]).expect("one row");
            (weight.fits_f16(), weight.fits_f16_scaled())
        };
        let fp8 = |scale| scaled("fp8_e4m3", vec![0x38; 256], scale);
        assert_eq!(
            [fp8(1e-3), fp8(146.0), fp8(147.0), fp8(1e-30)],
            [(true, true), (true, true), (true, false), (true, false)]
        );
        let halves = |value: f32, scale| scaled("f16", DType::F16.encode(&[value; 256]), scale);
        assert_eq!(
            [halves(1.0, -3.0), halves(6e4, 2.0), halves(1.0, 1e-9)],
            [(true, true), (true, false), (true, false)]
        );
        assert_eq!(halves(f32::INFINITY, 2.0), (true, true));
    }

    #[test]
    fn a_row_is_lost_on_its_own() {
        let row = |scale: f32| [0x38u8; 128].into_iter().chain(scale.to_le_bytes());
        let rows = |small: f32| weight("fp8_e4m3_block128", 2, 128, row(1.0).chain(row(small)).collect());
        assert!(rows(1e-3).fits_f16());
        assert!(rows(2.0f32.powi(-24)).fits_f16(), "multiples of 2^-24 are exact");
        assert!(!rows(1.3 * 2.0f32.powi(-23)).fits_f16());
        assert!(!rows(1e-30).fits_f16());
    }

    #[test]
    fn plain_values_are_looked_at() {
        let f32s = |values: &[f32]| weight("f32", 1, values.len(), DType::F32.encode(values)).fits_f16();
        assert!(f32s(&[1.0, -65504.0, 0.0]));
        assert!(!f32s(&[1.0, -65520.0]));
        assert!(!f32s(&[1.0, f32::INFINITY]));
        assert!(!f32s(&[1e-9, 2e-9]));
        assert!(f32s(&[1e-9, 1.0]));
        let bf16s = |values: &[f32]| weight("bf16", 1, values.len(), DType::BF16.encode(values)).fits_f16();
        assert!(bf16s(&[0.5, -3.0]));
        assert!(!bf16s(&[1e5]));
        assert!(weight("f16", 1, 2, DType::F16.encode(&[65504.0, 6e-8])).fits_f16());
    }

    #[test]
    fn halves_with_sub_scales_are_bounded_by_their_largest_product() {
        let q6_k = |d: f32| {
            let mut block = vec![0u8; 210];
            block[208..].copy_from_slice(&f16::from_f32(d).to_le_bytes());
            weight("q6_k", 1, 256, block).fits_f16()
        };
        assert!(q6_k(15.0));
        assert!(!q6_k(16.0), "128 · 32 · 16 is 65536");
        assert!(q6_k(6e-8));
    }
}
