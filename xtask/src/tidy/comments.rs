//! Rules for comments: the field's terms, and short lines. `docs/internals/glossary.md` has the terms.

use super::finding::{Finding, Source};

/// Paths whose comments are held to [`MAX_WORDS`].
const SHORT: &[&str] = &["crates/qgemm-cuda/kernels/", "crates/qgemm-wgpu/shaders/", "crates/qgemm-sched/src/"];

/// Words of a comment line, on average over a file.
const MAX_WORDS: f64 = 9.0;

/// Phrases with the wrong sense, by path, and what to say instead.
const PHRASES: &[(&str, &str, &str)] = &[
    ("crates/", "places of", "pointers, addresses or offsets"),
    ("crates/", "ways to run", "candidates"),
    ("crates/", "copy engine", "TMA"),
    ("crates/", "kept work", "tile info"),
    ("crates/qgemm-cuda/kernels/", "those that", "the noun"),
    ("crates/qgemm-cuda/kernels/", "what of", "the noun"),
    ("crates/qgemm-wgpu/shaders/", "those that", "the noun"),
    ("crates/qgemm-sched/", "thread block", "CTA"),
];

/// Checks the comments of every source but generated ones.
pub fn check(sources: &[Source]) -> Vec<Finding> {
    let is_code =
        |source: &&Source| source.path.extension().is_some_and(|e| e == "rs" || e == "cu" || e == "cuh" || e == "wgsl");
    let is_written = |source: &&Source| !source.path.components().any(|part| part.as_os_str() == "generated");
    sources.iter().filter(is_code).filter(is_written).flat_map(comments).collect()
}

fn comments(source: &Source) -> Vec<Finding> {
    let path = source.path.to_string_lossy();
    let mut findings = Vec::new();
    let (mut lines, mut words) = (0usize, 0usize);
    for (i, line) in source.text.lines().enumerate() {
        let Some(text) = line.trim_start().strip_prefix("//") else { continue };
        let text = text.trim_start_matches(['/', '!']).trim();
        if text.is_empty() || text.starts_with(['|', '`']) {
            continue;
        }
        (lines, words) = (lines + 1, words + text.split_whitespace().count());
        let lower = text.to_lowercase();
        for (_, phrase, instead) in PHRASES.iter().filter(|(under, ..)| path.starts_with(under)) {
            if lower.contains(phrase) {
                findings.push(Finding::at(&source.path, i + 1, format!("`{phrase}`: say {instead}")));
            }
        }
    }
    let average = words as f64 / lines.max(1) as f64;
    if SHORT.iter().any(|under| path.starts_with(under)) && average > MAX_WORDS {
        let what = format!("comments have {average:.1} words a line; {MAX_WORDS} on average are read at a glance");
        findings.push(Finding::in_file(&source.path, what));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> usize {
        comments(&Source { path: path.into(), text: text.into() }).len()
    }

    #[test]
    fn kernels_have_short_comments() {
        let long = "// one two three four five six seven eight nine ten\n";
        assert_eq!(findings("crates/qgemm-cuda/kernels/atoms/a.cuh", long), 1);
        assert_eq!(findings("crates/qgemm-cuda/kernels/atoms/a.cuh", &format!("{long}// short\n")), 0);
        assert_eq!(findings("crates/qgemm-api/src/lib.rs", long), 0);
    }

    #[test]
    fn phrases_are_found_in_comments_alone() {
        assert_eq!(findings("crates/qgemm-api/src/a.rs", "/// The places of keys.\nlet places_of = 1;\n"), 1);
    }
}
