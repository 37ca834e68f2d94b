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

/// The first `QG_` name in a preprocessor condition of `text` or of
/// what it includes that neither `prelude` nor an earlier line
/// defines. The preprocessor would read it as 0 without a message.
pub fn undefined_name(prelude: &str, text: &str) -> Option<UndefinedName> {
    let mut walk = Walk { prelude, defined: BTreeSet::new(), included: BTreeSet::new() };
    walk.file("the prelude", prelude).or_else(|| walk.file("the entry", text))
}

/// A name in a preprocessor condition that nothing defines.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}: `{name}` in a condition is defined by no line of the prelude")]
pub struct UndefinedName {
    /// The name.
    pub name: String,
    /// Include name of the file, or `the entry`.
    pub file: String,
    /// Line, from 1.
    pub line: usize,
}

/// A walk over sources in the order of their inclusion. Conditions
/// are not evaluated, so that branches not taken are checked, too.
struct Walk<'a> {
    prelude: &'a str,
    defined: BTreeSet<&'a str>,
    included: BTreeSet<&'a str>,
}

impl<'a> Walk<'a> {
    fn file(&mut self, file: &str, text: &'a str) -> Option<UndefinedName> {
        for (line, directive) in (1..).zip(text.lines()).filter_map(|(n, line)| Some((n, directive(line)?))) {
            let found = match directive {
                ("define", rest) => {
                    self.defined.extend(names(rest).next());
                    None
                }
                ("undef", rest) => {
                    self.defined.remove(rest);
                    None
                }
                ("include", rest) => self.include(rest),
                ("if" | "elif" | "ifdef" | "ifndef", rest) => {
                    let unknown = names(rest).find(|name| name.starts_with("QG_") && !self.defined.contains(name));
                    unknown.map(|name| UndefinedName { name: name.to_owned(), file: file.to_owned(), line })
                }
                _ => None,
            };
            if found.is_some() {
                return found;
            }
        }
        None
    }

    fn include(&mut self, operand: &'a str) -> Option<UndefinedName> {
        let file = match operand.strip_prefix('"') {
            Some(quoted) => quoted.split('"').next()?,
            None => defined(self.prelude, operand)?,
        };
        // The compiler reports files that are not embedded.
        let text = find(file)?;
        if self.included.insert(file) { self.file(file, text) } else { None }
    }
}

/// Name and operand of a preprocessor directive, without a comment.
fn directive(line: &str) -> Option<(&str, &str)> {
    let directive = line.trim_start().strip_prefix('#')?.trim_start();
    let (name, rest) = directive.split_once(char::is_whitespace)?;
    Some((name, rest.split("//").next().unwrap_or(rest).trim()))
}

/// The identifiers of `text`.
fn names(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|name| !name.is_empty())
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
    fn conditions_name_what_the_prelude_defines() {
        let found = |prelude: &str, text: &'static str| undefined_name(prelude, text).map(|found| found.to_string());
        let condition = "#include \"atoms/types.cuh\"\n#if QG_STEPS > 1 // QG_COMMENT\n#endif\n";
        let undefined = "the entry:2: `QG_STEPS` in a condition is defined by no line of the prelude";
        assert_eq!(found("constexpr unsigned QG_STEPS = 2;\n", condition).as_deref(), Some(undefined));
        assert_eq!(found("#define QG_STEPS 2\n", condition), None);
        assert_eq!(found("", "#define QG_STEPS 0\n#if !QG_STEPS && __cplusplus\n#endif\n"), None);
        assert!(found("", "#if 0\n#elif QG_LATER\n#endif\n#define QG_LATER 1\n").is_some(), "defined too late");
        let included = undefined_name("", "#include \"atoms/fp8.cuh\"\n").expect("it asks for the variant");
        assert_eq!((included.name.as_str(), included.file.as_str()), ("QG_VARIANT", "atoms/fp8.cuh"));
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
