//! TQ1_0: bytes of five codes of −1, 0 and 1.
//!
//! ```text
//! TQ1_0 = 32 bytes of five codes
//!       | 16 bytes of five
//!       | 4 bytes of four
//!       | d
//! ```

use crate::formats::q2_k;

pub(super) fn tq1_0(block: &[u8], out: &mut [u8]) {
    let mut codes = [0; 256];
    put_runs(&block[..32], &mut codes[..160]);
    put_runs(&block[32..48], &mut codes[160..240]);
    put_runs(&block[48..52], &mut codes[240..]);
    let (packed, d) = out.split_at_mut(64);
    q2_k::pack_codes(&codes, packed);
    d.copy_from_slice(&block[52..]);
}

/// Writes one code of each byte, then the next
/// of each.
///
/// A byte is a fraction in base 3, in units of 1/256.
fn put_runs(bytes: &[u8], codes: &mut [u32]) {
    for (digit, codes) in codes.chunks_exact_mut(bytes.len()).enumerate() {
        for (code, &byte) in codes.iter_mut().zip(bytes) {
            let rest = byte.wrapping_mul(3u8.pow(digit as u32));
            *code = (u32::from(rest) * 3) >> 8;
        }
    }
}
