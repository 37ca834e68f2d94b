//! The guide for new operations compared with the operation that was
//! added last: its tables name the files that an operation edits.

use std::path::Path;

use super::finding::{Finding, Source};

/// The guide.
const GUIDE: &str = "docs/extend/operation.md";
/// Text after the operation's name in the guide.
const ADDED_LAST: &str = " is the operation that was added last";
/// The line before the table of edited files.
const EDITED: &str = "Existing files that are edited:";
/// The line before the table of lists.
const LISTS: &str = "Lists that macros and loops read:";
/// Maximum edited files.
const MOST_EDITED: usize = 8;
/// Extensions of sources.
const SOURCES: [&str; 4] = ["rs", "cu", "cuh", "wgsl"];
/// Sources that may use any operation, or that are generated.
const USERS: [&str; 7] = [
    "/tests/",
    "/examples/",
    "/generated/",
    "/exec_plan/",
    "/qgemm-model/",
    // Commands that run whole models.
    "/qgemm-cli/src/plan.rs",
    "/qgemm-cli/src/run.rs",
];

/// Checks that each edited file names the operation, and that no
/// other existing file does.
pub fn check(sources: &[Source]) -> Vec<Finding> {
    let Some(guide) = sources.iter().find(|source| source.path == Path::new(GUIDE)) else {
        return vec![Finding::in_file(GUIDE, "the guide for new operations is missing")];
    };
    let (Some(operation), edited, lists) =
        (added_last(&guide.text), table(&guide.text, EDITED), table(&guide.text, LISTS))
    else {
        return vec![Finding::in_file(GUIDE, format!("it does not say which operation{ADDED_LAST}"))];
    };
    let mut findings = Vec::new();
    if edited.is_empty() || edited.len() > MOST_EDITED {
        let what = format!("an operation edits {} existing files, not 1 to {MOST_EDITED}", edited.len());
        findings.push(Finding::in_file(GUIDE, what));
    }
    let type_name = camel_case(operation);
    let names_it = |source: &Source| source.text.contains(operation) || source.text.contains(&type_name);
    for &path in edited.iter().chain(&lists) {
        if !sources.iter().any(|source| source.path == Path::new(path) && names_it(source)) {
            findings.push(Finding::in_file(path, format!("{GUIDE} says that it names `{operation}`")));
        }
    }
    let is_other = |source: &&Source| {
        let path = source.path.to_string_lossy();
        let is_source = source.path.extension().is_some_and(|e| SOURCES.iter().any(|source| e == *source));
        let is_own = path.contains(operation) || USERS.iter().any(|folder| path.contains(folder));
        is_source && !is_own && !edited.contains(&&*path) && !lists.contains(&&*path)
    };
    for other in sources.iter().filter(is_other).filter(|source| names_it(source)) {
        findings.push(Finding::in_file(&other.path, format!("it names `{operation}`, and {GUIDE} does not list it")));
    }
    findings
}

/// The operation that the guide follows.
fn added_last(guide: &str) -> Option<&str> {
    let before = &guide[..guide.find(ADDED_LAST)?];
    before.trim_end_matches('`').rsplit('`').next().filter(|name| !name.is_empty())
}

/// The paths in the first column of the table after the line `title`.
fn table<'g>(guide: &'g str, title: &str) -> Vec<&'g str> {
    let rows = guide.lines().skip_while(|line| *line != title).skip_while(|line| !line.starts_with('|'));
    let cells = rows.take_while(|line| line.starts_with('|')).filter_map(|row| row.split('|').nth(1));
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect()
}

/// `kv_append` as a type: `KvAppend`.
fn camel_case(name: &str) -> String {
    let capital = |word: &str| word[..1].to_uppercase() + &word[1..];
    name.split('_').filter(|word| !word.is_empty()).map(capital).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "`add_one` is the operation that was added last.\n\nExisting files that are edited:\n\n| file | edit |\n|---|---|\n| `a.rs` | the module |\n\nLists that macros and loops read:\n\n| list | entry |\n|---|---|\n| `l.rs`, `m.rs` | its line |\n";

    fn findings(files: &[(&str, &str)]) -> Vec<String> {
        let all = [(GUIDE, TEXT)].iter().chain(files);
        let sources: Vec<_> = all.map(|&(path, text)| Source { path: path.into(), text: text.into() }).collect();
        check(&sources).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn tables_name_the_files_that_name_the_operation() {
        let listed = [("a.rs", "mod add_one;"), ("l.rs", "AddOne"), ("m.rs", "add_one")];
        assert_eq!(findings(&listed), [""; 0]);
        let own = [("src/op/add_one.rs", "AddOne"), ("x/tests/t.rs", "AddOne"), ("d.md", "add_one")];
        assert_eq!(findings(&[listed, own].concat()), [""; 0]);
        let other = findings(&[&listed[..], &[("b.rs", "AddOne")]].concat());
        assert!(other.len() == 1 && other[0].starts_with("b.rs"), "{other:?}");
        let missing = findings(&listed[..2]);
        assert!(missing.len() == 1 && missing[0].starts_with("m.rs"), "{missing:?}");
    }
}
