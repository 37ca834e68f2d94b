//! Hash of shader texts.

/// 64-bit FNV-1a over `texts`, independent of the compiler.
pub(crate) fn hash_of<'t>(texts: impl IntoIterator<Item = &'t str>) -> u64 {
    // Each text is terminated by a byte that no text contains.
    let bytes = texts.into_iter().flat_map(|text| text.bytes().chain([0xff]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_fnv() {
        assert_eq!(hash_of([]), 0xcbf2_9ce4_8422_2325);
        // "a" is af63dc4c8601ec8c.
        let a: u64 = 0xaf63_dc4c_8601_ec8c;
        assert_eq!(hash_of(["a"]), (a ^ 0xff).wrapping_mul(0x0000_0100_0000_01b3));
        assert_ne!(hash_of(["ab", "c"]), hash_of(["a", "bc"]));
    }
}
