//! Rule: nothing outside `qgemm-formats` may decide by a format's name.
//! Differences between formats belong in their descriptions.
//!
//! A library writes out a format name only to decide by
//! it, so each name is a finding: in comparisons, match arms,
//! lists and constants. There are two exceptions: a name that is
//! parsed, and names within a macro of the same file that
//! includes files, because these are file stems. Parts of names are
//! findings when a name is searched for them.

use std::collections::HashMap;
use std::path::Path;

use super::finding::Source;

/// String methods that search for a part.
const ASKING: &[&str] = &[".starts_with(", ".ends_with(", ".contains(", ".strip_prefix(", ".strip_suffix("];

/// Identifiers of expressions that hold a format's name or stem.
const NAMED: &[&str] = &["name", "format", "dequant", "stem"];

/// The list of formats: a line `&q4_0::Q4_0,` for each.
pub const REGISTRY: &str = "crates/qgemm-formats/src/formats/mod.rs";
/// Dequantizers; a file for each stem.
const DEQUANTIZERS: &str = "crates/qgemm-wgpu/shaders/dequant";
/// Module of plain element types. They are dtypes as
/// well and may be named anywhere.
const PLAIN: &str = "plain";

/// Names of formats, read from the sources.
pub struct FormatNames {
    names: Vec<String>,
    /// Names of their dequantizers.
    stems: Vec<String>,
}

impl FormatNames {
    /// The names of all formats but plain element types.
    pub fn of(sources: &[Source]) -> Self {
        let registry = sources.iter().find(|source| source.path == Path::new(REGISTRY));
        let items = registry.into_iter().flat_map(|source| source.text.lines());
        let items = items.filter_map(|line| line.trim().strip_prefix('&')?.strip_suffix(',')?.split_once("::"));
        let (plain, others): (Vec<_>, Vec<_>) = items.partition(|(module, _)| *module == PLAIN);
        let names = |items: Vec<(&str, &str)>| items.into_iter().map(|(_, name)| name.to_lowercase()).collect();
        let plain: Vec<String> = names(plain);
        let files = sources.iter().filter(|source| source.path.parent() == Some(Path::new(DEQUANTIZERS)));
        let stems = files.filter_map(|source| Some(source.path.file_stem()?.to_string_lossy().into_owned()));
        Self { names: names(others), stems: stems.filter(|stem| !plain.contains(stem)).collect() }
    }

    fn is_name(&self, text: &str) -> bool {
        self.names.iter().any(|name| name == text)
    }

    fn is_stem(&self, text: &str) -> bool {
        self.stems.iter().any(|stem| stem == text)
    }
}

/// Lines of `code` (0-based) that decide by a format's name.
/// Comments are already removed.
pub fn lines(code: &str, formats: &FormatNames) -> Vec<usize> {
    let including = including_macros(code);
    let mut found = Vec::new();
    for (at, literal) in literals(code) {
        let after = code[at + literal.len() + 2..].trim_start();
        let is_compared = is_compared(code, at, after);
        let is_allowed = after.starts_with(".parse") || including.iter().any(|(from, to)| (*from..*to).contains(&at));
        if (formats.is_name(literal) || formats.is_stem(literal) && is_compared) && !is_allowed {
            found.push(at);
        }
    }
    found.extend(asked_parts(code, formats));
    found.sort_unstable();
    let mut lines: Vec<_> = found.into_iter().map(|at| code[..at].matches('\n').count()).collect();
    lines.dedup();
    lines
}

/// Every single-line string literal without escapes, with the
/// position of its first quote.
fn literals(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut start = 0;
    code.split_inclusive('\n').flat_map(move |line| {
        let line_start = start;
        start += line.len();
        let quotes: Vec<usize> = line.match_indices('"').map(|(at, _)| at).collect();
        let pairs: Vec<_> =
            quotes.chunks_exact(2).map(|pair| (line_start + pair[0], &line[pair[0] + 1..pair[1]])).collect();
        pairs
    })
}

/// Whether the literal at `at` is a match arm or an
/// operand of a comparison.
fn is_compared(code: &str, at: usize, after: &str) -> bool {
    let before = code[..at].trim_end();
    let arm = after.starts_with("=>") || (after.starts_with('|') && !after.starts_with("||"));
    arm || before.ends_with("==") || before.ends_with("!=")
}

/// Locations where a format's name is searched for a part, given
/// literally or by a constant of the same file.
fn asked_parts(code: &str, formats: &FormatNames) -> Vec<usize> {
    let constants = constants(code);
    let calls = ASKING.iter().flat_map(|call| code.match_indices(call).map(|(at, _)| (at, *call)));
    let decides = |&(at, call): &(usize, &str)| {
        let receiver = receiver(&code[..at]);
        let argument = code[at + call.len()..].trim_start().trim_start_matches('&');
        let part = match argument.strip_prefix(['"', '\'']) {
            Some(text) => text.split(['"', '\'']).next(),
            None => argument
                .split(|c: char| !c.is_alphanumeric() && c != '_')
                .next()
                .and_then(|n| constants.get(n).copied()),
        };
        let holds = |name: &str, part: &str| match call {
            ".starts_with(" | ".strip_prefix(" => name.starts_with(part),
            ".ends_with(" | ".strip_suffix(" => name.ends_with(part),
            _ => name.contains(part),
        };
        let part = part.filter(|part| !part.is_empty());
        NAMED.iter().any(|word| receiver.contains(word))
            && part.is_some_and(|part| formats.names.iter().any(|name| holds(name, part)))
    };
    calls.filter(decides).map(|(at, _)| at).collect()
}

/// The receiver of a call at the end of `before`: names,
/// fields and calls without arguments.
fn receiver(before: &str) -> &str {
    let is_part = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '(' | ')');
    let start = before.rfind(|c: char| !is_part(c)).map_or(0, |at| at + 1);
    &before[start..]
}

/// String constants of the file.
fn constants(code: &str) -> HashMap<&str, &str> {
    let items = ["const ", "static "]
        .into_iter()
        .flat_map(|word| code.match_indices(word).map(|(at, word)| &code[at + word.len()..]));
    let parse = |item: &'_ str| -> Option<(usize, usize, usize)> {
        let colon = item.find(':')?;
        let item = &item[..item.find(';')?];
        let (from, to) = (item.find('"')?, item.rfind('"')?);
        (colon < from && from < to && !item[from + 1..to].contains('"')).then_some((colon, from + 1, to))
    };
    items.filter_map(|item| parse(item).map(|(colon, from, to)| (item[..colon].trim(), &item[from..to]))).collect()
}

/// Ranges where the file invokes its own file-including macros.
fn including_macros(code: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    for (at, word) in code.match_indices("macro_rules! ") {
        let rest = &code[at + word.len()..];
        let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        if !rest[..rest.find("\n}").unwrap_or(rest.len())].contains("include_") {
            continue;
        }
        for (from, call) in code.match_indices(&format!("{name}![")) {
            let length = code[from + call.len()..].find(']').unwrap_or(0);
            found.push((from, from + call.len() + length));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::fs;

    use qgemm_formats::{DType, Format};
    use xtask::workspace;

    use super::*;

    fn formats() -> FormatNames {
        let root = workspace::root();
        let registry = Source { path: REGISTRY.into(), text: fs::read_to_string(root.join(REGISTRY)).unwrap() };
        let files = fs::read_dir(root.join(DEQUANTIZERS)).unwrap();
        let path = |file: fs::DirEntry| Path::new(DEQUANTIZERS).join(file.file_name());
        let dequantizers = files.map(|file| Source { path: path(file.unwrap()), text: String::new() });
        FormatNames::of(&dequantizers.chain([registry]).collect::<Vec<_>>())
    }

    fn lines(code: &str) -> Vec<usize> {
        super::lines(code, &formats())
    }

    #[test]
    fn names_in_sources_are_those_of_all_formats() {
        let mut found = formats();
        let is_plain = |name: &str| DType::ALL.iter().any(|dtype| dtype.name() == name);
        let others = || Format::all().filter(|format| !is_plain(format.name));
        assert_eq!(found.names, others().map(|format| format.name).collect::<Vec<_>>());
        let mut stems: Vec<_> = others().map(|format| format.dequant).collect();
        stems.sort_unstable();
        stems.dedup();
        found.stems.sort_unstable();
        assert_eq!(found.stems, stems);
    }

    #[test]
    fn comparisons_and_arms_are_found() {
        for code in ["match f.name { \"q4_0\" => 1, _ => 2 }", "if f.name == \"q4_0\" {}", "\"q4_0\" | \"x\" => 1"] {
            assert_eq!(lines(code), [0], "{code}");
        }
        assert_eq!(lines("if f.dequant == \"int4\" {}"), [0], "a stem");
    }

    #[test]
    fn lists_and_constants_of_names_are_found() {
        assert_eq!(lines("const MANY: &[&str] = &[\n    \"q2_k\",\n    \"q3_k\",\n];"), [1, 2]);
        assert_eq!(lines("let spills = [\"q4_k\", \"q5_k\"].contains(&format.name);"), [0]);
        assert_eq!(lines("static ONE: &str = \"fp8_e4m3_block128\";"), [0]);
    }

    #[test]
    fn parts_of_names_are_found() {
        for code in [
            "if format.name.ends_with(\"_block128\") {}",
            "format.name.starts_with(\"int3\")",
            "let k = i.format.name.contains(\"_k\");",
            "name.strip_prefix(\"q4_\")",
            "format.dequant.starts_with('q')",
            "const TAIL: &str = \"_block128\"; fn f() { name.ends_with(TAIL) }",
        ] {
            assert_eq!(lines(code), [0], "{code}");
        }
    }

    #[test]
    fn other_strings_and_receivers_are_none_of_the_rule() {
        for code in [
            "let f: Format = \"q4_0\".parse();",
            "tracing::info!(\"q4_0 is slow\");",
            "path.ends_with(\"_k\")",
            "format.name.starts_with(other)",
            "spec.name.starts_with(\"gemv_nt\")",
            "XRounding::Int8 => \"int8\",",
            "match x { \"f16\" => 1, _ => 2 }",
        ] {
            assert_eq!(lines(code), [0; 0], "{code}");
        }
    }

    #[test]
    fn stems_in_a_macro_that_includes_files_are_file_names() {
        let uses = "static S: &[(&str, &str)] = snippets![\n    \"q4_0\"\n];\n";
        let including = "macro_rules! snippets {\n    ($s:literal) => { include_str!(concat!($s, \".wgsl\")) };\n}\n";
        assert_eq!(lines(&format!("{including}{uses}")), [0; 0]);
        assert_eq!(lines(&format!("macro_rules! snippets {{\n    ($s:literal) => {{ $s }};\n}}\n{uses}")).len(), 1);
    }
}
