//! Pages of documentation with generated tables: a table is between
//! `<!-- generated: NAME -->` and `<!-- end -->`.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, bail, ensure};
use xtask::workspace;

use crate::atomic;

const BEGIN: &str = "<!-- generated: ";
const END: &str = "<!-- end -->";

/// Inserts the tables, by their names, into a page whose path is relative to the root. Returns
/// the lines of the page.
///
/// # Errors
/// When a table or its place is missing, or, with `check`, a table is not
/// as `command` writes it.
pub fn update(page: &str, tables: &BTreeMap<String, String>, check: bool, command: &str) -> anyhow::Result<usize> {
    let path = workspace::root().join(page);
    let old = fs::read_to_string(&path).with_context(|| format!("reading {page}"))?;
    let new = filled(&old, tables).with_context(|| page.to_owned())?;
    if new != old {
        ensure!(!check, "{page} is stale, run `{command}`");
        atomic::write(&path, new.as_bytes())?;
        println!("wrote {page}");
    }
    Ok(new.lines().count())
}

/// The page with each table between its markers.
fn filled(page: &str, tables: &BTreeMap<String, String>) -> anyhow::Result<String> {
    let mut out = String::new();
    let mut missing: Vec<&str> = tables.keys().map(String::as_str).collect();
    let mut rest = page;
    while let Some((before, after)) = rest.split_once(BEGIN) {
        let (name, after) = after.split_once(" -->").context("a marker that is not closed")?;
        let Some(at) = missing.iter().position(|m| *m == name) else {
            bail!("{name} has no result file, or a second place");
        };
        missing.remove(at);
        let (old, after) = after.split_once(END).with_context(|| format!("{name} has no `{END}`"))?;
        ensure!(!old.contains(BEGIN), "{name} has no `{END}`");
        out += &format!("{before}{BEGIN}{name} -->\n{}{END}", tables[name]);
        rest = after;
    }
    ensure!(missing.is_empty(), "no `{BEGIN}FILE -->` for {}", missing.join(", "));
    Ok(out + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables_of(name: &str) -> BTreeMap<String, String> {
        BTreeMap::from([(name.into(), "| new |\n".into())])
    }

    #[test]
    fn a_table_replaces_what_stands_between_its_markers() {
        let page = "# Page\n<!-- generated: a.json -->\n| old |\n<!-- end -->\ntext\n";
        let new = "# Page\n<!-- generated: a.json -->\n| new |\n<!-- end -->\ntext\n";
        assert_eq!(filled(page, &tables_of("a.json")).unwrap(), new);
        assert_eq!(filled(new, &tables_of("a.json")).unwrap(), new);
    }

    #[test]
    fn a_result_file_without_a_place_and_a_place_without_a_file_are_errors() {
        let page = "<!-- generated: a.json -->\n<!-- end -->\n";
        assert!(filled(page, &tables_of("b.json")).is_err());
        assert!(filled("# Page\n", &tables_of("a.json")).is_err());
        assert!(filled(&page.repeat(2), &tables_of("a.json")).is_err());
        assert!(filled("<!-- generated: a.json -->\n| old |\n", &tables_of("a.json")).is_err());
    }
}
