//! IQ3_XXS and IQ3_S: 4 values an index, with a
//! bit of sign each.
//!
//! ```text
//! IQ3_XXS = d
//!         | 64 × index of 8 bits
//!         | 8 × u32: four times 7 bits of signs, scale
//! IQ3_S   = d
//!         | 64 × low 8 bits of an index
//!         | 64 upper bits
//!         | 32 × signs
//!         | scales
//! ```

use super::codes::{eighth_sign, set_nibble, write_codes};
use super::grids::{IQ3_S, IQ3_XXS};
use crate::model::raw::word;

/// Bits of a code.
const BITS: usize = 4;

pub(super) fn iq3_xxs(block: &[u8], out: &mut [u8]) {
    let (indices, words) = block[2..].split_at(64);
    let (mut codes, mut scales) = ([0; 256], [0; 4]);
    for (i, codes) in codes.chunks_exact_mut(8).enumerate() {
        let signs = word(words, i / 4);
        let entry = |half: usize| IQ3_XXS[usize::from(indices[2 * i + half])];
        put_quads(codes, [entry(0), entry(1)], eighth_sign(signs >> (i % 4 * 7)));
        if i % 4 == 0 {
            set_nibble(&mut scales, i / 4, (signs >> 28) as u8);
        }
    }
    write_codes(BITS, &codes, &scales, &block[..2], out);
}

pub(super) fn iq3_s(block: &[u8], out: &mut [u8]) {
    let (low, upper, signs) = (&block[2..66], &block[66..74], &block[74..106]);
    let mut codes = [0; 256];
    for (i, codes) in codes.chunks_exact_mut(8).enumerate() {
        let entry = |half: usize| {
            let quad = 2 * i + half;
            let upper = usize::from(upper[quad / 8] >> (quad % 8) & 1);
            IQ3_S[upper << 8 | usize::from(low[quad])]
        };
        put_quads(codes, [entry(0), entry(1)], signs[i]);
    }
    write_codes(BITS, &codes, &block[106..], &block[..2], out);
}

/// Writes eight codes: two entries of four magnitudes, and signs.
fn put_quads(codes: &mut [u8], entries: [u16; 2], signs: u8) {
    for (i, code) in codes.iter_mut().enumerate() {
        let magnitude = entries[i / 4] >> (i % 4 * 4) & 0xf;
        *code = magnitude as u8 | (signs >> i & 1) << 3;
    }
}
