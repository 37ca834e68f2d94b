//! Nibble order of GGUF's 32-value blocks. Byte `j` holds value
//! `j` (low) and value `j + 16` (high). Bit `j` of a 32-bit word is
//! the fifth bit of code `j`.

/// Unpacks 16 bytes into 32 codes.
pub(crate) fn unpack(bytes: &[u8], codes: &mut [u32]) {
    for (j, &byte) in bytes[..16].iter().enumerate() {
        codes[j] = u32::from(byte & 0xf);
        codes[j + 16] = u32::from(byte >> 4);
    }
}

/// Packs the low nibbles of 32 codes into 16 bytes.
pub(crate) fn pack(codes: &[u32], bytes: &mut [u8]) {
    for (j, byte) in bytes[..16].iter_mut().enumerate() {
        *byte = (codes[j] & 0xf) as u8 | ((codes[j + 16] & 0xf) << 4) as u8;
    }
}

/// Adds bit 4 of 32 codes from the four bytes `high`.
pub(crate) fn unpack_fifth(high: &[u8], codes: &mut [u32]) {
    let word = u32::from_le_bytes([high[0], high[1], high[2], high[3]]);
    for (j, code) in codes[..32].iter_mut().enumerate() {
        *code |= (word >> j & 1) << 4;
    }
}

/// Packs bit 4 of 32 codes into four bytes.
pub(crate) fn pack_fifth(codes: &[u32], high: &mut [u8]) {
    let word = codes[..32].iter().enumerate().fold(0u32, |word, (j, &code)| word | (code >> 4 & 1) << j);
    high[..4].copy_from_slice(&word.to_le_bytes());
}
