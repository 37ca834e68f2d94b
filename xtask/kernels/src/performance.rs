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

use anyhow::{Context, ensure};
use xtask::workspace;

use crate::page;
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
fn update(path: &str, tables: &BTreeMap<String, String>, args: &Args) -> anyhow::Result<()> {
    let lines = page::update(path, tables, args.check, "cargo xtask performance")?;
    ensure!(lines <= MAX_LINES, "{path}: {lines} lines; move what is over {MAX_LINES} to docs/results/notes/");
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
