//! `qgemm verify`: checks kernels against the f64 oracle.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use qgemm_api::{Context, MatmulLayout, NormKind, XFormat, emu};
use qgemm_testkit::{Failure, Outcome, Selection, Suite, TestCase, Verdict};
use rayon::prelude::*;
use serde::Serialize;

use crate::choice::{self, FormatChoice, Sizes};
use crate::counters;
use crate::holds::Holds;
use crate::operations::Op;
use crate::out::{self, Printing};
use crate::progress::Progress;
use crate::provenance::Provenance;
use crate::stress::{self, Draw};
use crate::table::{self, Column, Row, Table, numbers, words};

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Device to verify: cpu, cuda:0, wgpu:0, or auto (the best available).
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// The operation.
    #[arg(long, value_enum, default_value_t = Op::Gemm)]
    pub op: Op,
    /// List operations and the groups of their suites, and run
    /// nothing.
    #[arg(long)]
    pub list: bool,
    /// Weight format, or `all`.
    #[arg(long, default_value = "all")]
    pub format: FormatChoice,
    /// Verify these shapes with every element type, instead of the
    /// conformance suite.
    /// The help of `--op` has the sizes of each operation.
    #[arg(long, value_name = "SIZES", num_args = 1..)]
    pub shape: Vec<Sizes>,
    /// matmul: storage order of A and B, nn, nt, tn or tt (default:
    /// every order).
    #[arg(long, requires = "shape")]
    pub layout: Option<MatmulLayout>,
    /// matmul: number of products.
    #[arg(long, default_value_t = 1, requires = "shape")]
    pub batch: usize,
    /// gemm, experts: normalize X first (rms or layer).
    #[arg(long, requires = "shape")]
    pub norm: Option<NormKind>,
    /// Only this group of the suite (shapes_plain, exact, values,
    /// epilogue, …).
    #[arg(long, conflicts_with = "shape")]
    pub group: Option<String>,
    /// Only this kernel family; cases that it does not support are
    /// skipped.
    #[arg(long)]
    pub family: Option<String>,
    /// quantize, norm: only results in this format. gemm, experts: X
    /// is given in this format; with --norm, X is normalized to it
    /// (q8_0, q8_256, q8_1, int8_token, e4m3_token, e4m3_1x128,
    /// e4m3_tensor, mxfp8, mxfp4, nvfp4).
    #[arg(long)]
    pub x_format: Option<XFormat>,
    /// Run random cases for this many seconds instead. On a GPU at
    /// most a third of that goes to new kernels, which may need
    /// compiling.
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["shape", "group"])]
    pub stress: Option<u64>,
    /// First seed of the random cases; each next case adds one. A
    /// failure names its seed. To repeat it, use `--stress 0`, which
    /// runs one case.
    #[arg(long, requires = "stress")]
    pub seed: Option<u64>,
    /// Print only cases that fail.
    #[arg(long)]
    pub failures: bool,
    /// On an emulated device (emu:sm75): also print each kernel's
    /// shared and global memory traffic against the minimum, its MMA
    /// instructions and barriers, and the costliest accesses.
    #[arg(long)]
    pub counters: bool,
}

#[derive(Serialize)]
struct CaseRow {
    case: String,
    device: String,
    kernel: Option<String>,
    kernel_id: Option<String>,
    nmse: Option<f64>,
    worst_tile: Option<f64>,
    limit: Option<f64>,
    /// Error from rounding f32 activations, if the kernel rounds
    /// them.
    rounding_loss: Option<f64>,
    verdict: &'static str,
    detail: Option<String>,
    #[serde(flatten)]
    provenance: Provenance,
}

impl CaseRow {
    fn new(outcome: &Outcome, (device, provenance): &(String, Provenance)) -> Self {
        let (verdict, detail) = match &outcome.verdict {
            Verdict::Pass => ("pass", None),
            Verdict::Skip(reason) => ("skip", Some((*reason).to_owned())),
            Verdict::Fail(failure) => ("FAIL", Some(failure.to_string())),
        };
        CaseRow {
            case: outcome.case.clone(),
            device: device.clone(),
            kernel: outcome.kernel.clone(),
            kernel_id: outcome.kernel_id.map(|id| id.to_string()),
            nmse: outcome.comparison.map(|c| c.nmse),
            worst_tile: outcome.comparison.map(|c| c.worst_tile),
            limit: outcome.limit,
            rounding_loss: outcome.rounding_loss,
            verdict,
            detail,
            provenance: provenance.clone(),
        }
    }
}

impl Row for CaseRow {
    const COLUMNS: &'static [Column] = &[
        words("case", 64),
        numbers("nmse", 8),
        numbers("worst", 8),
        numbers("limit", 8),
        words("", 4),
        words("kernel", 100),
        words("", 0),
    ];

    fn cells(&self) -> Vec<String> {
        let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |v| format!("{v:.1e}"));
        let loss = self.rounding_loss.map(|loss| format!("rounding X costs {loss:.1e}"));
        vec![
            self.case.clone(),
            number(self.nmse),
            number(self.worst_tile),
            number(self.limit),
            self.verdict.to_owned(),
            self.kernel_id.clone().unwrap_or_else(|| "-".into()),
            self.detail.clone().or(loss).unwrap_or_default(),
        ]
    }
}

/// A group of a suite.
#[derive(Serialize)]
struct GroupRow {
    op: &'static str,
    group: &'static str,
    summary: &'static str,
}

impl Row for GroupRow {
    const COLUMNS: &'static [Column] = &[words("op", 8), words("group", 20), words("cases", 0)];

    fn cells(&self) -> Vec<String> {
        [self.op, self.group, self.summary].map(str::to_owned).to_vec()
    }
}

/// Runs the command.
///
/// # Errors
/// When the device fails to open, or an option does not apply.
pub fn run(args: &Args, printing: Printing) -> anyhow::Result<Holds> {
    if args.list {
        table::print(groups(), printing)?;
        return Ok(Holds::Yes);
    }
    if args.op == Op::Convert {
        ensure!(args.format == FormatChoice::All && args.family.is_none(), "convert has neither --format nor --family");
    }
    choice::check_x_format(args.op, args.x_format)?;
    choice::check_norm(args.op, args.norm)?;
    let ctx = Context::open(&args.device)?;
    let family = match &args.family {
        None => None,
        Some(name) => Some(family(&ctx, name)?),
    };
    if args.counters {
        emu::count_accesses(&ctx).context("--counters")?;
    }
    if printing.is_text() {
        out::line(&format!("{} ({})", ctx.info().name, ctx.info().id))?;
    }
    let wanted = Selection { formats: args.format.formats(), family, x_format: args.x_format };
    let mut report = Report {
        table: Table::new(printing),
        only_failures: args.failures,
        only_served: family.is_some(),
        counts: Counts::default(),
        unprinted: None,
        origin: (ctx.info().name.clone(), Provenance::now(ctx.info())),
    };
    match args.stress {
        Some(seconds) => {
            let suite = args.op.suite()?;
            let draw = Draw { suite, wanted: &wanted, again: cases_argument(args) };
            stress::run(&ctx, &draw, args.seed, Duration::from_secs(seconds), &mut report);
        }
        None => run_all(&ctx, &cases(args, &wanted)?, args.shape.is_empty(), &mut report),
    }
    let Report { table, counts, unprinted, .. } = report;
    unprinted.map_or(Ok(()), Err)?;
    let kernels = if args.counters { Some(counters::rows(emu::take_counters(&ctx)?)) } else { None };
    match (printing, kernels) {
        (Printing::Json, Some(kernels)) => {
            let both = serde_json::json!({ "cases": table.into_rows(), "kernels": kernels });
            out::json(&both)?;
        }
        (_, kernels) => {
            table.finish()?;
            if printing.is_text() {
                let Counts { passed, failed, skipped } = counts;
                out::line(&format!("{passed} passed, {failed} failed, {skipped} skipped"))?;
            }
            kernels.map_or(Ok(()), |kernels| counters::print(kernels, printing))?;
        }
    }
    ensure!(counts.passed + counts.failed + counts.skipped > 0, "no case was run");
    Ok(if counts.failed == 0 { Holds::Yes } else { Holds::No })
}

/// Every group of every operation.
fn groups() -> Vec<GroupRow> {
    let of = |suite: &&'static dyn Suite| {
        let op = suite.operation();
        suite.groups().into_iter().map(move |group| GroupRow { op, group: group.name, summary: group.summary })
    };
    qgemm_testkit::SUITES.iter().flat_map(of).collect()
}

/// The cases of the options.
fn cases(args: &Args, wanted: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    match (args.shape.is_empty(), args.op) {
        (true, op) => groups_of(op.suite()?, args.group.as_deref(), wanted),
        (false, op) => op.cases(args, wanted),
    }
}

/// The cases of one group, or of all.
fn groups_of(suite: &dyn Suite, group: Option<&str>, wanted: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    let names: Vec<&str> = suite.groups().iter().map(|group| group.name).collect();
    if let Some(name) = group {
        let known = || format!("no group of {} is called `{name}`: there are {}", suite.operation(), names.join(", "));
        ensure!(names.contains(&name), known());
    }
    let chosen = names.into_iter().filter(|name| group.is_none_or(|group| group == *name));
    Ok(chosen.flat_map(|name| suite.cases(name, wanted)).collect())
}

/// Runs known cases and reports them in order. Small cases run in
/// parallel.
fn run_all(ctx: &Context, cases: &[Box<dyn TestCase>], small: bool, report: &mut Report) {
    let progress = Progress::new(cases.len() as u64, "verifying");
    for part in cases.chunks(if small { 64 } else { 1 }) {
        progress.say(part[0].to_string());
        let outcomes: Vec<Outcome> = part.par_iter().map(|case| case.run(ctx)).collect();
        for outcome in outcomes {
            report.add(&outcome, None, &progress);
        }
        progress.step(part.len() as u64);
        if report.is_closed() {
            break;
        }
    }
}

/// Source of random cases.
fn cases_argument(args: &Args) -> String {
    match (args.op, args.format) {
        (Op::Gemm, FormatChoice::All) => "--format all".to_owned(),
        (Op::Gemm, FormatChoice::One(format)) => format!("--format {format}"),
        (Op::Experts, FormatChoice::One(format)) => format!("--op experts --format {format}"),
        (op, _) => format!("--op {}", op.name()),
    }
}

/// The device's name of a family.
fn family(ctx: &Context, name: &str) -> anyhow::Result<&'static str> {
    let names: Vec<&'static str> = ctx.device().catalog().gemm.iter().map(|family| family.name()).collect();
    let found = names.iter().find(|known| **known == name).copied();
    found.with_context(|| format!("{} has no kernel family `{name}`: it has {}", ctx.info().id, names.join(", ")))
}

#[derive(Default)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

/// Printer and counter of outcomes.
pub struct Report {
    table: Table<CaseRow>,
    only_failures: bool,
    /// Whether cases without a kernel are skipped.
    only_served: bool,
    counts: Counts,
    /// The device, and how its cases are run.
    origin: (String, Provenance),
    /// Error of printing a row. Later rows are not printed.
    unprinted: Option<anyhow::Error>,
}

impl Report {
    /// Whether printing has failed.
    pub fn is_closed(&self) -> bool {
        self.unprinted.is_some()
    }

    /// Counts an outcome and prints its row. `again`: the options
    /// that repeat the case.
    pub fn add(&mut self, outcome: &Outcome, again: Option<String>, progress: &Progress) {
        let not_served = matches!(outcome.verdict, Verdict::Fail(Failure::NotPlanned(_)));
        if self.only_served && not_served {
            return;
        }
        let counter = match outcome.verdict {
            Verdict::Pass => &mut self.counts.passed,
            Verdict::Skip(_) => &mut self.counts.skipped,
            Verdict::Fail(_) => &mut self.counts.failed,
        };
        *counter += 1;
        let failed = matches!(outcome.verdict, Verdict::Fail(_));
        let mut row = CaseRow::new(outcome, &self.origin);
        if let (true, Some(again), Some(detail)) = (failed, again, &mut row.detail) {
            detail.push_str(&format!(" (again: {again})"));
        }
        if failed || !self.only_failures {
            let printed = self.table.push(row, progress);
            self.unprinted = self.unprinted.take().or(printed.err());
        }
    }
}
