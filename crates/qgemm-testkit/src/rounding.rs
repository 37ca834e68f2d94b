//! What activations become before they are multiplied: the numbers that a kernel really uses.

use qgemm_formats::{DType, Format, NO_COLUMN, QuantizedActivations};
use qgemm_hal::{Math, StagedX, TileConfig};

/// How a plan changes activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rounding<'a> {
    /// Not at all.
    None,
    /// They are copied for matrix instructions.
    Staged(StagedX),
    /// They are quantized to eight bits.
    Int8 {
        /// Columns that share a factor.
        block: usize,
        /// The column of X that every stored column of W is multiplied with, where they are permuted: blocks are of stored
        /// columns.
        order: Option<&'a [u32]>,
    },
}

impl<'a> Rounding<'a> {
    /// What a kernel of `config` does with activations for weights of `format`, whose columns are permuted by `order`.
    pub fn of(config: &TileConfig, format: Format, order: Option<&'a [u32]>) -> Self {
        match (config.math, config.staged_x) {
            (Math::DotI8, _) => Rounding::Int8 { block: format.activation_block(), order },
            (_, Some(staged)) => Rounding::Staged(staged),
            (_, None) => Rounding::None,
        }
    }

    /// Whether `x_dtype` is rounded to something narrower.
    pub fn loses(&self, x_dtype: DType) -> bool {
        match self {
            Rounding::None => false,
            Rounding::Staged(staged) => staged.dtype != x_dtype,
            Rounding::Int8 { .. } => true,
        }
    }
}

/// `x`, rows of `k` values, as the kernel multiplies it.
pub fn rounded(x: &[f32], k: usize, rounding: Rounding<'_>) -> Vec<f64> {
    match rounding {
        Rounding::None => x.iter().copied().map(f64::from).collect(),
        Rounding::Staged(staged) => x.chunks(k).flat_map(|row| staged_row(row, staged)).collect(),
        Rounding::Int8 { block, order } => x.chunks(k).flat_map(|row| quantized_row(row, block, order)).collect(),
    }
}

/// As the copy holds it, divided by the factors again: f32's largest numbers may be rounded up to 2¹²⁸.
fn staged_row(row: &[f32], StagedX { dtype, scaled }: StagedX) -> Vec<f64> {
    let (up, down) = if scaled { token_factor(row) } else { (1.0, 1.0) };
    let values: Vec<f32> = row.iter().map(|&v| (f64::from(v) * up) as f32).collect();
    let held = dtype.decode(&dtype.encode(&values));
    let back = held.iter().zip(row).map(|(&held, &v)| match held.is_infinite() && v.is_finite() {
        // Beyond bf16's largest number, which is as near as infinity would be.
        true => f64::from(f32::from_bits(0x7f7f_0000).copysign(v)),
        false => f64::from(held) * down,
    });
    back.collect()
}

fn quantized_row(row: &[f32], block: usize, order: Option<&[u32]>) -> Vec<f64> {
    let stored: Vec<f32> = match order {
        None => row.to_vec(),
        Some(order) => {
            order.iter().map(|&column| if column == NO_COLUMN { 0.0 } else { row[column as usize] }).collect()
        }
    };
    let quantized = QuantizedActivations::new(&stored, block, block);
    let values = quantized.codes.iter().enumerate();
    let values = values.map(|(i, &code)| f64::from(quantized.scales[i / block]) * f64::from(code));
    match order {
        None => values.take(row.len()).collect(),
        Some(order) => {
            // A column that feeds no weight keeps its value: it is multiplied with 0.
            let mut out: Vec<f64> = row.iter().copied().map(f64::from).collect();
            for (&column, value) in order.iter().zip(values).filter(|(column, _)| **column != NO_COLUMN) {
                out[column as usize] = value;
            }
            out
        }
    }
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
    use super::*;

    const F16: Rounding<'_> = Rounding::Staged(StagedX { dtype: DType::F16, scaled: true });

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
        let staged = Rounding::Staged(StagedX { dtype: DType::BF16, scaled: false });
        let largest = f64::from(f32::from_bits(0x7f7f_0000));
        let bf16 = rounded(&[f32::MAX, f32::MIN, f32::NEG_INFINITY], 3, staged);
        assert_eq!(bf16, [largest, -largest, f64::NEG_INFINITY]);
        assert_eq!(rounded(&[f32::MAX], 1, F16), [2f64.powi(128)]);
    }

    #[test]
    fn blocks_of_eight_bits_are_of_stored_columns() {
        let x = [127.0, 1.0, 0.25, 12.7, 0.3, 0.0];
        let plain = Rounding::Int8 { block: 3, order: None };
        let close = |got: &[f64], expected: &[f64]| {
            got.len() == expected.len() && got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6)
        };
        assert!(close(&rounded(&x, 6, plain), &[127.0, 1.0, 0.0, 12.7, 0.3, 0.0]));
        let order = [0, 3, NO_COLUMN, 1, 2, 4];
        let permuted = Rounding::Int8 { block: 3, order: Some(&order) };
        let got = rounded(&x, 6, permuted);
        assert!(close(&[got[0], got[3], got[1]], &[127.0, 13.0, 1.0]), "{got:?}");
        assert!((got[2] - 0.25).abs() <= 0.5 / 127.0 && got[5] == 0.0, "{got:?}");
        let spoiled = rounded(&[f32::INFINITY, 1.0, 2.0, 3.0], 4, Rounding::Int8 { block: 2, order: None });
        assert!(spoiled[..2].iter().all(|v| v.is_nan()) && spoiled[2..].iter().all(|v| v.is_finite()));
    }
}
