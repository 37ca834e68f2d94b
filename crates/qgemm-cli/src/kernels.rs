//! `qgemm kernels`: how near each kernel of products comes to the best of its
//! problems, by the cost model, over a grid of problems and chips.

mod chips;
mod problems;
mod tally;

use std::collections::BTreeMap;

use anyhow::ensure;
use qgemm_api::{Context, Format, emu};
use rayon::prelude::*;
use serde::Serialize;

use crate::holds::Holds;
use crate::out::{self, Printing};
use crate::progress::Progress;
use crate::table::{self, Column, Row, numbers, words};
use chips::CHIPS;
use tally::Tally;

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Only chips with this word in their name, or of this architecture
    /// (`H200`, `89`).
    #[arg(long, value_name = "NAME")]
    chip: Option<String>,
    /// Only these weight formats (default: all that are not rare).
    #[arg(long, num_args = 1..)]
    format: Vec<Format>,
    /// Count a kernel as earning if its time is within this share of the best on some problem.
    #[arg(long, value_name = "SHARE", default_value_t = 0.03)]
    within: f64,
    /// Also say how much slower the choices are without the kernels whose
    /// identity contains all parts of one of these (`gemm:gemm;m=32,`).
    #[arg(long, num_args = 1.., value_name = "PART;…")]
    without: Vec<String>,
    /// Every kernel instead of one row for each tile.
    #[arg(long)]
    all: bool,
}

/// A kernel or, without `--all`, the kernels of a tile.
#[derive(Clone, Debug, Serialize)]
struct KernelRow {
    /// Kernel identity; of a tile, up to its weight formats and what
    /// follows from these.
    kernel: String,
    /// Number of kernels, and of those near enough to the best
    /// of some problem.
    kernels: usize,
    earning: usize,
    /// Problems that the kernel serves, whose plan chooses it, and
    /// that no other kernel serves.
    offered: usize,
    chosen: usize,
    alone: usize,
    /// Smallest ratio of its time to that of the choice.
    nearest: f64,
}

impl Row for KernelRow {
    const COLUMNS: &'static [Column] = &[
        numbers("kernels", 7),
        numbers("earning", 7),
        numbers("offered", 8),
        numbers("chosen", 8),
        numbers("alone", 7),
        numbers("nearest", 7),
        words("kernel", 0),
    ];

    fn cells(&self) -> Vec<String> {
        let counts = [self.kernels, self.earning, self.offered, self.chosen, self.alone];
        let counts = counts.map(|count| count.to_string());
        counts.into_iter().chain([format!("{:.3}", self.nearest), self.kernel.clone()]).collect()
    }
}

/// The choices of a chip, and what they lose without some kernels.
#[derive(Clone, Debug, Serialize)]
struct LossRow {
    chip: String,
    problems: usize,
    /// Geometric mean of the choices' times.
    microseconds: f64,
    /// Problems that no other kernel serves.
    unserved: usize,
    /// Geometric mean of the times' ratios, and the worst.
    mean: f64,
    worst: f64,
    worst_problem: String,
}

impl Row for LossRow {
    const COLUMNS: &'static [Column] = &[
        words("chip", 20),
        numbers("problems", 8),
        numbers("mean us", 9),
        numbers("unserved", 8),
        numbers("mean", 7),
        numbers("worst", 7),
        words("worst problem", 0),
    ];

    fn cells(&self) -> Vec<String> {
        let Self { chip, problems, microseconds, unserved, mean, worst, worst_problem } = self;
        vec![
            chip.clone(),
            problems.to_string(),
            format!("{microseconds:.3}"),
            unserved.to_string(),
            format!("{mean:.4}"),
            format!("{worst:.3}"),
            worst_problem.clone(),
        ]
    }
}

/// Both tables.
#[derive(Serialize)]
struct Kernels {
    kernels: Vec<KernelRow>,
    losses: Vec<LossRow>,
}

/// Runs the command.
///
/// # Errors
/// When a chip cannot be described, or standard output is closed.
pub fn run(args: &Args, printing: Printing) -> anyhow::Result<Holds> {
    let formats = match &args.format[..] {
        [] => Format::all().filter(|format| !format.is_rare).collect(),
        given => given.to_vec(),
    };
    let is_wanted = |chip: &&emu::ChipNumbers<'_>| args.chip.as_ref().is_none_or(|name| is_named(chip, name));
    let chips: Vec<_> = CHIPS.iter().filter(is_wanted).collect();
    ensure!(!chips.is_empty(), "the grid has no such chip: expected one such as H200");
    let progress = Progress::new((chips.len() * formats.len()) as u64, "weighing");
    let tallies = chips.par_iter().map(|chip| tally(&emu::describe(chip)?, args, &formats, &progress));
    let tallies = tallies.collect::<anyhow::Result<Vec<Tally>>>()?;
    drop(progress);
    let losses = chips.iter().zip(&tallies).map(|(chip, tally)| loss(chip.name, tally)).collect();
    let both = Kernels { kernels: rows(args, &tallies), losses };
    let is_served = both.losses.iter().all(|loss: &LossRow| loss.unserved == 0);
    match printing {
        Printing::Json => out::json(&both)?,
        _ => {
            table::print(both.kernels, printing)?;
            table::print(both.losses, printing)?;
        }
    }
    Ok(if is_served { Holds::Yes } else { Holds::No })
}

/// Whether `name` is a word of the chip's name, or its architecture.
fn is_named(chip: &emu::ChipNumbers<'_>, name: &str) -> bool {
    chip.name.split(' ').any(|word| word == name) || chip.arch.to_string() == name
}

fn tally(ctx: &Context, args: &Args, formats: &[Format], progress: &Progress) -> anyhow::Result<Tally> {
    let has_all = |kernel: &str, parts: &String| parts.split(';').all(|part| kernel.contains(part));
    let without = |kernel: &str| args.without.iter().any(|parts| has_all(kernel, parts));
    let mut tally = Tally::default();
    for &format in formats {
        for case in problems::cases(ctx, format)? {
            tally.add(ctx, &case, without);
        }
        progress.step(1);
    }
    Ok(tally)
}

fn loss(chip: &str, tally: &Tally) -> LossRow {
    let loss = &tally.loss;
    let mean = |logarithms: f64| (logarithms / loss.problems.max(1) as f64).exp();
    LossRow {
        chip: chip.to_owned(),
        problems: loss.problems,
        microseconds: mean(loss.seconds) * 1e6,
        unserved: loss.unserved,
        mean: mean(loss.logarithms),
        worst: loss.worst,
        worst_problem: loss.worst_problem.clone(),
    }
}

/// One row for each kernel, with the problems of all chips; without
/// `--all`, one for each tile.
fn rows(args: &Args, tallies: &[Tally]) -> Vec<KernelRow> {
    let mut kernels = BTreeMap::new();
    for stats in tallies.iter().flat_map(|tally| &tally.stats) {
        let row = KernelRow {
            kernel: stats.kernel.clone(),
            kernels: 0,
            earning: 0,
            offered: stats.offered,
            chosen: stats.chosen,
            alone: stats.alone,
            nearest: stats.nearest,
        };
        merge(&mut kernels, row);
    }
    for row in kernels.values_mut() {
        row.kernels = 1;
        row.earning = usize::from(row.alone > 0 || row.nearest <= 1.0 + args.within);
    }
    if args.all {
        return kernels.into_values().collect();
    }
    let mut tiles = BTreeMap::new();
    for row in kernels.into_values() {
        merge(&mut tiles, KernelRow { kernel: tile(&row.kernel), ..row });
    }
    tiles.into_values().collect()
}

/// Adds `new` to the row of its identity.
fn merge(rows: &mut BTreeMap<String, KernelRow>, new: KernelRow) {
    let Some(row) = rows.get_mut(&new.kernel) else {
        rows.insert(new.kernel.clone(), new);
        return;
    };
    row.kernels += new.kernels;
    row.earning += new.earning;
    row.offered += new.offered;
    row.chosen += new.chosen;
    row.alone += new.alone;
    row.nearest = row.nearest.min(new.nearest);
}

/// Identity of a tile: that of a kernel without its weight format, and
/// without what depends on the format.
fn tile(kernel: &str) -> String {
    const OF_TILE: [&str; 5] = ["main_loop=", "x=", "n=", "m=", "cluster="];
    let (head, keys) = kernel.rsplit_once(':').unwrap_or(("", kernel));
    let kept: Vec<&str> = keys.split(',').filter(|key| OF_TILE.iter().any(|of| key.starts_with(of))).collect();
    format!("{head}:{}", kept.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_is_that_of_all_weight_formats() {
        let kernel = |w, k| format!("gemm:gemm:sm80:main_loop=gemm_sliced_k,w={w},x=f16,n=64,m=8,k={k},threads=256");
        let of_q4_0 = tile(&kernel("q4_0", 64));
        assert_eq!(of_q4_0, "gemm:gemm:sm80:main_loop=gemm_sliced_k,x=f16,n=64,m=8");
        assert_eq!(of_q4_0, tile(&kernel("q4_k", 256)));
    }
}
