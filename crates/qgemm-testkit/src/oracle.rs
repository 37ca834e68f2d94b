//! The oracle: the multiplication in f64, over dequantized weights and the activations that the kernel uses.

use qgemm_formats::HostWeight;
use rayon::prelude::*;

/// What a correct kernel computes, and how large the summands of each output were.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// Rows (tokens).
    pub m: usize,
    /// Columns (output features).
    pub n: usize,
    /// `D[M, N]`, row-major.
    pub values: Vec<f64>,
    /// Sum of the squares of all summands of each output, `alpha² Σ w²x² + (beta·c)² + bias²`: the scale that
    /// errors are measured on where summands cancel.
    pub energy: Vec<f64>,
}

/// What is done to the product `X·Wᵀ`.
#[derive(Clone, Copy, Debug)]
pub struct Added<'a> {
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of C and C itself, `[M, N]` without gaps.
    pub c: Option<(f32, &'a [f32])>,
    /// N values.
    pub bias: Option<&'a [f32]>,
}

impl Default for Added<'_> {
    fn default() -> Self {
        Self { alpha: 1.0, c: None, bias: None }
    }
}

/// `alpha · X·Wᵀ + beta · C + bias` for `x[M, K]` without gaps, already rounded as the kernel rounds it.
///
/// # Panics
/// When `x`, C or the bias are not as long as the shape asks for: a test would prove nothing then.
pub fn multiply(weight: &HostWeight, x: &[f32], added: &Added<'_>) -> Expected {
    let (n, k) = (weight.n(), weight.k());
    assert_eq!(x.len() % k, 0, "X is not a whole number of rows of {k}");
    let m = x.len() / k;
    if let Some((_, c)) = added.c {
        assert_eq!(c.len(), m * n, "C is not {m} x {n}");
    }
    if let Some(bias) = added.bias {
        assert_eq!(bias.len(), n, "the bias is not {n} long");
    }
    let x: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
    let columns: Vec<Vec<(f64, f64)>> = (0..n).into_par_iter().map(|row| column(weight, row, &x, added)).collect();
    let mut expected = Expected { m, n, values: vec![0.0; m * n], energy: vec![0.0; m * n] };
    for (feature, column) in columns.iter().enumerate() {
        for (token, &(value, energy)) in column.iter().enumerate() {
            expected.values[token * n + feature] = value;
            expected.energy[token * n + feature] = energy;
        }
    }
    expected
}

/// Value and energy of one output feature for every token.
fn column(weight: &HostWeight, row: usize, x: &[f64], added: &Added<'_>) -> Vec<(f64, f64)> {
    let w: Vec<f64> = weight.dequantize_row(row).into_iter().map(f64::from).collect();
    let alpha = f64::from(added.alpha);
    let bias = added.bias.map_or(0.0, |b| f64::from(b[row]));
    let one = |(token, x): (usize, &[f64])| {
        let (dot, squares) = dot(&w, x);
        let c = added.c.map_or(0.0, |(beta, c)| f64::from(beta) * f64::from(c[token * weight.n() + row]));
        (alpha * dot + c + bias, alpha * alpha * squares + c * c + bias * bias)
    };
    x.chunks_exact(w.len()).enumerate().map(one).collect()
}

/// `Σ w·x` and `Σ (w·x)²`, in four interleaved sums each so that the compiler can use vectors.
fn dot(w: &[f64], x: &[f64]) -> (f64, f64) {
    const LANES: usize = 4;
    let (mut sums, mut squares) = ([0.0; LANES], [0.0; LANES]);
    let (w_parts, x_parts) = (w.chunks_exact(LANES), x.chunks_exact(LANES));
    let tail = w_parts.remainder().iter().zip(x_parts.remainder()).map(|(a, b)| a * b);
    let (mut sum, mut square) = tail.fold((0.0, 0.0), |(s, q), p| (s + p, q + p * p));
    for (w, x) in w_parts.zip(x_parts) {
        for lane in 0..LANES {
            let product = w[lane] * x[lane];
            sums[lane] += product;
            squares[lane] += product * product;
        }
    }
    sum += sums.iter().sum::<f64>();
    square += squares.iter().sum::<f64>();
    (sum, square)
}

#[cfg(test)]
mod tests {
    use super::*;
    use qgemm_formats::{DType, Format};

    #[test]
    fn known_product() {
        let format: Format = "f32".parse().expect("f32 is a format");
        let bytes = DType::F32.encode(&[1.0, 2.0, 3.0, 4.0, 5.0, -6.0]);
        let weight = HostWeight::new(format, 2, 3, bytes.into()).expect("valid");
        let added = Added { alpha: 2.0, c: Some((0.5, &[10.0, 20.0])), bias: Some(&[1.0, -1.0]) };
        let expected = multiply(&weight, &[1.0, 0.0, -1.0], &added);
        // Row 0: 1·1 − 1·3 = −2; row 1: 4 + 6 = 10.
        assert_eq!(expected.values, [2.0 * -2.0 + 5.0 + 1.0, 2.0 * 10.0 + 10.0 - 1.0]);
        assert_eq!(expected.energy, [4.0 * (1.0 + 9.0) + 25.0 + 1.0, 4.0 * (16.0 + 36.0) + 100.0 + 1.0]);
    }
}
