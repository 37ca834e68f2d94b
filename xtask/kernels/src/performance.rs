//! `cargo xtask performance`: writes the tables of
//! `docs/results/performance.md` and `docs/results/operations.md` from the
//! result files in `benches/results/`.
//!
//! `benches/results/README.md` describes the schemas. A table is
//! between `<!-- generated: FILE -->` and `<!-- end -->`; every
//! result file has exactly one.

mod operations;
mod results;
mod tables;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use xtask::workspace;

use crate::atomic;
use operations::OperationResults;
use results::Results;

/// Pages of GEMM and of other operations, and the folder of
/// the results, relative to the root.
const PRODUCTS: &str = "docs/results/performance.md";
const OPERATIONS: &str = "docs/results/operations.md";
const RESULTS: &str = "benches/results";

/// File name suffix of the results of operations other than GEMM.
const OF_OPERATIONS: &str = "-operations.json";

/// Maximum lines of a page. Experiments belong in `docs/results/notes/`.
const MAX_LINES: usize = 120;

const BEGIN: &str = "<!-- generated: ";
const END: &str = "<!-- end -->";

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Write nothing; fail when a table is stale.
    #[arg(long)]
    pub check: bool,
}

/// Runs the command.
///
/// # Errors
/// When a result file is invalid or has no place on
/// its page, or, with `check`, a table is stale.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let (operations, products) = tables()?.into_iter().partition(|(name, _)| name.ends_with(OF_OPERATIONS));
    update(PRODUCTS, &products, args)?;
    update(OPERATIONS, &operations, args)
}

/// Inserts tables into a page.
fn update(page: &str, tables: &BTreeMap<String, String>, args: &Args) -> anyhow::Result<()> {
    let path = workspace::root().join(page);
    let old = fs::read_to_string(&path).with_context(|| format!("reading {page}"))?;
    let new = filled(&old, tables).with_context(|| page.to_owned())?;
    let lines = new.lines().count();
    ensure!(lines <= MAX_LINES, "{page}: {lines} lines; move what is over {MAX_LINES} to docs/results/notes/");
    if new == old {
        return Ok(());
    }
    ensure!(!args.check, "{page} is stale, run `cargo xtask performance`");
    atomic::write(&path, new.as_bytes())?;
    println!("wrote {page}");
    Ok(())
}

/// Text of each result file, by file name.
fn tables() -> anyhow::Result<BTreeMap<String, String>> {
    let mut tables = BTreeMap::new();
    let folder = workspace::root().join(RESULTS);
    let files: Vec<PathBuf> = fs::read_dir(&folder)
        .with_context(|| format!("reading {RESULTS}"))?
        .map(|entry| Ok(entry?.path()))
        .collect::<anyhow::Result<_>>()?;
    for path in files.iter().filter(|path| path.extension().is_some_and(|e| e == "json")) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let table = || -> anyhow::Result<String> {
            if name.ends_with(OF_OPERATIONS) {
                let results: OperationResults = serde_json::from_str(&fs::read_to_string(path)?)?;
                results.check()?;
                return Ok(operations::text(&results));
            }
            let results: Results = serde_json::from_str(&fs::read_to_string(path)?)?;
            results.check()?;
            tables::text(&results)
        };
        tables.insert(name.clone(), table().with_context(|| format!("{RESULTS}/{name}"))?);
    }
    Ok(tables)
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
    fn the_committed_page_is_current() {
        run(&Args { check: true }).unwrap();
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
