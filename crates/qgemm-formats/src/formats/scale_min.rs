//! Packed scales of Q4_K and Q5_K: eight 6-bit scales and
//! eight 6-bit minima in 12 bytes.
//!
//! The low six bits of bytes 0–3 are the scales of
//! sub-blocks 0–3, those of bytes 4–7 their minima.
//! Bytes 8–11 hold the low nibbles of sub-blocks 4–7:
//! scale in the low half, minimum in the high half.
//! Their upper two bits are the upper two bits of bytes 0–3
//! (scales) and 4–7 (minima).

use crate::sub_scale::BitField;

/// Scale and minimum of sub-block `sub` (0–7).
pub(super) fn unpack(bytes: &[u8], sub: usize) -> (u8, u8) {
    match sub {
        0..4 => (bytes[sub] & 63, bytes[sub + 4] & 63),
        _ => (bytes[sub + 4] & 0xf | bytes[sub - 4] >> 6 << 4, bytes[sub + 4] >> 4 | bytes[sub] >> 6 << 4),
    }
}

/// Bytes of d and dmin, which come first.
const BEFORE: usize = 4;

/// Bit fields of the scales, for [`unpack`]. Offsets count
/// from the start of the block.
pub(super) const SCALES: [[BitField; 2]; 8] = fields(0);
/// Bit fields of the minima.
pub(super) const MINIMA: [[BitField; 2]; 8] = fields(1);

/// Bit fields of the scales (0) or the minima (1).
const fn fields(which: usize) -> [[BitField; 2]; 8] {
    let mut fields = [[BitField::new(0, 0, 0); 2]; 8];
    let mut sub = 0;
    while sub < 4 {
        let byte = BEFORE + 4 * which + sub;
        fields[sub][0] = BitField::new(byte, 0, 6);
        fields[sub + 4] = [BitField::new(BEFORE + 8 + sub, 4 * which, 4), BitField::new(byte, 6, 2)];
        sub += 1;
    }
    fields
}

/// Packs eight scales and minima, each below
/// 64, into 12 bytes.
pub(super) fn pack(scales: &[u8; 8], mins: &[u8; 8], bytes: &mut [u8]) {
    for i in 0..4 {
        bytes[i] = scales[i] | scales[i + 4] >> 4 << 6;
        bytes[i + 4] = mins[i] | mins[i + 4] >> 4 << 6;
        bytes[i + 8] = scales[i + 4] & 0xf | mins[i + 4] << 4;
    }
}
