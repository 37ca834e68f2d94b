//! IQ2_XXS, IQ2_XS and IQ2_S: 8 values an index,
//! with a bit of sign each.
//!
//! ```text
//! IQ2_XXS = d
//!         | 8 × four indices of 8 bits, and
//!           u32: four times 7 bits of signs, scale
//! IQ2_XS  = d
//!         | 32 × u16: index of 9 bits, 7 bits of signs
//!         | scales
//! IQ2_S   = d
//!         | 32 × low 8 bits of an index
//!         | 32 × signs
//!         | 8 × upper bits of four indices
//!         | scales
//! ```

use super::codes::{eighth_sign, half_word, put_octet, set_nibble, write_codes};
use super::grids::{IQ2_S, IQ2_XS, IQ2_XXS};
use crate::model::raw::word;

/// Bits of a code.
const BITS: usize = 3;

pub(super) fn iq2_xxs(block: &[u8], out: &mut [u8]) {
    let (mut codes, mut scales) = ([0; 256], [0; 8]);
    for (i, codes) in codes.chunks_exact_mut(8).enumerate() {
        let (index, signs) = (block[2 + i / 4 * 8 + i % 4], word(&block[2..], i / 4 * 2 + 1));
        put_octet(codes, IQ2_XXS[usize::from(index)], eighth_sign(signs >> (i % 4 * 7)));
        // Four octets, and so two sub-blocks, share a scale.
        set_nibble(&mut scales, i / 2, (signs >> 28) as u8);
    }
    write_codes(BITS, &codes, &scales, &block[..2], out);
}

pub(super) fn iq2_xs(block: &[u8], out: &mut [u8]) {
    let mut codes = [0; 256];
    for (i, codes) in codes.chunks_exact_mut(8).enumerate() {
        let both = half_word(&block[2..], i);
        put_octet(codes, IQ2_XS[usize::from(both & 0x1ff)], eighth_sign(u32::from(both >> 9)));
    }
    write_codes(BITS, &codes, &block[66..], &block[..2], out);
}

pub(super) fn iq2_s(block: &[u8], out: &mut [u8]) {
    let (low, signs, upper) = (&block[2..34], &block[34..66], &block[66..74]);
    let mut codes = [0; 256];
    for (i, codes) in codes.chunks_exact_mut(8).enumerate() {
        let upper = usize::from(upper[i / 4] >> (i % 4 * 2) & 3);
        put_octet(codes, IQ2_S[upper << 8 | usize::from(low[i])], signs[i]);
    }
    write_codes(BITS, &codes, &block[74..], &block[..2], out);
}
