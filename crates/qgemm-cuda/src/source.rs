//! The embedded kernel sources.

use std::sync::OnceLock;

use crate::hash::{self, Sha256Hash};

/// Every file under `kernels/` as (include name, text), sorted by name: `("atoms/types.cuh", "…")`.
pub static SOURCES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/sources.rs"));

/// The text of the source `name`.
pub fn find(name: &str) -> Option<&'static str> {
    SOURCES.binary_search_by_key(&name, |(n, _)| n).ok().map(|i| SOURCES[i].1)
}

/// The text of the kernel source `name`.
///
/// # Panics
/// When there is none: names of entries are constants of this crate.
pub(crate) fn entry(name: &'static str) -> &'static str {
    find(name).unwrap_or_else(|| panic!("{name} is not among the embedded sources"))
}

/// Hash of all sources: compiled kernels made from others are refused.
pub fn source_hash() -> Sha256Hash {
    static HASH: OnceLock<Sha256Hash> = OnceLock::new();
    *HASH.get_or_init(|| hash::of_sources(SOURCES.iter().copied()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_found_by_their_include_name() {
        assert!(find("entry/read_probe.cu").is_some_and(|text| text.contains("read_probe")));
        assert!(find("read_probe.cu").is_none());
    }

    #[test]
    fn sources_include_nothing_that_is_not_embedded() {
        for (name, text) in SOURCES {
            for line in text.lines().filter(|l| l.trim_start().starts_with("#include \"")) {
                let included = line.split('"').nth(1).unwrap_or_default();
                assert!(find(included).is_some(), "{name} includes {included}, which is not below kernels/");
            }
        }
    }
}
