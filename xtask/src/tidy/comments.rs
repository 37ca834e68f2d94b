//! Comment rules: the field's terms and short lines.
//! `docs/internals/glossary.md` has the terms.

use super::finding::{Finding, Source};

/// Maximum average of words per comment line in a file.
const MAX_WORDS: f64 = 9.0;

/// Phrases of the wrong sense: path, phrase, replacement.
const PHRASES: &[(&str, &str, &str)] = &[
    ("crates/", "places of", "pointers, addresses or offsets"),
    ("crates/", "ways to run", "candidates"),
    ("crates/", "copy engine", "TMA"),
    ("crates/", "kept work", "tile info"),
    ("crates/", "one behind the other", "contiguous"),
    ("crates/", "are seen", "are visible"),
    ("crates/", "a cta each", "one per CTA"),
    ("crates/", "brought to one", "normalized"),
    ("crates/qgemm-cpu/src/families/attention", "kept", "rescale factor"),
    ("crates/qgemm-cuda/kernels/entry/attention", "kept", "rescale factor"),
    ("crates/qgemm-cuda/kernels/attention", "kept", "rescale factor"),
    ("crates/qgemm-wgpu/shaders/attention", "kept", "rescale factor"),
    ("crates/qgemm-formats/", "what of", "the noun"),
    ("crates/qgemm-formats/", "thread block", "CTA"),
    ("crates/qgemm-emu/", "thread block", "CTA"),
    ("crates/qgemm-cuda/kernels/", "those that", "the noun"),
    ("crates/qgemm-cuda/kernels/", "what of", "the noun"),
    ("crates/qgemm-wgpu/shaders/", "those that", "the noun"),
    ("crates/qgemm-sched/", "thread block", "CTA"),
];

/// First words of doc comments that name nothing.
const UNNAMED: &[&str] = &["What ", "That ", "Of ", "Those ", "Which "];

/// Checks the comments of all sources except generated ones.
pub fn check(sources: &[Source]) -> Vec<Finding> {
    let is_code =
        |source: &&Source| source.path.extension().is_some_and(|e| e == "rs" || e == "cu" || e == "cuh" || e == "wgsl");
    let is_written = |source: &&Source| !source.path.components().any(|part| part.as_os_str() == "generated");
    sources.iter().filter(is_code).filter(is_written).flat_map(comments).collect()
}

fn comments(source: &Source) -> Vec<Finding> {
    let path = source.path.to_string_lossy();
    let mut findings = length(source);
    findings.extend(first_words(source));
    for (i, text) in texts(source) {
        let lower = text.to_lowercase();
        for (_, phrase, instead) in PHRASES.iter().filter(|(under, ..)| path.starts_with(under)) {
            if lower.contains(phrase) {
                findings.push(Finding::at(&source.path, i + 1, format!("`{phrase}`: say {instead}")));
            }
        }
    }
    findings
}

/// Finding of a file whose comment lines are long.
fn length(source: &Source) -> Vec<Finding> {
    let (lines, words) = texts(source)
        .fold((0usize, 0usize), |(lines, words), (_, text)| (lines + 1, words + text.split_whitespace().count()));
    let average = words as f64 / lines.max(1) as f64;
    if average <= MAX_WORDS {
        return Vec::new();
    }
    let what = format!("comments have {average:.1} words a line; {MAX_WORDS} on average are read at a glance");
    vec![Finding::in_file(&source.path, what)]
}

/// Findings of doc comments that do not begin with a noun.
fn first_words(source: &Source) -> Vec<Finding> {
    let doc = |line: &str| line.trim_start().starts_with("///") || line.trim_start().starts_with("//!");
    let mut findings = Vec::new();
    let mut was_doc = false;
    for (i, line) in source.text.lines().enumerate() {
        let text = line.trim_start().trim_start_matches(['/', '!']).trim();
        if doc(line) && !was_doc && UNNAMED.iter().any(|word| text.starts_with(word)) {
            findings.push(Finding::at(&source.path, i + 1, "a doc comment begins with the name of the thing"));
        }
        was_doc = doc(line);
    }
    findings
}

/// Line indices and texts of comment lines, without tables
/// and code fences.
fn texts(source: &Source) -> impl Iterator<Item = (usize, &str)> {
    source.text.lines().enumerate().filter_map(|(i, line)| {
        let text = line.trim_start().strip_prefix("//")?.trim_start_matches(['/', '!']).trim();
        (!text.is_empty() && !text.starts_with(['|', '`'])).then_some((i, text))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> usize {
        comments(&Source { path: path.into(), text: text.into() }).len()
    }

    #[test]
    fn comments_are_short() {
        let long = "// one two three four five six seven eight nine ten\n";
        assert_eq!(findings("crates/qgemm-cuda/kernels/atoms/a.cuh", long), 1);
        assert_eq!(findings("crates/qgemm-cuda/kernels/atoms/a.cuh", &format!("{long}// short\n")), 0);
        assert_eq!(findings("crates/qgemm-api/src/lib.rs", long), 1);
        assert_eq!(findings("crates/qgemm-api/src/plan_cache.rs", long), 1);
    }

    #[test]
    fn doc_comments_name_the_thing() {
        assert_eq!(findings("crates/qgemm-cpu/src/a.rs", "/// What a task takes.\n/// Of all.\nstruct Task;\n"), 1);
        assert_eq!(findings("crates/qgemm-cpu/src/a.rs", "/// Share of a task.\nstruct Task;\n"), 0);
    }

    #[test]
    fn phrases_are_found_in_comments_alone() {
        assert_eq!(findings("crates/qgemm-api/src/a.rs", "/// The places of keys.\nlet places_of = 1;\n"), 1);
    }
}
