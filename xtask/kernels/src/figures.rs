//! `cargo xtask figures`: writes the numbers of kernels and bundles into
//! `docs/internals/kernels.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use qgemm_cuda::{KernelSpec, Target, all_kernels, manifest};

use crate::build_kernels::part;
use crate::kernels_lock::Lock;
use crate::page;

const PAGE: &str = "docs/internals/kernels.md";

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Write nothing; fail when a number is stale.
    #[arg(long)]
    check: bool,
}

/// Runs the command.
///
/// # Errors
/// When the page has no place for the table, or, with `check`,
/// a number is stale.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let table = BTreeMap::from([("kernels".to_owned(), table()?)]);
    page::update(PAGE, &table, args.check, "cargo xtask figures").map(drop)
}

/// Kernels and bundle files of each chip of `kernels.lock`.
fn table() -> anyhow::Result<String> {
    let mut table = String::from("| chip | kernels | files | with rare formats |\n|---|---|---|---|\n");
    for chip in Lock::read()?.chips() {
        let target = Target::Cubin { arch: chip.parse()?, specific: false };
        let variant = target.variant().map_err(anyhow::Error::msg)?;
        let has_room = |spec: &KernelSpec| target.has_room_for(spec);
        let shipped: Vec<_> = manifest(variant).into_iter().filter(has_room).collect();
        let all = all_kernels(variant).iter().filter(|spec| has_room(spec)).count();
        let files: BTreeSet<String> = shipped.iter().map(|spec| part(&spec.name)).collect();
        writeln!(table, "| {target} | {} | {} | {} |", shipped.len(), files.len(), all)?;
    }
    Ok(table)
}
