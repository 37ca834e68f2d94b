//! Block-scaled matrix instructions with E2M1 or E4M3
//! operands and f32 accumulators.
//!
//! Derived from the PTX ISA ("Matrix Fragments for mma.m16n8k64",
//! "Block Scaling for mma.sync") and never checked on hardware:
//! only consumer Blackwell has them.
//!
//! - A: with thread-id i, lane 4g + 2i holds
//!   the scales of row g, and lane 4g + 2i +
//!   1 those of row g + 8.
//! - B: lane 4g + i holds the scales of column g.
//! - The byte-id is the byte of that lane's word with the
//!   scale of the first block of K. K has two blocks
//!   of 32 elements (mxf4) or four of 16 (nvf4).
//! - Scale words of other lanes are ignored.
//! - `m16n8k32` has one block. Its sum is assumed exact and is
//!   rounded once, with the accumulator.

use super::decode::{self, Scale};
use super::fragment::{accumulators, operand, put_accumulators};
use super::precision::{Precision, Rounding, ScaledSum};
use super::sum::{LEAST_F32, NAN, power_of_two, round, split};
use super::words::{WarpWords, WordCounts};

/// Words of `m16n8k64`. The last word locates the scales: byte-id and
/// thread-id of A, then of B, one byte each.
pub(crate) const M16N8K64: WordCounts = WordCounts { a: 4, b: 2, d: 4, scales: 3 };

/// Words of `m16n8k32`.
pub(crate) const M16N8K32: WordCounts = M16N8K64;

/// Elements whose products are added exactly before scales are applied.
const EXACT_K: usize = 16;

/// `mma.m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0`.
pub(crate) fn m16n8k64_mxf4(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    mma(inputs, outputs, 32, decode::ue8m0, &precision.block_scaled);
}

/// `mma.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3`.
pub(crate) fn m16n8k64_nvf4(inputs: &WarpWords, outputs: &mut WarpWords, precision: &Precision) {
    mma(inputs, outputs, 16, decode::ue4m3, &precision.block_scaled);
}

/// `mma.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0`.
pub(crate) fn m16n8k32_mxf8(inputs: &WarpWords, outputs: &mut WarpWords, _: &Precision) {
    mma_of_bytes(inputs, outputs, |code| f64::from(decode::e4m3(code)));
}

/// `mma.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e2m1.f32.ue8m0`;
/// E2M1 is in bits 2 to 5 of a byte.
pub(crate) fn m16n8k32_mxf8_e2m1(inputs: &WarpWords, outputs: &mut WarpWords, _: &Precision) {
    mma_of_bytes(inputs, outputs, |code| f64::from(decode::e2m1_doubled(code >> 2)) * 0.5);
}

/// The word with the scales of a row of A
/// (`operand` 0) or a column of B (1), first
/// scale in the lowest byte.
fn scale_word(inputs: &WarpWords, operand: usize, index: usize) -> u32 {
    let first = M16N8K64.first_scale();
    let places = inputs[0][first + 2].to_le_bytes().map(usize::from);
    let [byte, thread] = [places[2 * operand], places[2 * operand + 1]];
    let lane = if operand == 0 { 4 * (index % 8) + 2 * thread + index / 8 } else { 4 * index + thread };
    inputs[lane][first + operand] >> (8 * byte)
}

/// D += A · B with one scale for all of
/// K. A is E4M3, and `number` decodes B.
fn mma_of_bytes(inputs: &WarpWords, outputs: &mut WarpWords, number: fn(u8) -> f64) {
    let a = operand::<16, 32, 8>(inputs, 0).map(|row| row.map(|code| f64::from(decode::e4m3(code as u8))));
    let b = operand::<8, 32, 8>(inputs, M16N8K32.first_b()).map(|column| column.map(|code| number(code as u8)));
    let scale = |operand: usize, index: usize| decode::ue8m0(scale_word(inputs, operand, index) as u8).value;
    let mut d = accumulators::<16>(inputs, M16N8K32.first_d());
    for (row, d) in d.iter_mut().enumerate() {
        let a_scale = scale(0, row);
        for (column, d) in d.iter_mut().enumerate() {
            let sum: f64 = a[row].iter().zip(&b[column]).map(|(a, b)| a * b).sum();
            let result = (f64::from(f32::from_bits(*d)) + sum * a_scale * scale(1, column)) as f32;
            *d = if result.is_nan() { NAN } else { result.to_bits() };
        }
    }
    put_accumulators(&d, outputs);
}

/// Maximum fraction bits for which five terms below 2^12 units,
/// and their sum, are exact in f64.
const MOST_FRACTION_BITS: u32 = 38;

/// Sum of sixteen products, and its scales.
#[derive(Clone, Copy)]
struct Term {
    sum: f64,
    a: Scale,
    b: Scale,
}

/// D += A · B with one scale for every
/// `block` elements of K.
fn mma(inputs: &WarpWords, outputs: &mut WarpWords, block: usize, decode: fn(u8) -> Scale, sum: &ScaledSum) {
    let doubled = |code: u16| decode::e2m1_doubled(code as u8);
    let a = operand::<16, 64, 4>(inputs, 0).map(|row| row.map(doubled));
    let b = operand::<8, 64, 4>(inputs, M16N8K64.first_b()).map(|column| column.map(doubled));
    let scales = |operand: usize, index: usize| -> [Scale; 4] {
        let bytes = scale_word(inputs, operand, index).to_le_bytes();
        std::array::from_fn(|i| decode(bytes[i * EXACT_K / block]))
    };
    let a_scales: [[Scale; 4]; 16] = std::array::from_fn(|row| scales(0, row));
    let b_scales: [[Scale; 4]; 8] = std::array::from_fn(|column| scales(1, column));
    let mut d = accumulators::<16>(inputs, M16N8K64.first_d());
    for (row, d) in d.iter_mut().enumerate() {
        for (column, d) in d.iter_mut().enumerate() {
            let terms: [Term; 4] = std::array::from_fn(|i| {
                let (a_part, b_part) = (&a[row][i * EXACT_K..][..EXACT_K], &b[column][i * EXACT_K..][..EXACT_K]);
                let fourfold: i32 = a_part.iter().zip(b_part).map(|(&a, &b)| i32::from(a) * i32::from(b)).sum();
                Term { sum: f64::from(fourfold) / 4.0, a: a_scales[row][i], b: b_scales[column][i] }
            });
            let result = add(&terms, f32::from_bits(*d), sum);
            *d = if result.is_nan() { NAN } else { result.to_bits() };
        }
    }
    put_accumulators(&d, outputs);
}

fn add(terms: &[Term; 4], accumulator: f32, sum: &ScaledSum) -> f32 {
    let wide = terms.iter().fold(f64::from(accumulator), |sum, t| sum + t.sum * t.a.value * t.b.value);
    match *sum {
        ScaledSum::Aligned { fraction_bits } if wide.is_finite() => {
            aligned(terms, accumulator, fraction_bits.min(MOST_FRACTION_BITS) as i32)
        }
        _ => wide as f32,
    }
}

fn aligned(terms: &[Term; 4], accumulator: f32, fraction_bits: i32) -> f32 {
    let scaled = |t: &Term| t.a.value != 0.0 && t.b.value != 0.0;
    let accumulator = split(accumulator, LEAST_F32);
    // Terms are never aligned below the accumulator's minimum exponent.
    let top = terms.iter().filter(|t| scaled(t)).map(|t| t.a.exponent + t.b.exponent);
    let top = top.fold(accumulator.exponent.max(LEAST_F32), i32::max);
    // Exact: a 12-bit sum times two 4-bit significands.
    let to_units = power_of_two(fraction_bits - top);
    let products = terms.iter().map(|t| (t.sum * t.a.value * t.b.value * to_units).trunc());
    let first =
        f64::from(accumulator.significand) * power_of_two((fraction_bits + accumulator.exponent - top).max(-1000));
    round(
        products.fold(first.trunc(), |sum, product| sum + product),
        top - fraction_bits,
        Rounding::TowardZero { fraction_bits: 23 },
    )
}
