//! Matrix instructions with floating-point operands and f32 accumulators.

use super::fragment::{accumulators, operand, put_accumulators, quad_pair};
use super::precision::{Precision, Sum};
use super::sum::multiply;
use super::{WarpWords, WordCounts, decode};

/// Words of `m8n8k4`.
pub(crate) const M8N8K4: WordCounts = WordCounts { a: 2, b: 2, d: 8, scales: 0 };
/// Words of `m16n8k8` with 16-bit operands.
pub(crate) const M16N8K8: WordCounts = WordCounts { a: 2, b: 1, d: 4, scales: 0 };
/// Words of `m16n8k16` with 16-bit operands.
pub(crate) const M16N8K16: WordCounts = WordCounts { a: 4, b: 2, d: 4, scales: 0 };
/// Words of `m16n8k32` with 8-bit operands.
pub(crate) const M16N8K32: WordCounts = M16N8K16;

// The formats' least normal exponents.
const LEAST_F16: i32 = -14;
const LEAST_BF16: i32 = -126;
const LEAST_E4M3: i32 = -6;
const LEAST_E5M2: i32 = -14;

/// `mma.m8n8k4.row.col.f32.f16.f16.f32`: four products, one for each quad-pair.
pub(crate) fn m8n8k4_f16(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    for pair in 0..4 {
        let a = each(&quad_pair::operand(inputs, 0, pair), decode::f16);
        let b = transpose(&each(&quad_pair::operand(inputs, M8N8K4.first_b(), pair), decode::f16));
        let mut d = each(&quad_pair::accumulators(inputs, M8N8K4.first_d(), pair), f32::from_bits);
        multiply(&a, &b, &mut d, LEAST_F16, &precision.quad_pair);
        quad_pair::put_accumulators(&each(&d, f32::to_bits), outputs, pair);
    }
}

/// `mma.m16n8k8.row.col.f32.f16.f16.f32`.
pub(crate) fn m16n8k8_f16(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    mma::<8, 16>(inputs, outputs, M16N8K8, decode::f16, LEAST_F16, &precision.half);
}

/// `mma.m16n8k16.row.col.f32.f16.f16.f32`.
pub(crate) fn m16n8k16_f16(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    mma::<16, 16>(inputs, outputs, M16N8K16, decode::f16, LEAST_F16, &precision.half);
}

/// `mma.m16n8k16.row.col.f32.bf16.bf16.f32`.
pub(crate) fn m16n8k16_bf16(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    mma::<16, 16>(inputs, outputs, M16N8K16, decode::bf16, LEAST_BF16, &precision.half);
}

/// `mma.m16n8k32.row.col.f32.e4m3.e4m3.f32`.
pub(crate) fn m16n8k32_e4m3(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    let decode = |code: u16| decode::e4m3(code as u8);
    mma::<32, 8>(inputs, outputs, M16N8K32, decode, LEAST_E4M3, &precision.fp8);
}

/// `mma.m16n8k32.row.col.f32.e5m2.e5m2.f32`.
pub(crate) fn m16n8k32_e5m2(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    let decode = |code: u16| decode::e5m2(code as u8);
    mma::<32, 8>(inputs, outputs, M16N8K32, decode, LEAST_E5M2, &precision.fp8);
}

/// A product of the 16-row shapes, operands of `BITS` bits.
fn mma<const K: usize, const BITS: usize>(
    inputs: &WarpWords,
    outputs: &mut WarpWords,
    words: WordCounts,
    decode: impl Fn(u16) -> f32 + Copy,
    least: i32,
    sum: &Sum,
) {
    let a = each(&operand::<16, K, BITS>(inputs, 0), decode);
    let b = transpose(&each(&operand::<8, K, BITS>(inputs, words.first_b()), decode));
    let mut d = each(&accumulators::<16>(inputs, words.first_d()), f32::from_bits);
    multiply(&a, &b, &mut d, least, sum);
    put_accumulators(&each(&d, f32::to_bits), outputs);
}

/// The function of each element, in a loop that the compiler vectorises (it calls nested `array::map`s).
fn each<T: Copy, U: Copy + Default, const R: usize, const C: usize>(
    matrix: &[[T; C]; R],
    function: impl Fn(T) -> U,
) -> [[U; C]; R] {
    let mut result = [[U::default(); C]; R];
    for (result, &value) in result.as_flattened_mut().iter_mut().zip(matrix.as_flattened()) {
        *result = function(value);
    }
    result
}

fn transpose<const N: usize, const K: usize>(columns: &[[f32; K]; N]) -> [[f32; N]; K] {
    let mut rows = [[0.0; N]; K];
    for (n, column) in columns.iter().enumerate() {
        for (row, &value) in rows.iter_mut().zip(column) {
            row[n] = value;
        }
    }
    rows
}
