//! Rounding of activations before the product, from a kernel's
//! config.

use qgemm_formats::{DType, NO_COLUMN, QuantizedActivations, XFormat, XRow};
use qgemm_hal::{TileConfig, XPrologue};

use crate::convert::converted_row;

/// Rounding of activations in a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rounding<'a> {
    /// No rounding.
    None,
    /// An X prologue converts activations.
    Convert {
        /// The type.
        dtype: DType,
        /// Whether tokens are first scaled by powers of two.
        row_factors: bool,
    },
    /// Activations are quantized to eight bits.
    Q8 {
        /// Columns that share a scale; 0 for whole rows.
        block: usize,
        /// The column of X for each stored column of W, if permuted.
        /// Blocks consist of stored columns.
        order: Option<&'a [u32]>,
    },
    /// Activations are quantized to another format for the product.
    Codes(XFormat),
}

impl<'a> Rounding<'a> {
    /// The rounding of a kernel `config` for activations of type `x`,
    /// with weight columns permuted by `order`.
    /// `None` if the oracle does not model it.
    pub fn of(config: &TileConfig, x: DType, order: Option<&'a [u32]>) -> Option<Self> {
        match (config.x_prologue, config.x_format) {
            (Some(XPrologue::Convert { row_factors }), XFormat::Plain(dtype)) => {
                Some(Rounding::Convert { dtype, row_factors })
            }
            // f32 holds all values of the other types.
            (None, XFormat::Plain(dtype)) if dtype == x || dtype == DType::F32 => Some(Rounding::None),
            (None, XFormat::Q8_0) => Some(Rounding::Q8 { block: 32, order }),
            (None, XFormat::Q8_256) => Some(Rounding::Q8 { block: 256, order }),
            (None, XFormat::Int8Token) => Some(Rounding::Q8 { block: 0, order }),
            (None, format) if order.is_none() && format.parts(false, None).is_some() => Some(Rounding::Codes(format)),
            _ => None,
        }
    }

    /// Whether `x_dtype` is rounded to a narrower type.
    pub fn loses(&self, x_dtype: DType) -> bool {
        match self {
            Rounding::None => false,
            Rounding::Convert { dtype, .. } => *dtype != x_dtype,
            Rounding::Q8 { .. } | Rounding::Codes(_) => true,
        }
    }
}

/// `x`, rows of `k` values, as the kernel multiplies it.
pub fn rounded(x: &[f32], k: usize, rounding: Rounding<'_>) -> Vec<f64> {
    match rounding {
        Rounding::None => x.iter().copied().map(f64::from).collect(),
        Rounding::Convert { dtype, row_factors } => {
            x.chunks(k).flat_map(|row| unscaled_row(row, dtype, row_factors)).collect()
        }
        Rounding::Codes(format) => x.chunks(k).flat_map(|row| coded_row(row, format)).collect(),
        Rounding::Q8 { block, order } => x.chunks(k).flat_map(|row| quantized_row(row, block, order)).collect(),
    }
}

/// The converted row, divided by its factor. f64, because f32's
/// largest numbers may round up to 2¹²⁸.
fn unscaled_row(row: &[f32], dtype: DType, row_factors: bool) -> Vec<f64> {
    let (held, factor) = converted_row(row, dtype, row_factors);
    held.iter().map(|&held| f64::from(held) * f64::from(factor)).collect()
}

/// The dequantized row.
fn coded_row(row: &[f32], format: XFormat) -> Vec<f64> {
    let Some(parts) = format.parts(false, None) else { return row.iter().copied().map(f64::from).collect() };
    let [mut codes, mut scales, mut sums] =
        [parts.code_bytes(row.len()), parts.scale_bytes(row.len()), 4 * parts.sums(row.len())]
            .map(|bytes| vec![0; bytes]);
    let factor = parts.quantize_row(row, None, XRow { codes: &mut codes, scales: &mut scales, sums: &mut sums });
    parts.dequantize_row(&codes, &scales, factor, row.len()).into_iter().map(f64::from).collect()
}

fn quantized_row(row: &[f32], block: usize, order: Option<&[u32]>) -> Vec<f64> {
    let stored: Vec<f32> = match order {
        None => row.to_vec(),
        Some(order) => {
            order.iter().map(|&column| if column == NO_COLUMN { 0.0 } else { row[column as usize] }).collect()
        }
    };
    let block = if block == 0 { stored.len() } else { block };
    let quantized = QuantizedActivations::new(&stored, block, block);
    let values = quantized.codes.iter().enumerate();
    let values = values.map(|(i, &code)| f64::from(quantized.scales[i / block]) * f64::from(code));
    match order {
        None => values.take(row.len()).collect(),
        Some(order) => {
            // A feature without a stored column keeps its value, which is
            // multiplied by 0.
            let mut out: Vec<f64> = row.iter().copied().map(f64::from).collect();
            for (&column, value) in order.iter().zip(values).filter(|(column, _)| **column != NO_COLUMN) {
                out[column as usize] = value;
            }
            out
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const F16: Rounding<'_> = Rounding::Convert { dtype: DType::F16, row_factors: true };

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
        let converted = Rounding::Convert { dtype: DType::BF16, row_factors: false };
        let largest = f64::from(f32::from_bits(0x7f7f_0000));
        let bf16 = rounded(&[f32::MAX, f32::MIN, f32::NEG_INFINITY], 3, converted);
        assert_eq!(bf16, [largest, -largest, f64::NEG_INFINITY]);
        assert_eq!(rounded(&[f32::MAX], 1, F16), [2f64.powi(128)]);
    }

    #[test]
    fn blocks_of_eight_bits_are_of_stored_columns() {
        let x = [127.0, 1.0, 0.25, 12.7, 0.3, 0.0];
        let plain = Rounding::Q8 { block: 3, order: None };
        let close = |got: &[f64], expected: &[f64]| {
            got.len() == expected.len() && got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6)
        };
        assert!(close(&rounded(&x, 6, plain), &[127.0, 1.0, 0.0, 12.7, 0.3, 0.0]));
        let order = [0, 3, NO_COLUMN, 1, 2, 4];
        let permuted = Rounding::Q8 { block: 3, order: Some(&order) };
        let got = rounded(&x, 6, permuted);
        assert!(close(&[got[0], got[3], got[1]], &[127.0, 13.0, 1.0]), "{got:?}");
        assert!((got[2] - 0.25).abs() <= 0.5 / 127.0 && got[5] == 0.0, "{got:?}");
        let spoiled = rounded(&[f32::INFINITY, 1.0, 2.0, 3.0], 4, Rounding::Q8 { block: 2, order: None });
        assert!(spoiled[..2].iter().all(|v| v.is_nan()) && spoiled[2..].iter().all(|v| v.is_finite()));
    }
}
