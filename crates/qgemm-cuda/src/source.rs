//! Embedded kernel sources.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use crate::hash::{self, Sha256Hash};

/// Every file under `kernels/` as (include name, text), sorted by
/// name: `("atoms/types.cuh", "…")`.
pub static SOURCES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/sources.rs"));

/// The text of the source `name`.
pub fn find(name: &str) -> Option<&'static str> {
    SOURCES.binary_search_by_key(&name, |(n, _)| n).ok().map(|i| SOURCES[i].1)
}

/// The text of the kernel source `name`.
///
/// # Panics
/// When it does not exist: names of entries are
/// constants of this crate.
pub(crate) fn entry(name: &'static str) -> &'static str {
    find(name).unwrap_or_else(|| panic!("{name} is not among the embedded sources"))
}

/// A source: (include name, text).
pub(crate) type Source = (&'static str, &'static str);

/// Sources that `text` includes directly or indirectly, with `prelude`
/// before it; sorted by name. A kernel is compiled with these
/// only, so that nothing else can affect it. If an `#include`
/// of a macro cannot be followed, all sources are returned.
pub(crate) fn included(prelude: &str, text: &str) -> Vec<Source> {
    let mut found = BTreeSet::new();
    let mut names: Vec<&str> = includes(text).collect();
    while let Some(name) = names.pop() {
        let file = match name.strip_prefix('"') {
            Some(quoted) => quoted.split('"').next(),
            None => defined(prelude, name),
        };
        let Some(file) = file else { return SOURCES.to_vec() };
        // The compiler reports files that are not embedded.
        let Ok(index) = SOURCES.binary_search_by_key(&file, |(n, _)| n) else { continue };
        if found.insert(index) {
            names.extend(includes(SOURCES[index].1));
        }
    }
    found.into_iter().map(|index| SOURCES[index]).collect()
}

/// The operand of each `#include` in `text`: a
/// quoted name or a macro.
fn includes(text: &str) -> impl Iterator<Item = &str> {
    let directives = text.lines().filter_map(|line| line.trim_start().strip_prefix('#'));
    directives.filter_map(|line| Some(line.trim_start().strip_prefix("include")?.trim()))
}

/// The file that `prelude` defines `name` as:
/// `#define QG_DEQUANT_FILE "dequant/q4_0.cuh"`.
fn defined<'a>(prelude: &'a str, name: &str) -> Option<&'a str> {
    let value = prelude.lines().find_map(|line| line.strip_prefix("#define ")?.strip_prefix(name)?.strip_prefix(' '));
    value?.trim().strip_prefix('"')?.strip_suffix('"')
}

/// Hash of all sources. Bundles with another hash are refused.
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

    #[test]
    fn a_kernel_depends_on_what_it_includes() {
        let names = |prelude: &str, text: &str| -> Vec<&str> { included(prelude, text).iter().map(|s| s.0).collect() };
        assert_eq!(names("", "no includes"), [""; 0]);
        let prelude = "#define QG_DEQUANT_FILE \"dequant/q4_0.cuh\"\n";
        let gemv = names(prelude, entry("entry/gemv.cu"));
        for name in ["atoms/types.cuh", "dequant/q4_0.cuh", "generated/abi.cuh"] {
            assert!(gemv.contains(&name), "{name} is not among {gemv:?}");
        }
        for name in ["dequant/q6_k.cuh", "entry/sm80_gemm_cp_async.cu"] {
            assert!(!gemv.contains(&name), "{name} is among {gemv:?}");
        }
        assert!(gemv.is_sorted());
        assert_eq!(names("", "  #  include QG_DEQUANT_FILE").len(), SOURCES.len(), "a macro that nobody defined");
    }
}
