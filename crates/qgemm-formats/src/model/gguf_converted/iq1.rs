//! IQ1_S and IQ1_M: 8 values an index of 11 bits.
//!
//! ```text
//! IQ1_S = d
//!       | 32 × low 8 bits of an index
//!       | 8 × u16: upper bits of four indices, scale,
//!         sign of 1/8
//! IQ1_M = 32 × low 8 bits of an index
//!       | 32 nibbles: upper bits, sign of 1/8
//!       | 4 × u16: four scales, 4 bits of d
//! ```

use super::codes::{half_word, put_octet, set_nibble, write_codes};
use super::grids::IQ1;

/// Bits of a code of IQ1_S, and of IQ1_M.
const S_BITS: usize = 2;
const M_BITS: usize = 3;
/// Code bit of minus 1/8.
const MINUS: u8 = 4;

pub(super) fn iq1_s(block: &[u8], out: &mut [u8]) {
    let (low, upper) = block[2..].split_at(32);
    let (mut codes, mut scales) = ([0; 256], [0; 4]);
    for (i, (codes, &low)) in codes.chunks_exact_mut(8).zip(low).enumerate() {
        let upper = half_word(upper, i / 4);
        put_octet(codes, IQ1[usize::from(upper >> (i % 4 * 3) & 7) << 8 | usize::from(low)], 0);
        if i % 4 == 0 {
            // The scale, and the sign above it.
            set_nibble(&mut scales, i / 4, (upper >> 12) as u8);
        }
    }
    write_codes(S_BITS, &codes, &scales, &block[..2], out);
}

pub(super) fn iq1_m(block: &[u8], out: &mut [u8]) {
    let (low, rest) = block.split_at(32);
    let (upper, words) = rest.split_at(16);
    let (mut codes, mut scales) = ([0; 256], [0; 8]);
    for (i, (codes, &low)) in codes.chunks_exact_mut(8).zip(low).enumerate() {
        let nibble = upper[i / 2] >> (i % 2 * 4);
        let minus = if nibble & 8 == 0 { 0 } else { MINUS };
        put_octet(codes, IQ1[usize::from(nibble & 7) << 8 | usize::from(low)], 0);
        codes.iter_mut().for_each(|code| *code |= minus);
    }
    for sub in 0..16 {
        set_nibble(&mut scales, sub, (half_word(words, sub / 4) >> (sub % 4 * 3) & 7) as u8);
    }
    let d = (0..4).fold(0, |d, i| d | half_word(words, i) >> 12 << (4 * i));
    write_codes(M_BITS, &codes, &scales, &d.to_le_bytes(), out);
}
