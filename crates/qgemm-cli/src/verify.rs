//! `qgemm verify`: kernels against the f64 oracle.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, ensure};
use qgemm_api::{Context, DType, Format, emu};
use qgemm_testkit::{Case, Failure, GROUPS, Outcome, Verdict, WeightKind, group, random_case, run as run_case};
use rayon::prelude::*;
use serde::Serialize;

use crate::Holds;
use crate::choice::{FormatChoice, Shape};
use crate::counters;
use crate::progress::Progress;
use crate::table::{Column, Row, Table, numbers, words};

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Device to verify: cpu, cuda:0, wgpu:0, or auto for the best there is.
    #[arg(long, default_value = "auto")]
    device: String,
    /// Weight format, or `all`.
    #[arg(long, default_value = "all")]
    format: FormatChoice,
    /// Verify these shapes (tokens x output features x input features) instead of the conformance suite, with
    /// every type of activations.
    #[arg(long, value_name = "MxNxK", num_args = 1..)]
    shape: Vec<Shape>,
    /// Only this group of the suite (shapes_plain, exact, values, epilogue, …).
    #[arg(long, conflicts_with = "shape")]
    group: Option<String>,
    /// Only this kernel family; what it does not serve is left out.
    #[arg(long)]
    family: Option<String>,
    /// Run random cases for this many seconds instead.
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["shape", "group"])]
    stress: Option<u64>,
    /// First seed of the random cases; each following case adds one. A failure names the seed that repeats it.
    #[arg(long, requires = "stress")]
    seed: Option<u64>,
    /// Print only cases that fail.
    #[arg(long)]
    failures: bool,
    /// On an emulated device (emu:sm75), also print what each kernel asked of shared and global memory against the
    /// least that would do, its matrix instructions and barriers, and the places with most to gain.
    #[arg(long)]
    counters: bool,
}

#[derive(Serialize)]
struct CaseRow {
    case: String,
    kernel: Option<String>,
    nmse: Option<f64>,
    worst_tile: Option<f64>,
    limit: Option<f64>,
    /// What rounding f32 activations cost, where the kernel rounds them.
    rounding_loss: Option<f64>,
    verdict: &'static str,
    detail: Option<String>,
}

impl From<&Outcome> for CaseRow {
    fn from(outcome: &Outcome) -> Self {
        let (verdict, detail) = match &outcome.verdict {
            Verdict::Pass => ("pass", None),
            Verdict::Skip(reason) => ("skip", Some((*reason).to_owned())),
            Verdict::Fail(failure) => ("FAIL", Some(failure.to_string())),
        };
        CaseRow {
            case: outcome.case.to_string(),
            kernel: outcome.kernel.clone(),
            nmse: outcome.comparison.map(|c| c.nmse),
            worst_tile: outcome.comparison.map(|c| c.worst_tile),
            limit: outcome.limit,
            rounding_loss: outcome.rounding_loss,
            verdict,
            detail,
        }
    }
}

impl Row for CaseRow {
    const COLUMNS: &'static [Column] = &[
        words("case", 64),
        words("kernel", 32),
        numbers("nmse", 8),
        numbers("worst", 8),
        numbers("limit", 8),
        words("", 4),
        words("", 0),
    ];

    fn cells(&self) -> Vec<String> {
        let number = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |v| format!("{v:.1e}"));
        let loss = self.rounding_loss.map(|loss| format!("rounding X costs {loss:.1e}"));
        vec![
            self.case.clone(),
            self.kernel.clone().unwrap_or_else(|| "-".into()),
            number(self.nmse),
            number(self.worst_tile),
            number(self.limit),
            self.verdict.to_owned(),
            self.detail.clone().or(loss).unwrap_or_default(),
        ]
    }
}

/// Runs the command.
///
/// # Errors
/// When the device fails to open or an option makes no sense.
pub fn run(args: &Args, json: bool) -> anyhow::Result<Holds> {
    let ctx = Context::open(&args.device)?;
    let family = match &args.family {
        None => None,
        Some(name) => Some(family(&ctx, name)?),
    };
    if args.counters {
        emu::count_accesses(&ctx).context("--counters")?;
    }
    if !json {
        println!("{} ({})", ctx.info().name, ctx.info().id);
    }
    let mut report = Report { table: Table::new(json), only_failures: args.failures, counts: Counts::default() };
    match args.stress {
        Some(seconds) => stress(&ctx, args, family, Duration::from_secs(seconds), &mut report),
        None => {
            let cases = cases(args)?.into_iter().map(|case| Case { family, ..case }).collect();
            suite(&ctx, cases, args.shape.is_empty(), &mut report);
        }
    }
    let Report { table, counts, .. } = report;
    let kernels = if args.counters { Some(counters::rows(emu::take_counters(&ctx)?)) } else { None };
    match (json, kernels) {
        (true, Some(kernels)) => {
            let both = serde_json::json!({ "cases": table.into_rows(), "kernels": kernels });
            println!("{}", serde_json::to_string_pretty(&both)?);
        }
        (true, None) => table.finish().map(drop)?,
        (false, kernels) => {
            println!("{} passed, {} failed, {} skipped", counts.passed, counts.failed, counts.skipped);
            kernels.map_or(Ok(()), counters::print)?;
        }
    }
    ensure!(counts.passed + counts.failed + counts.skipped > 0, "no case was run");
    Ok(if counts.failed == 0 { Holds::Yes } else { Holds::No })
}

/// The cases that the options ask for.
fn cases(args: &Args) -> anyhow::Result<Vec<Case>> {
    let formats = args.format.formats();
    if !args.shape.is_empty() {
        return shapes(args, &formats);
    }
    let groups = match &args.group {
        None => GROUPS.to_vec(),
        Some(name) => {
            let names: Vec<&str> = GROUPS.iter().map(|g| g.name).collect();
            vec![*group(name).with_context(|| format!("no group is called `{name}`: there are {}", names.join(", ")))?]
        }
    };
    Ok(formats.iter().flat_map(|&format| groups.iter().flat_map(move |g| (g.cases)(format))).collect())
}

/// Each shape with every format that can store it. A format asked for by name that cannot is an error.
fn shapes(args: &Args, formats: &[Format]) -> anyhow::Result<Vec<Case>> {
    let mut cases = Vec::new();
    for shape in &args.shape {
        for &format in formats {
            if let Err(error) = format.check_k(shape.k) {
                ensure!(args.format == FormatChoice::All, "{shape}: {error}");
                eprintln!("left out: {error}");
                continue;
            }
            let case = Case::new(format, shape.m, shape.n, shape.k);
            cases.extend(DType::ALL.map(|x_dtype| Case { x_dtype, weights: WeightKind::Raw, ..case }));
        }
    }
    Ok(cases)
}

/// Runs known cases and reports them in order. Small ones run side by side.
fn suite(ctx: &Context, cases: Vec<Case>, small: bool, report: &mut Report) {
    let progress = Progress::new(cases.len() as u64, "verifying");
    for part in cases.chunks(if small { 64 } else { 1 }) {
        progress.say(part[0].format.to_string());
        let outcomes: Vec<Outcome> = part.par_iter().map(|case| run_case(ctx, case)).collect();
        for outcome in outcomes {
            report.add(&outcome, None, &progress);
        }
        progress.step(part.len() as u64);
    }
}

/// Runs random cases until the time is over; at least one.
fn stress(ctx: &Context, args: &Args, family: Option<&'static str>, time: Duration, report: &mut Report) {
    let formats = args.format.formats();
    let first = args.seed.unwrap_or_else(seed_of_now);
    eprintln!("random cases from seed {first}");
    let progress = Progress::new(time.as_secs(), "stress, seconds");
    let start = Instant::now();
    for seed in first.. {
        let case = Case { family, ..random_case(&formats, seed) };
        progress.say(format!("seed {seed}"));
        let again = format!("--format {} --stress 0 --seed {seed}", formats_argument(args.format));
        report.add(&run_case(ctx, &case), Some(again), &progress);
        progress.step(start.elapsed().as_secs().saturating_sub(progress.position()));
        if start.elapsed() >= time {
            break;
        }
    }
}

/// The case of a seed depends on the formats it was picked from.
fn formats_argument(choice: FormatChoice) -> String {
    match choice {
        FormatChoice::All => "all".to_owned(),
        FormatChoice::One(format) => format.to_string(),
    }
}

/// A seed that differs from run to run; small, because it is to be typed.
fn seed_of_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_millis() as u64 % 1_000_000_000)
}

/// The device's own name of a family.
fn family(ctx: &Context, name: &str) -> anyhow::Result<&'static str> {
    let names: Vec<&'static str> = ctx.device().families().iter().map(|family| family.name()).collect();
    let found = names.iter().find(|known| **known == name).copied();
    found.with_context(|| format!("{} has no kernel family `{name}`: it has {}", ctx.info().id, names.join(", ")))
}

#[derive(Default)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

struct Report {
    table: Table<CaseRow>,
    only_failures: bool,
    counts: Counts,
}

impl Report {
    /// Counts an outcome and prints its row. `again` are the options that repeat it.
    fn add(&mut self, outcome: &Outcome, again: Option<String>, progress: &Progress) {
        let not_served = matches!(outcome.verdict, Verdict::Fail(Failure::NotPlanned(_)));
        if outcome.case.family.is_some() && not_served {
            return;
        }
        let counter = match outcome.verdict {
            Verdict::Pass => &mut self.counts.passed,
            Verdict::Skip(_) => &mut self.counts.skipped,
            Verdict::Fail(_) => &mut self.counts.failed,
        };
        *counter += 1;
        let failed = matches!(outcome.verdict, Verdict::Fail(_));
        let mut row = CaseRow::from(outcome);
        if let (true, Some(again), Some(detail)) = (failed, again, &mut row.detail) {
            detail.push_str(&format!(" (again: {again})"));
        }
        if failed || !self.only_failures {
            self.table.push(row, progress);
        }
    }
}
