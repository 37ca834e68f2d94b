//! Rules for Rust sources: module docs, file sizes, nothing
//! unfinished, no printing from libraries, and no dispatch on a
//! format outside of the formats crate.

use std::path::Path;

use super::finding::{Finding, Source};
use super::format_names::{self, FormatNames};

/// Maximum lines of a file that is not generated.
const MAX_LINES: usize = 800;

/// Crates that may print: programs.
const PROGRAMS: &[&str] = &["crates/qgemm-cli/", "xtask/", "benches/"];

/// Crates that may decide by a format's name: the formats crate,
/// and the test kit, which samples formats.
const KNOW_FORMATS: &[&str] = &["crates/qgemm-formats", "crates/qgemm-testkit"];

/// Checks all Rust, CUDA and WGSL sources. The size
/// limit applies to all three.
pub fn check(sources: &[Source]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let formats = FormatNames::of(sources);
    for source in sources {
        let extension = source.path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        if ["rs", "cu", "cuh", "wgsl"].contains(&extension) {
            let lines = source.text.lines().count();
            let is_generated = source.path.components().any(|part| part.as_os_str() == "generated");
            if lines > MAX_LINES && !is_generated {
                let what = format!("{lines} lines; split what is over {MAX_LINES}");
                findings.push(Finding::in_file(&source.path, what));
            }
        }
        if extension == "rs" {
            findings.extend(rust(source, &formats));
        }
    }
    findings
}

fn rust(source: &Source, formats: &FormatNames) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !source.text.starts_with("//!") && !source.text.starts_with("#![") {
        findings.push(Finding::in_file(&source.path, "opens without a `//!` that says what the module is for"));
    }
    let in_library = is_library(&source.path);
    let decides_by_format = !KNOW_FORMATS.iter().any(|known| source.path.starts_with(known)) && in_library;
    let mut in_tests = false;
    let mut library_code = String::new();
    for (i, line) in source.text.lines().enumerate() {
        let code = without_comment(line);
        in_tests |= code.trim_start().starts_with("#[cfg(test)]");
        let mut report = |what: &str| findings.push(Finding::at(&source.path, i + 1, what));
        for unfinished in UNFINISHED {
            if code.contains(&unfinished.replace('\u{b7}', "")) {
                report(&format!("`{}` is unfinished work", unfinished.replace('\u{b7}', "")));
            }
        }
        if code.contains(&"allow(·dead_code)".replace('\u{b7}', "")) {
            report("dead code is deleted, not allowed");
        }
        if in_library && !in_tests && ["println!", "print!", "eprint!"].iter().any(|p| contains_word(code, p)) {
            report("a library prints nothing; use `tracing`");
        }
        if !in_tests {
            library_code.push_str(code);
            library_code.push('\n');
        }
    }
    if decides_by_format {
        let what = "decides by a format's name; put what differs into its `FormatDesc`";
        let lines = format_names::lines(&library_code, formats);
        findings.extend(lines.into_iter().map(|i| Finding::at(&source.path, i + 1, what)));
    }
    findings
}

/// Markers of unfinished work. The dots keep these lines
/// from matching themselves.
const UNFINISHED: &[&str] = &["#[·ignore", "to·do!(", "unimpl·emented!("];

/// Whether it is library source: no program, test,
/// example or build script.
fn is_library(path: &Path) -> bool {
    let text = path.to_string_lossy();
    let program = PROGRAMS.iter().any(|p| text.starts_with(p));
    let beside = ["/tests/", "/examples/", "/benches/"].iter().any(|part| text.contains(part));
    let build_script = !text.contains("/src/") && (text.ends_with("/build.rs") || text.contains("/build/"));
    !program && !beside && !build_script
}

/// The line up to a `//` outside of strings.
fn without_comment(line: &str) -> &str {
    let mut quotes = 0;
    for (at, c) in line.char_indices() {
        match c {
            '"' => quotes += 1,
            '/' if quotes % 2 == 0 && line[at..].starts_with("//") => return &line[..at],
            _ => {}
        }
    }
    line
}

/// Whether `word` occurs other than as the tail of a longer
/// word (`eprintln!` contains `println!`).
fn contains_word(code: &str, word: &str) -> bool {
    code.match_indices(word).any(|(at, _)| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<String> {
        let source = Source { path: path.into(), text: text.into() };
        let registry = Source { path: format_names::REGISTRY.into(), text: "    &q4_0::Q4_0,\n".into() };
        rust(&source, &FormatNames::of(&[registry])).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_tidy_file_has_no_findings() {
        let text = "//! Something.\nfn f() { tracing::info!(\"q4_0 is slow\"); } // println!(\n";
        assert_eq!(findings("crates/qgemm-hal/src/f.rs", text), [""; 0]);
    }

    #[test]
    fn missing_docs_prints_and_unfinished_work_are_found() {
        let path = "crates/qgemm-hal/src/f.rs";
        assert_eq!(findings(path, "fn f() {}\n").len(), 1);
        assert_eq!(findings(path, "//! X.\nfn f() { println!(\"a // b\"); }\n").len(), 1);
        let unfinished = format!("//! X.\nfn f() {{ {}) }}\n", UNFINISHED[1].replace('\u{b7}', ""));
        assert_eq!(findings(path, &unfinished).len(), 1);
    }

    #[test]
    fn programs_and_tests_may_print() {
        let text = "//! X.\nfn main() { println!(\"hello\"); }\n";
        assert_eq!(findings("crates/qgemm-cli/src/main.rs", text), [""; 0]);
        assert_eq!(findings("crates/qgemm-api/examples/a.rs", text), [""; 0]);
    }

    #[test]
    fn dispatch_on_a_format_is_found_in_libraries_that_do_not_define_it() {
        let text = "//! X.\nfn f() {\n    if f.name == \"q4_0\" {}\n}\n";
        let found = findings("crates/qgemm-cuda/src/f.rs", text);
        assert!(found.len() == 1 && found[0].contains("f.rs:3:"), "{found:?}");
        for path in ["crates/qgemm-formats/src/f.rs", "crates/qgemm-testkit/src/f.rs", "crates/qgemm-cuda/tests/f.rs"] {
            assert_eq!(findings(path, text), [""; 0], "{path}");
        }
        let in_tests = text.replacen("fn f()", "#[cfg(test)]\nfn f()", 1);
        assert_eq!(findings("crates/qgemm-cuda/src/f.rs", &in_tests), [""; 0]);
    }
}
