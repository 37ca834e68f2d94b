//! What activations become where a plan copies them for matrix instructions: the numbers that are really multiplied.

use qgemm_hal::StagedX;

/// `x`, rows of `k` values, as the copy of `staged` holds it, divided by the factors again: f32's largest numbers may be
/// rounded up to 2¹²⁸.
pub fn rounded(x: &[f32], k: usize, staged: Option<StagedX>) -> Vec<f64> {
    let Some(StagedX { dtype, scaled }) = staged else { return x.iter().copied().map(f64::from).collect() };
    let round = |row: &[f32]| -> Vec<f64> {
        let (up, down) = if scaled { token_factor(row) } else { (1.0, 1.0) };
        let values: Vec<f32> = row.iter().map(|&v| (f64::from(v) * up) as f32).collect();
        let held = dtype.decode(&dtype.encode(&values));
        let back = held.iter().zip(row).map(|(&held, &v)| match held.is_infinite() && v.is_finite() {
            // Beyond bf16's largest number, which is as near as infinity would be.
            true => f64::from(f32::from_bits(0x7f7f_0000).copysign(v)),
            false => f64::from(held) * down,
        });
        back.collect()
    };
    x.chunks(k).flat_map(round).collect()
}

/// The power of two that brings the largest finite magnitude of a row to [2¹⁴, 2¹⁵), 2¹²⁶ at most, and its inverse.
fn token_factor(row: &[f32]) -> (f64, f64) {
    let largest = row.iter().filter(|v| v.is_finite()).fold(0.0, |max, v| f64::max(max, f64::from(v.abs())));
    // Tried one by one: a logarithm may round to the next power.
    let mut exponent = 126;
    while largest * 2f64.powi(exponent) >= 2f64.powi(15) {
        exponent -= 1;
    }
    (2f64.powi(exponent), 2f64.powi(-exponent))
}

#[cfg(test)]
mod tests {
    use qgemm_formats::DType;

    use super::*;

    const F16: Option<StagedX> = Some(StagedX { dtype: DType::F16, scaled: true });

    #[test]
    fn the_factor_fills_the_range_of_f16() {
        for exponent in -149..128 {
            let (up, down) = token_factor(&[2f32.powi(exponent), -(2f32.powi(exponent))]);
            assert_eq!(up * down, 1.0);
            let scaled = 2f64.powi(exponent) * up;
            assert!(scaled == 2f64.powi(14) || (exponent < -112 && up == 2f64.powi(126)), "2^{exponent}: {up}");
        }
        assert_eq!(token_factor(&[f32::MAX]).0, 2f64.powi(-113));
        assert_eq!(token_factor(&[0.0, f32::INFINITY, 1.0, f32::NAN]).0, 2f64.powi(14));
    }

    #[test]
    fn rows_keep_eleven_bits_whatever_their_magnitude() {
        let x = [1e30f32, -3e29, 1e-30, 3.3e-31, 0.0, 0.0];
        for (rounded, x) in rounded(&x, 2, F16).iter().zip(x.map(f64::from)) {
            assert!((rounded - x).abs() <= x.abs() * 2f64.powi(-11), "{x} became {rounded}");
        }
        let mixed = rounded(&[f32::INFINITY, 1.0, f32::NAN, 2049.0], 2, F16);
        assert_eq!(mixed[..2], [f64::INFINITY, 1.0]);
        assert!(mixed[2].is_nan() && mixed[3] == 2048.0, "{mixed:?}");
    }

    #[test]
    fn nothing_finite_becomes_infinite_in_bf16() {
        let staged = Some(StagedX { dtype: DType::BF16, scaled: false });
        let largest = f64::from(f32::from_bits(0x7f7f_0000));
        let bf16 = rounded(&[f32::MAX, f32::MIN, f32::NEG_INFINITY], 3, staged);
        assert_eq!(bf16, [largest, -largest, f64::NEG_INFINITY]);
        assert_eq!(rounded(&[f32::MAX], 1, F16), [2f64.powi(128)]);
    }
}
