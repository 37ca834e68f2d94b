//! Codes in a row of bits: code `i` is at bits `i × bits
//! ..`, low bits first.

/// Unpacks whole groups of eight codes.
pub(crate) fn unpack(bits: usize, bytes: &[u8], codes: &mut [u32]) {
    for (octet, codes) in bytes.chunks_exact(bits).zip(codes.chunks_exact_mut(8)) {
        let word = octet.iter().rev().fold(0u64, |word, &byte| word << 8 | u64::from(byte));
        for (i, code) in codes.iter_mut().enumerate() {
            *code = (word >> (i * bits)) as u32 & ((1 << bits) - 1);
        }
    }
}

/// Packs whole groups of eight codes, each below
/// `2^bits`.
pub(crate) fn pack(bits: usize, codes: &[u8], bytes: &mut [u8]) {
    for (codes, octet) in codes.chunks_exact(8).zip(bytes.chunks_exact_mut(bits)) {
        let word = codes.iter().enumerate().fold(0u64, |word, (i, &code)| word | u64::from(code) << (i * bits));
        octet.copy_from_slice(&word.to_le_bytes()[..bits]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_codes_are_unpacked() {
        for bits in [1, 2, 3, 4, 5, 6, 8] {
            let codes: Vec<u8> = (0..64u8).map(|i| i.wrapping_mul(29) & (0xff >> (8 - bits))).collect();
            let (mut bytes, mut unpacked) = (vec![0; 8 * bits], vec![0; 64]);
            pack(bits, &codes, &mut bytes);
            unpack(bits, &bytes, &mut unpacked);
            assert!(codes.iter().map(|&code| u32::from(code)).eq(unpacked), "{bits}");
        }
        let mut bytes = [0; 3];
        pack(3, &[1, 0, 7, 0, 0, 0, 0, 5], &mut bytes);
        assert_eq!(bytes, [0b1100_0001, 0b0000_0001, 0b1010_0000]);
    }
}
