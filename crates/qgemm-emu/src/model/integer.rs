//! Matrix instructions with 8-bit operands and wrapping i32 accumulators.

use super::fragment::{accumulators, operand, put_accumulators};
use super::precision::Precision;
use super::words::{WarpWords, WordCounts};

/// Words of `m8n8k16`.
pub(crate) const M8N8K16: WordCounts = WordCounts { a: 1, b: 1, d: 2, scales: 0 };
/// Words of `m16n8k16`.
pub(crate) const M16N8K16: WordCounts = WordCounts { a: 2, b: 1, d: 4, scales: 0 };
/// Words of `m16n8k32`.
pub(crate) const M16N8K32: WordCounts = WordCounts { a: 4, b: 2, d: 4, scales: 0 };

/// `mma.m8n8k16.row.col.s32.s8.s8.s32`.
pub(crate) fn m8n8k16(inputs: &WarpWords, outputs: &mut WarpWords, _: &Precision) {
    mma::<8, 16>(inputs, outputs, M8N8K16, signed);
}

/// `mma.m16n8k16.row.col.s32.s8.s8.s32`.
pub(crate) fn m16n8k16(inputs: &WarpWords, outputs: &mut WarpWords, _: &Precision) {
    mma::<16, 16>(inputs, outputs, M16N8K16, signed);
}

/// `mma.m16n8k32.row.col.s32.s8.s8.s32`.
pub(crate) fn m16n8k32(inputs: &WarpWords, outputs: &mut WarpWords, _: &Precision) {
    mma::<16, 32>(inputs, outputs, M16N8K32, signed);
}

/// A warp's eight columns of `wgmma` with `.s32.s8.u8`.
pub(crate) fn m16n8k32_u8(inputs: &WarpWords, outputs: &mut WarpWords) {
    mma::<16, 32>(inputs, outputs, M16N8K32, i32::from);
}

fn signed(byte: u16) -> i32 {
    i32::from(byte as u8 as i8)
}

/// `of_b` decodes a byte of B. Bytes of A are signed.
fn mma<const M: usize, const K: usize>(
    inputs: &WarpWords,
    outputs: &mut WarpWords,
    words: WordCounts,
    of_b: fn(u16) -> i32,
) {
    let a = operand::<M, K, 8>(inputs, 0).map(|row| row.map(signed));
    let b = operand::<8, K, 8>(inputs, words.first_b()).map(|column| column.map(of_b));
    let mut d = accumulators::<M>(inputs, words.first_d());
    for (a, d) in a.iter().zip(&mut d) {
        for (b, d) in b.iter().zip(d) {
            let product: i32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
            *d = d.wrapping_add(product as u32);
        }
    }
    put_accumulators(&d, outputs);
}
