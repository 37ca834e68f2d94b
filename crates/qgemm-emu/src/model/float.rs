//! Matrix instructions with floating-point operands and f32 accumulators.

use super::decode;
use super::fragment::{accumulators, operand, put_accumulators, quad_pair};
use super::precision::{Precision, Sum};
use super::sum::multiply;
use super::words::{WarpWords, WordCounts};

/// Words of `m8n8k4`.
pub(crate) const M8N8K4: WordCounts = WordCounts { a: 2, b: 2, d: 8, scales: 0 };
/// Words of `m16n8k8` with 16-bit operands.
pub(crate) const M16N8K8: WordCounts = WordCounts { a: 2, b: 1, d: 4, scales: 0 };
/// Words of `m16n8k8` with TF32 operands.
pub(crate) const M16N8K8_TF32: WordCounts = WordCounts { a: 4, b: 2, d: 4, scales: 0 };
/// Words of `m16n8k16` with 16-bit operands.
pub(crate) const M16N8K16: WordCounts = WordCounts { a: 4, b: 2, d: 4, scales: 0 };
/// Words of `m16n8k32` with 8-bit operands.
pub(crate) const M16N8K32: WordCounts = M16N8K16;

const LEAST_F16: i32 = -14;
const LEAST_BF16: i32 = -126;

/// An operand type: its decoder and its minimum normal exponent.
type Number = (fn(u16) -> f32, i32);

const F16: Number = (decode::f16, LEAST_F16);
const BF16: Number = (decode::bf16, LEAST_BF16);
const E4M3: Number = (|code| decode::e4m3(code as u8), -6);
const E5M2: Number = (|code| decode::e5m2(code as u8), -14);

/// `mma.m8n8k4.row.col.f32.f16.f16.f32`: four
/// products, one for each quad-pair.
pub(crate) fn m8n8k4_f16(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    quad_pairs::<false, false>(inputs, outputs, precision);
}

/// `mma.m8n8k4.row.row.f32.f16.f16.f32`.
pub(crate) fn m8n8k4_row_row_f16(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    quad_pairs::<false, true>(inputs, outputs, precision);
}

/// `mma.m8n8k4.col.col.f32.f16.f16.f32`.
pub(crate) fn m8n8k4_col_col_f16(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    quad_pairs::<true, false>(inputs, outputs, precision);
}

/// `mma.m8n8k4.col.row.f32.f16.f16.f32`.
pub(crate) fn m8n8k4_col_row_f16(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    quad_pairs::<true, true>(inputs, outputs, precision);
}

/// Products of `m8n8k4`. Operands are stored
/// along K (a lane has a row of A or a
/// column of B) or across K.
fn quad_pairs<const A_ACROSS: bool, const B_ACROSS: bool>(
    inputs: &WarpWords,
    outputs: &mut WarpWords,
    precision: &Precision,
) {
    let first_b = M8N8K4.first_b();
    for pair in 0..4 {
        let a = match A_ACROSS {
            true => transpose(&each(&quad_pair::operand_across(inputs, 0, pair), decode::f16)),
            false => each(&quad_pair::operand(inputs, 0, pair), decode::f16),
        };
        let b = match B_ACROSS {
            true => each(&quad_pair::operand_across(inputs, first_b, pair), decode::f16),
            false => transpose(&each(&quad_pair::operand(inputs, first_b, pair), decode::f16)),
        };
        let mut d = each(&quad_pair::accumulators(inputs, M8N8K4.first_d(), pair), f32::from_bits);
        multiply(&a, &b, &mut d, [LEAST_F16; 2], &precision.quad_pair);
        quad_pair::put_accumulators(&each(&d, f32::to_bits), outputs, pair);
    }
}

/// `mma.m16n8k8.row.col.f32.f16.f16.f32`.
pub(crate) fn m16n8k8_f16(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    mma::<8, 16>(inputs, outputs, M16N8K8, [F16; 2], &precision.half);
}

/// `mma.m16n8k16.row.col.f32.f16.f16.f32`.
pub(crate) fn m16n8k16_f16(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    mma::<16, 16>(inputs, outputs, M16N8K16, [F16; 2], &precision.half);
}

/// `mma.m16n8k16.row.col.f32.bf16.bf16.f32`.
pub(crate) fn m16n8k16_bf16(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    mma::<16, 16>(inputs, outputs, M16N8K16, [BF16; 2], &precision.half);
}

/// `mma.m16n8k8.row.col.f32.tf32.tf32.f32`: one operand per word;
/// the lowest 13 bits are ignored.
pub(crate) fn m16n8k8_tf32(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    let number = |lane: usize, word: usize| f32::from_bits(inputs[lane][word] & !0x1fff);
    let (mut a, mut b) = ([[0.0; 8]; 16], [[0.0; 8]; 8]);
    for k in 0..8 {
        for (row, a) in a.iter_mut().enumerate() {
            a[k] = number(row % 8 * 4 + k % 4, row / 8 + k / 4 * 2);
        }
        for (n, b) in b[k].iter_mut().enumerate() {
            *b = number(n * 4 + k % 4, M16N8K8_TF32.first_b() + k / 4);
        }
    }
    let mut d = each(&accumulators::<16>(inputs, M16N8K8_TF32.first_d()), f32::from_bits);
    multiply(&a, &b, &mut d, [LEAST_BF16; 2], &precision.half);
    put_accumulators(&each(&d, f32::to_bits), outputs);
}

/// `mma.m16n8k32.row.col.f32.e4m3.e4m3.f32`.
pub(crate) fn m16n8k32_e4m3(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    mma::<32, 8>(inputs, outputs, M16N8K32, [E4M3; 2], &precision.fp8);
}

/// `mma.m16n8k32.row.col.f32.e5m2.e5m2.f32`.
pub(crate) fn m16n8k32_e5m2(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    mma::<32, 8>(inputs, outputs, M16N8K32, [E5M2; 2], &precision.fp8);
}

/// `mma.m16n8k32.row.col.f32.e4m3.e5m2.f32`.
pub(crate) fn m16n8k32_e4m3_e5m2(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    mma::<32, 8>(inputs, outputs, M16N8K32, [E4M3, E5M2], &precision.fp8);
}

/// Operand types of `wgmma`, with the numbers of the emulated atoms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WgmmaOperands {
    F16,
    Bf16,
    E4M3,
    E4M3AndE5M2,
    /// Signed and unsigned bytes, 32-bit sums.
    S8AndU8,
    /// TF32 words; the lowest 13 bits are ignored.
    Tf32,
    /// Signed bytes, 32-bit sums.
    S8,
}

impl WgmmaOperands {
    pub(crate) fn of(number: u32) -> Option<Self> {
        use WgmmaOperands as W;
        [W::F16, W::Bf16, W::E4M3, W::E4M3AndE5M2, W::S8AndU8, W::Tf32, W::S8].get(number as usize).copied()
    }

    /// A warp's 16 rows times eight columns, words as in
    /// the `mma` of that shape.
    pub(crate) fn multiply(self, inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
        match self {
            Self::F16 => m16n8k16_f16(inputs, outputs, precision),
            Self::Bf16 => m16n8k16_bf16(inputs, outputs, precision),
            Self::E4M3 => mma::<32, 8>(inputs, outputs, M16N8K32, [E4M3; 2], &precision.fp8_wgmma),
            Self::E4M3AndE5M2 => mma::<32, 8>(inputs, outputs, M16N8K32, [E4M3, E5M2], &precision.fp8_wgmma),
            Self::S8AndU8 => super::integer::m16n8k32_u8(inputs, outputs),
            Self::S8 => super::integer::m16n8k32(inputs, outputs, precision),
            Self::Tf32 => m16n8k8_tf32(inputs, outputs, precision),
        }
    }
}

/// Product of the 16-row shapes with operands of `BITS` bits.
fn mma<const K: usize, const BITS: usize>(
    inputs: &WarpWords,
    outputs: &mut WarpWords,
    words: WordCounts,
    [(a_number, a_least), (b_number, b_least)]: [Number; 2],
    sum: &Sum,
) {
    let a = each(&operand::<16, K, BITS>(inputs, 0), a_number);
    let b = transpose(&each(&operand::<8, K, BITS>(inputs, words.first_b()), b_number));
    let mut d = each(&accumulators::<16>(inputs, words.first_d()), f32::from_bits);
    multiply(&a, &b, &mut d, [a_least, b_least], sum);
    put_accumulators(&each(&d, f32::to_bits), outputs);
}

/// Applies a function to each element, in a loop that the
/// compiler vectorises (unlike nested `array::map`).
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
