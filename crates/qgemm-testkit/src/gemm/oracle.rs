//! Oracle: the product in f64, of dequantized weights and the
//! activations that the kernel uses.

use qgemm_formats::{Encoding, Format, HostWeight};
use qgemm_hal::Activation;
use rayon::prelude::*;

use super::activation::{activate, flushes, of_up, steepest};
use crate::expected::Expected;

/// f32's smallest normal number. Smaller numbers may lose bits or
/// become 0.
const LEAST: f64 = f32::MIN_POSITIVE as f64;

/// Least number of code steps that errors are relative to.
/// It is this many for each instruction of
/// [`INSTRUCTION_PRODUCTS`] in a sub-block, at most
/// [`MOST_OF_CODES`] of all codes, or [`FEWEST_STEPS`] if more.
/// f16 bits of codes are 1024 above their value. MMA truncates
/// each product to 23 or 24 bits below the largest so far, always
/// towards 0. This affects sums of codes and the sums that
/// offsets are subtracted with.
/// If one activation dominates, up to 4·10⁻³ of a step is lost
/// per instruction.
const INSTRUCTION_STEPS: f64 = 4.0;
const INSTRUCTION_PRODUCTS: usize = 16;
const MOST_OF_CODES: f64 = 1.0 / 16.0;
const FEWEST_STEPS: f64 = 2.0;

/// Precision of a kernel's product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Resolution {
    /// Relative error of its sums, by energy. An activation bends so
    /// much of its argument.
    pub nmse: f64,
    /// The largest number that a product of scales is multiplied by.
    /// It amplifies what the product lost below f32's normal range.
    pub largest_code: f64,
}

impl Default for Resolution {
    /// Exact sums of plain numbers.
    fn default() -> Self {
        Self { nmse: 0.0, largest_code: 1.0 }
    }
}

/// Epilogue of the product `X·Wᵀ`.
#[derive(Clone, Copy, Debug)]
pub struct Added<'a> {
    /// Factor of the product (alpha).
    pub alpha: f32,
    /// Factor (beta) and C, `[M, N]`, contiguous.
    pub c: Option<(f32, &'a [f32])>,
    /// N values; for a gated pair 2 N, the gate's first.
    pub bias: Option<&'a [f32]>,
    /// M factors.
    pub token_scale: Option<&'a [f32]>,
    /// Activation before the residual; in a gated pair, of the gate.
    pub activation: Activation,
    /// The residual, `[M, N]`, contiguous.
    pub residual: Option<&'a [f32]>,
    /// Precision of the product.
    pub resolution: Resolution,
}

impl Default for Added<'_> {
    fn default() -> Self {
        let (activation, resolution) = (Activation::Identity, Resolution::default());
        Self { alpha: 1.0, c: None, bias: None, token_scale: None, activation, residual: None, resolution }
    }
}

/// `activation(alpha · token_scale · X·Wᵀ + beta · C + bias) +
/// residual`.
/// `x[M, K]` is contiguous, and already rounded as the kernel
/// rounds it.
///
/// # Panics
/// When an operand's length does not fit the shape: the test
/// would prove nothing.
pub fn multiply<X: Copy + Into<f64>>(weight: &HostWeight, x: &[X], added: &Added<'_>) -> Expected {
    let n = weight.n();
    let product = Product::new(n, weight.k(), n, x, added);
    product.outputs(|row| product.linear(weight, row, row).into_iter().map(|v| v.activated(added)).collect())
}

/// `activation(gate) · up + residual` (a clamped SwiGLU clamps
/// the up, too), with both as in
/// [`multiply`] before the activation.
///
/// # Panics
/// As [`multiply`], and when C is given.
pub fn multiply_gated<X: Copy + Into<f64>>([gate, up]: [&HostWeight; 2], x: &[X], added: &Added<'_>) -> Expected {
    assert!(added.c.is_none(), "a gated pair takes no C");
    let n = gate.n();
    let product = Product::new(n, gate.k(), 2 * n, x, added);
    product.outputs(|row| {
        let (gate, up) = (product.linear(gate, row, row), product.linear(up, row, n + row));
        let one = |(gate, up): (Value, Value)| gate.activated(added).times(up.of_up(added), added.resolution.nmse);
        gate.into_iter().zip(up).map(one).collect()
    })
}

/// A value with its energy and floor.
#[derive(Clone, Copy)]
struct Value {
    value: f64,
    energy: f64,
    floor: f64,
}

impl Value {
    fn activated(self, added: &Added<'_>) -> Self {
        let activation = added.activation;
        let (value, slope) = activate(activation, self.value);
        let reach = (added.resolution.nmse * self.energy).sqrt();
        let slope = slope.abs().max(steepest(activation, self.value, reach));
        Self { value, energy: slope * slope * self.energy, floor: slope * self.floor + flushes(activation) }
    }

    /// Factor of a gate, from its up.
    fn of_up(self, added: &Added<'_>) -> Self {
        let (value, added) = of_up(added.activation, self.value);
        Self { value, energy: self.energy + added, ..self }
    }

    /// Product of two values whose sums have relative errors `nmse`.
    fn times(self, up: Self, nmse: f64) -> Self {
        // Product of both errors, which matters if both values are near
        // 0.
        let both = nmse * self.energy * up.energy;
        let energy = self.energy * up.value.powi(2) + up.energy * self.value.powi(2) + both;
        let up_reach = up.value.abs() + up.floor + (nmse * up.energy).sqrt();
        let floor = self.floor * up_reach + self.value.abs() * up.floor + LEAST;
        Self { value: self.value * up.value, energy, floor }
    }
}

/// The operands of a product.
struct Product<'a> {
    m: usize,
    n: usize,
    /// `[M, K]`.
    x: Vec<f64>,
    /// Squares of `x`, for energies.
    x_squares: Vec<f64>,
    added: &'a Added<'a>,
}

impl<'a> Product<'a> {
    /// A product of `x` with `n` × `k` weights, and a bias of
    /// `bias_len` values.
    fn new<X: Copy + Into<f64>>(n: usize, k: usize, bias_len: usize, x: &[X], added: &'a Added<'a>) -> Self {
        assert_eq!(x.len() % k, 0, "X is not a whole number of rows of {k}");
        let m = x.len() / k;
        let lengths = [
            ("C", added.c.map(|(_, c)| c), m * n),
            ("the bias", added.bias, bias_len),
            ("the token scales", added.token_scale, m),
            ("the residual", added.residual, m * n),
        ];
        for (what, operand, len) in lengths {
            assert!(operand.is_none_or(|operand| operand.len() == len), "{what} is not {len} long");
        }
        let x: Vec<f64> = x.iter().map(|&v| v.into()).collect();
        Self { m, n, x_squares: x.iter().map(|x| x * x).collect(), x, added }
    }

    /// Outputs of one weight row for every token, before the
    /// activation.
    fn linear(&self, weight: &HostWeight, row: usize, bias_index: usize) -> Vec<Value> {
        let w: Vec<f64> = weight.dequantize_row(row).into_iter().map(f64::from).collect();
        let Added { alpha, c, bias, token_scale, resolution, .. } = *self.added;
        let bias = bias.map_or(0.0, |bias| f64::from(bias[bias_index]));
        let least = least_product(weight, row, &w) * resolution.largest_code;
        let steps = code_steps(weight, row, &w);
        let w_squares: Vec<f64> = w.iter().zip(steps).map(|(w, step)| w.abs().max(step).powi(2)).collect();
        let rows = self.x.chunks_exact(w.len()).zip(self.x_squares.chunks_exact(w.len()));
        let one = |(token, (x, x_squares)): (usize, (&[f64], &[f64]))| {
            let (sum, squares) = (dot(&w, x), dot(&w_squares, x_squares));
            let factor = f64::from(alpha) * token_scale.map_or(1.0, |scales| f64::from(scales[token]));
            let c = c.map_or(0.0, |(beta, c)| f64::from(beta) * f64::from(c[token * self.n + row]));
            // Floors of the accumulator, the sum and the addends.
            let floor = factor.abs() * least + 3.0 * LEAST;
            Value { value: factor * sum + c + bias, energy: factor * factor * squares + c * c + bias * bias, floor }
        };
        rows.enumerate().map(one).collect()
    }

    /// All outputs, given those of a feature, plus the residual.
    fn outputs(&self, feature: impl Fn(usize) -> Vec<Value> + Send + Sync) -> Expected {
        let (m, n) = (self.m, self.n);
        let columns: Vec<Vec<Value>> = (0..n).into_par_iter().map(feature).collect();
        let zeros = vec![0.0; m * n];
        let mut expected = Expected { m, n, values: zeros.clone(), energy: zeros.clone(), floor: zeros };
        for (feature, column) in columns.iter().enumerate() {
            for (token, value) in column.iter().enumerate() {
                let at = token * n + feature;
                let residual = self.added.residual.map_or(0.0, |residual| f64::from(residual[at]));
                expected.values[at] = value.value + residual;
                expected.energy[at] = value.energy + residual * residual;
                // D may lose what is below the normal range, too.
                expected.floor[at] = value.floor + LEAST;
            }
        }
        expected
    }
}

/// Total floor of the products with a row `w` of `weight`.
/// Subnormal activations may become 0, before or after the
/// product with codes. Scales multiply this loss.
fn least_product(weight: &HostWeight, row: usize, w: &[f64]) -> f64 {
    let largest = w.iter().fold(0.0, |largest: f64, w| largest.max(w.abs()));
    let row_scale = weight.row_scale().map_or(1.0, |scales| f64::from(scales[row]).abs());
    LEAST * w.len() as f64 * (largest + row_scale)
}

/// Value of the least code steps (see above) for each column; 0
/// for codes that are not integers.
/// Kernels multiply codes and subtract offsets from sums, so
/// rounding shows even where a weight is 0.
fn code_steps(weight: &HostWeight, row: usize, w: &[f64]) -> Vec<f64> {
    let format = weight.format();
    if !format.encoding.is_integer() {
        return vec![0.0; w.len()];
    }
    let stored_k = weight.k_order().map_or(w.len(), <[u32]>::len);
    let row_scale = weight.row_scale().map_or(1.0, |scales| f64::from(scales[row]).abs());
    let blocks = weight.blocks()[format.row_offset(row, stored_k)..].chunks_exact(format.block_bytes);
    let mut values = vec![0.0; format.block_len];
    let mut steps = Vec::with_capacity(stored_k);
    let most = (MOST_OF_CODES * f64::from(1u32 << format.code_bits().min(16))).max(FEWEST_STEPS);
    for block in blocks.take(format.blocks_per_row(stored_k)) {
        (format.dequantize_block)(block, &mut values);
        for sub_block in values.chunks_mut(format.sub_block.max(1)) {
            let instructions = sub_block.len().div_ceil(INSTRUCTION_PRODUCTS);
            let step =
                (INSTRUCTION_STEPS * instructions as f64).min(most) * row_scale * step_of(format, block, sub_block);
            steps.extend(std::iter::repeat_n(step, sub_block.len()));
        }
    }
    let Some(order) = weight.k_order() else {
        steps.truncate(w.len());
        return steps;
    };
    let mut of_columns = vec![0.0; w.len()];
    for (&column, step) in order.iter().zip(steps) {
        // A stored column without a feature has no column.
        if let Some(of_column) = of_columns.get_mut(column as usize) {
            *of_column = step;
        }
    }
    of_columns
}

/// Code step of a sub-block, which is sorted. Zero-point groups store it;
/// otherwise it is the smallest difference of two values.
fn step_of(format: Format, block: &[u8], sub_block: &mut [f32]) -> f64 {
    match (format.encoding, format.float_scales) {
        (Encoding::IntZero, [scale]) => f64::from(scale.read(block)).abs(),
        _ => {
            sub_block.sort_unstable_by(f32::total_cmp);
            let differences = sub_block.windows(2).map(|pair| f64::from(pair[1]) - f64::from(pair[0]));
            let smallest = differences.filter(|&difference| difference > 0.0).fold(f64::INFINITY, f64::min);
            if smallest.is_finite() { smallest } else { 0.0 }
        }
    }
}

/// `Σ a·b`, in interleaved sums for vectorization.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    const LANES: usize = 8;
    let (a_parts, a_rest) = a.as_chunks::<LANES>();
    let (b_parts, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (a, b) in a_parts.iter().zip(b_parts) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use qgemm_formats::DType;

    #[test]
    fn known_product() {
        let format: Format = "f32".parse().expect("f32 is a format");
        let bytes = DType::F32.encode(&[1.0, 2.0, 3.0, 4.0, 5.0, -6.0]);
        let weight = HostWeight::new(format, 2, 3, bytes.into()).expect("valid");
        let added = Added { alpha: 2.0, c: Some((0.5, &[10.0, 20.0])), bias: Some(&[1.0, -1.0]), ..Added::default() };
        let expected = multiply(&weight, &[1.0, 0.0, -1.0], &added);
        // Row 0: 1·1 − 1·3 = −2; row 1: 4 + 6 = 10.
        assert_eq!(expected.values, [2.0 * -2.0 + 5.0 + 1.0, 2.0 * 10.0 + 10.0 - 1.0]);
        assert_eq!(expected.energy, [4.0 * (1.0 + 9.0) + 25.0 + 1.0, 4.0 * (16.0 + 36.0) + 100.0 + 1.0]);
    }

    #[test]
    fn known_gated_pair() {
        let format: Format = "f32".parse().expect("f32 is a format");
        let weight = |values: &[f32]| HostWeight::new(format, 1, 2, DType::F32.encode(values).into()).expect("valid");
        let added = Added {
            bias: Some(&[-1.0, 0.5]),
            token_scale: Some(&[2.0, 1.0]),
            activation: Activation::Relu,
            residual: Some(&[100.0, 10.0]),
            ..Added::default()
        };
        let (gate, up) = (weight(&[1.0, 2.0]), weight(&[-3.0, 1.0]));
        let expected = multiply_gated([&gate, &up], &[1.0, 1.0, -1.0, 0.0], &added);
        // Token 0: gate 2·3 − 1 = 5, up 2·(−2) + 0.5 = −3.5; token 1:
        // gate −1 − 1 < 0.
        assert_eq!(expected.values, [5.0 * -3.5 + 100.0, 10.0]);
        let (gate, up) = (4.0 * 5.0 + 1.0, 4.0 * 10.0 + 0.25);
        assert_eq!(expected.energy[0], gate * 3.5 * 3.5 + up * 25.0 + 1e4);
    }
}
