//! SHA-256 of field sequences. The build script uses this file too.

use std::fmt;

/// A SHA-256 hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Sha256Hash(pub [u8; 32]);

impl Sha256Hash {
    /// The hash of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(hmac_sha256::Hash::hash(bytes))
    }

    /// The first eight bytes, for uses where a collision
    /// costs only a wrong guess.
    pub fn short(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    }
}

impl fmt::Display for Sha256Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Sha256Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Hashes a sequence of fields, each prefixed with its length, so
/// that different sequences never look alike.
pub(crate) struct Hasher(hmac_sha256::Hash);

impl Hasher {
    pub(crate) fn new() -> Self {
        Self(hmac_sha256::Hash::new())
    }

    pub(crate) fn field(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    pub(crate) fn finish(self) -> Sha256Hash {
        Sha256Hash(self.0.finalize())
    }
}

/// Hash of kernel sources: (name, text), sorted by name.
pub(crate) fn of_sources<'a>(sources: impl Iterator<Item = (&'a str, &'a str)>) -> Sha256Hash {
    let mut hasher = Hasher::new();
    for (name, text) in sources {
        hasher.field(name.as_bytes());
        hasher.field(text.as_bytes());
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_sha256() {
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(Sha256Hash::of(b"abc").to_string(), expected);
    }

    #[test]
    fn fields_do_not_run_together() {
        let hash = |fields: &[&str]| {
            let mut hasher = Hasher::new();
            fields.iter().for_each(|f| hasher.field(f.as_bytes()));
            hasher.finish()
        };
        assert_ne!(hash(&["ab", "c"]), hash(&["a", "bc"]));
        assert_ne!(hash(&["a"]), hash(&["a", ""]));
    }
}
