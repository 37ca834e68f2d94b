//! Parts of blocks that several types share.

use crate::formats::linear;

/// Half-word `index` of `bytes`.
pub(super) fn half_word(bytes: &[u8], index: usize) -> u16 {
    u16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]])
}

/// Signs of eight values. Seven are stored; their number
/// of minus signs is even.
pub(super) fn eighth_sign(signs: u32) -> u8 {
    let seven = (signs & 0x7f) as u8;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// Writes eight codes of two bits from an entry of a
/// grid, with a bit of `signs` above each.
pub(super) fn put_octet(codes: &mut [u8], entry: u16, signs: u8) {
    for (i, code) in codes.iter_mut().enumerate() {
        *code = (entry >> (2 * i) & 3) as u8 | (signs >> i & 1) << 2;
    }
}

/// Sets nibble `index`, the low one of a byte first.
/// Upper bits of `value` are ignored.
pub(super) fn set_nibble(bytes: &mut [u8], index: usize, value: u8) {
    let shift = index % 2 * 4;
    let byte = &mut bytes[index / 2];
    *byte = *byte & !(0xf << shift) | (value & 0xf) << shift;
}

/// Writes a block: codes of `bits` bits, the scales of
/// its sub-blocks, d.
pub(super) fn write_codes(bits: usize, codes: &[u8; 256], scales: &[u8], d: &[u8], out: &mut [u8]) {
    let (packed, records) = out.split_at_mut(codes.len() * bits / 8);
    linear::pack(bits, codes, packed);
    records[..scales.len()].copy_from_slice(scales);
    records[scales.len()..].copy_from_slice(d);
}
