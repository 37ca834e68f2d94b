//! Oracle of conversions, exact to the bit: every value is
//! rounded once, from f64.

use qgemm_formats::DType;

/// `value` rounded to `dtype`, to nearest even.
/// Values beyond f16's range become infinite. Finite values
/// beyond bf16's range become its largest number.
///
/// ```
/// use qgemm_testkit::nearest;
/// use qgemm_formats::DType;
/// assert_eq!(nearest(2049.0, DType::F16), 2048.0);
/// assert_eq!(nearest(65520.0, DType::F16), f32::INFINITY);
/// assert_eq!(nearest(f32::MAX.into(), DType::BF16), f32::from_bits(0x7f7f_0000));
/// ```
pub fn nearest(value: f64, dtype: DType) -> f32 {
    if !value.is_finite() || value == 0.0 {
        return value as f32;
    }
    // Significand bits, and exponents of the smallest and largest
    // normal number.
    let (bits, smallest, largest) = match dtype {
        DType::F32 => (24, -126, 127),
        DType::F16 => (11, -14, 15),
        DType::BF16 => (8, -126, 127),
    };
    // f64 exponent; all numbers here are normal in f64.
    let exponent = (value.to_bits() >> 52 & 0x7ff) as i32 - 1023;
    let step = 2f64.powi(exponent.max(smallest) - (bits - 1));
    let rounded = (value / step).round_ties_even() * step;
    let end = 2f64.powi(largest + 1);
    match (rounded.abs() < end, dtype) {
        (true, _) => rounded as f32,
        (false, DType::BF16) => ((end - 2f64.powi(largest - bits + 1)) as f32).copysign(value as f32),
        (false, _) => f32::INFINITY.copysign(value as f32),
    }
}

/// A converted row in X's order, and the factor to undo the row's
/// scaling (1 without a row factor).
pub fn converted_row(row: &[f32], dtype: DType, row_factors: bool) -> (Vec<f32>, f32) {
    let (up, down) = if row_factors { row_factor(row) } else { (1.0, 1.0) };
    (row.iter().map(|&v| nearest(f64::from(v) * up, dtype)).collect(), down as f32)
}

/// `X[r, order[c]]` in `dtype`, contiguous, and the factors of
/// the rows.
/// An entry that is no column makes a zero.
pub fn convert(x: &[f32], columns: usize, order: &[u32], dtype: DType, row_factors: bool) -> (Vec<f32>, Vec<f32>) {
    let (mut d, mut factors) = (Vec::new(), Vec::new());
    for row in x.chunks(columns) {
        let (held, factor) = converted_row(row, dtype, row_factors);
        d.extend(order.iter().map(|&column| held.get(column as usize).copied().unwrap_or(0.0)));
        factors.push(factor);
    }
    (d, factors)
}

/// The power of two, at most 2¹²⁶, that scales a row's largest
/// finite magnitude to [2¹⁴, 2¹⁵), and its inverse.
fn row_factor(row: &[f32]) -> (f64, f64) {
    let largest = row.iter().filter(|v| v.is_finite()).fold(0.0, |max, v| f64::max(max, f64::from(v.abs())));
    // A search, because a logarithm may round to the next power.
    let mut exponent = 126;
    while largest * 2f64.powi(exponent) >= 2f64.powi(15) {
        exponent -= 1;
    }
    (2f64.powi(exponent), 2f64.powi(-exponent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_fills_the_range_of_f16() {
        for exponent in -149..128 {
            let (up, down) = row_factor(&[2f32.powi(exponent), -(2f32.powi(exponent))]);
            assert_eq!(up * down, 1.0);
            let scaled = 2f64.powi(exponent) * up;
            assert!(scaled == 2f64.powi(14) || (exponent < -112 && up == 2f64.powi(126)), "2^{exponent}: {up}");
        }
        assert_eq!(row_factor(&[f32::MAX]).0, 2f64.powi(-113));
        assert_eq!(row_factor(&[0.0, f32::INFINITY, 1.0, f32::NAN]).0, 2f64.powi(14));
    }

    #[test]
    fn rounding_agrees_with_other_software() {
        for bits in (0..u32::MAX - 40_000).step_by(39_989) {
            let v = f32::from_bits(bits);
            if v.is_nan() {
                assert!(DType::ALL.iter().all(|&dtype| nearest(v.into(), dtype).is_nan()));
                continue;
            }
            assert_eq!(nearest(v.into(), DType::F32).to_bits(), bits);
            assert_eq!(nearest(v.into(), DType::F16).to_bits(), half::f16::from_f32(v).to_f32().to_bits(), "{v:e}");
            let bf16 = half::bf16::from_f32(v);
            let bf16 = if bf16.is_finite() || v.is_infinite() { bf16 } else { half::bf16::MAX.copysign(bf16) };
            assert_eq!(nearest(v.into(), DType::BF16).to_bits(), bf16.to_f32().to_bits(), "{v:e}");
        }
    }

    #[test]
    fn ties_go_to_even_and_subnormal_numbers_stay() {
        let quantum = 2f64.powi(-24);
        for (value, expected) in [(0.5, 0.0), (0.51, 1.0), (1.5, 2.0), (2.5, 2.0), (-0.5, -0.0), (1023.5, 1024.0)] {
            let got = nearest(value * quantum, DType::F16);
            assert_eq!(got.to_bits(), ((expected * quantum) as f32).to_bits(), "{value}");
        }
        assert_eq!(nearest(65519.99, DType::F16), 65504.0);
        assert_eq!(nearest(f64::from(f32::from_bits(3)), DType::F32).to_bits(), 3);
        assert_eq!(nearest(f64::from(f32::from_bits(0x0001_8000)), DType::BF16).to_bits(), 0x0002_0000);
    }

    #[test]
    fn entries_that_are_no_column_are_zeros() {
        let order = [2, 7, 0, u32::MAX, 2];
        let (d, factors) = convert(&[1.0, 2.0, 3.0, 4e30, 5e30, 6e30], 3, &order, DType::F16, true);
        assert_eq!(d[..5], [3.0, 0.0, 1.0, 0.0, 3.0].map(|v| v * 2f32.powi(13)));
        assert_eq!(factors[0], 2f32.powi(-13));
        let back = |i: usize| d[5 + i] * factors[1];
        assert!((back(0) / 6e30 - 1.0).abs() < 2f32.powi(-11) && back(1) == 0.0);
    }
}
