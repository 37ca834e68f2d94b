//! Matrix instructions with block-scaled E2M1 or E4M3 operands and f32 accumulators.
//!
//! Read from the PTX ISA ("Matrix Fragments for mma.m16n8k64", "Block Scaling for mma.sync") and never checked on
//! hardware: only consumer Blackwell has them. Of A, with thread-id i, lane 4g + 2i holds the scales of row g and lane 4g + 2i + 1 those
//! of row g + 8; of B, lane 4g + i those of column g. The byte-id is the byte of that lane's word that scales the first block of K, of 32
//! elements in two blocks (mxf4) or of 16 in four (nvf4). All other lanes' scale words mean nothing. `m16n8k32` has one block, whose sum is
//! taken to be exact and rounded once, with the accumulator.

use super::decode::{self, Scale};
use super::fragment::{accumulators, operand, put_accumulators};
use super::precision::{Precision, Rounding, ScaledSum};
use super::sum::{LEAST_F32, NAN, power_of_two, round, split};
use super::{WarpWords, WordCounts};

/// Words of `m16n8k64`: the last says where scales are, as bytes the byte-id and thread-id of A's, then of B's.
pub(crate) const M16N8K64: WordCounts = WordCounts { a: 4, b: 2, d: 4, scales: 3 };

/// Words of `m16n8k32`.
pub(crate) const M16N8K32: WordCounts = M16N8K64;

/// Elements whose products a chip adds exactly before it applies scales.
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

/// `mma.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e2m1.f32.ue8m0`: E2M1 in bits 2 to 5 of a byte.
pub(crate) fn m16n8k32_mxf8_e2m1(inputs: &WarpWords, outputs: &mut WarpWords, _: &Precision) {
    mma_of_bytes(inputs, outputs, |code| f64::from(decode::e2m1_doubled(code >> 2)) * 0.5);
}

/// The word that holds the scales of a row of A (`operand` 0) or a column of B (1), the first in its lowest byte.
fn scale_word(inputs: &WarpWords, operand: usize, index: usize) -> u32 {
    let first = M16N8K64.first_scale();
    let places = inputs[0][first + 2].to_le_bytes().map(usize::from);
    let [byte, thread] = [places[2 * operand], places[2 * operand + 1]];
    let lane = if operand == 0 { 4 * (index % 8) + 2 * thread + index / 8 } else { 4 * index + thread };
    inputs[lane][first + operand] >> (8 * byte)
}

/// D += A · B with one scale for all of K, A's numbers E4M3, B's by `number`.
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

/// Most fraction bits that five terms of less than 2^12 times their unit, and their sum, are exact in f64 with.
const MOST_FRACTION_BITS: u32 = 38;

/// Sixteen products' sum and what scales it.
#[derive(Clone, Copy)]
struct Term {
    sum: f64,
    a: Scale,
    b: Scale,
}

/// D += A · B where `block` elements of K share a scale.
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
    // Nothing is aligned to less than the accumulator's least exponent.
    let top = terms.iter().filter(|t| scaled(t)).map(|t| t.a.exponent + t.b.exponent);
    let top = top.fold(accumulator.exponent.max(LEAST_F32), i32::max);
    // Exact: a sum of 12 bits times two significands of four.
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
