//! `qgemm tune`: measures candidates within a budget, and keeps
//! the results.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use qgemm_api::tuning::{AvoidedKernel, KernelId};
use qgemm_api::{
    Activation, Budget, Context, DType, ExpertProblem, Experts, HostExperts, Matmul, Problem, TuneProblem, Tuning,
    Weight, XPrecision, read_tuned, tuned_table_path, update_tuned,
};
use serde::Serialize;

use crate::bench::subject::{self, Subject};
use crate::choice::{self, FormatChoice, Shape, Sizes};
use crate::holds::Holds;
use crate::opening::Opening;
use crate::operations::Op;
use crate::out::{self, Printing};
use crate::progress::Progress;
use crate::table::{self, Column, Row, numbers, words};
use crate::whole_file::{Existing, WholeFile};

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Tune the products of this model.
    model: Option<PathBuf>,
    #[command(flatten)]
    opening: Opening,
    /// Device: cpu, cuda:0, wgpu:0, or auto (the best available).
    #[arg(long, default_value = "auto")]
    device: String,
    /// Operation to tune: gemm, experts or matmul.
    #[arg(long, value_enum, default_value_t = Op::Gemm)]
    op: Op,
    /// experts: number of experts.
    #[arg(long, default_value_t = 32)]
    experts: usize,
    /// experts: experts per token (top-k).
    #[arg(long, default_value_t = 4)]
    top_k: usize,
    /// experts: gated pairs (SwiGLU) with N output features.
    #[arg(long)]
    gated: bool,
    /// Weight format, or `all`. A model's unquantized weights are
    /// quantized to it.
    #[arg(long)]
    format: Option<FormatChoice>,
    /// Shapes, as MxNxK (tokens x output features x input features);
    /// with a model only M counts.
    #[arg(long, value_name = "SIZES", num_args = 1..)]
    shape: Vec<Sizes>,
    /// Type of the activations and of the output.
    #[arg(long, default_value = "f16")]
    x_dtype: DType,
    /// Permitted rounding of activations: auto, exact, f16, bf16,
    /// tf32, bf16x3, int8, int8_token, e4m3, e4m3_token, mxfp8, mxfp4
    /// or nvfp4.
    #[arg(long, default_value_t)]
    x_precision: XPrecision,
    /// Total time limit, such as 2s, 500ms or 3m.
    #[arg(long, default_value = "10s", value_parser = choice::duration)]
    budget: Duration,
    /// Measure only candidates that should take at most this many
    /// times as long as the best.
    #[arg(long, default_value_t = 3.0)]
    within: f64,
    /// Table to add to (default: the table in the cache folder, which
    /// `Tuned::Auto` finds).
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// Import the measurements of another table, and measure nothing.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "shape", "export"])]
    import: Option<PathBuf>,
    /// Write the table to another file, and measure nothing.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "shape"])]
    export: Option<PathBuf>,
    /// Keep plans from using this kernel (as named by `qgemm
    /// explain`), and measure nothing.
    #[arg(long, value_name = "KERNEL_ID", requires = "why", conflicts_with_all = ["model", "shape", "import", "export"])]
    avoid: Option<KernelId>,
    /// The reason to avoid it.
    #[arg(long, value_name = "TEXT", requires = "avoid")]
    why: Option<String>,
    /// Only on devices of this name (as listed by `qgemm devices`).
    #[arg(long, value_name = "NAME", requires = "avoid")]
    on: Option<String>,
    /// Let plans use this kernel again, and measure nothing.
    #[arg(long, value_name = "KERNEL_ID", conflicts_with_all = ["model", "shape", "import", "export", "avoid"])]
    allow: Option<KernelId>,
}

#[derive(Serialize)]
struct TuneRow {
    shape: String,
    format: String,
    kernel_id: String,
    /// Median time of a launch.
    microseconds: f64,
    /// Slowdown of the cost model's choice relative to the best, if
    /// measured.
    gain: Option<f64>,
    measured: usize,
    dropped: usize,
    left_out: usize,
    /// Whether the budget was sufficient.
    complete: bool,
}

impl Row for TuneRow {
    const COLUMNS: &'static [Column] = &[
        words("shape", 18),
        words("format", 14),
        numbers("time us", 10),
        numbers("gain", 7),
        numbers("measured", 8),
        numbers("dropped", 7),
        numbers("left out", 8),
        words("", 11),
        words("kernel", 0),
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.shape.clone(),
            self.format.clone(),
            format!("{:.2}", self.microseconds),
            self.gain.map_or_else(|| "-".into(), |gain| format!("{:.1}%", gain * 100.0)),
            self.measured.to_string(),
            self.dropped.to_string(),
            self.left_out.to_string(),
            if self.complete { String::new() } else { "out of time".into() },
            self.kernel_id.clone(),
        ]
    }
}

/// Runs the command.
///
/// # Errors
/// When the device, the model or a file fails.
pub fn run(args: &Args, printing: Printing) -> anyhow::Result<Holds> {
    let path = match &args.table {
        Some(path) => path.clone(),
        None => tuned_table_path().context("there is no cache folder: name a file with --table")?,
    };
    let before = read_tuned(&path).with_context(|| path.display().to_string())?.unwrap_or_default();
    if let Some(other) = &args.import {
        return import(&path, other, printing);
    }
    if args.avoid.is_some() || args.allow.is_some() {
        return known_bad(&path, args, printing);
    }
    if let Some(other) = &args.export {
        WholeFile::create(other, Existing::Replace)?.finish_with(before.to_json()?.as_bytes())?;
        said(printing, &format!("{} measurements written to {}", before.len(), other.display()))?;
        return Ok(Holds::Yes);
    }
    let mut ctx = Context::open(&args.device)?.with_tuned(before.clone());
    let subjects = args.subjects()?;
    // First, so that an unwritable table does not waste the work.
    check_place(&path)?;
    let mut measured = before.clone();
    let (start, mut rows) = (Instant::now(), Vec::new());
    let progress = Progress::new(subjects.len() as u64, "tuning");
    for (place, subject) in subjects.iter().enumerate() {
        // Weights are loaded one by one, because they may not all fit.
        // Loading counts towards the budget.
        if start.elapsed() >= args.budget {
            break;
        }
        progress.say(subject.to_string());
        let rest = (subjects.len() - place) as u32;
        let share = args.budget.saturating_sub(start.elapsed()) / rest;
        let until = Instant::now() + share / 2;
        let (mut weights, mut experts) = (Vec::new(), Vec::new());
        match args.op {
            Op::Experts => {
                experts =
                    copies(&ctx, subject, &args.host_experts(subject)?, until, Context::load_experts, Experts::bytes)?
            }
            Op::Matmul => {}
            _ => weights = copies(&ctx, subject, &subject.weight()?, until, Context::load, Weight::bytes)?,
        }
        // At least one candidate is measured, however long loading took.
        let left = (args.budget.saturating_sub(start.elapsed()) / rest).max(LEAST);
        let mut budget = Budget::new(left);
        budget.within = args.within;
        let state = |problem: Problem| problem.x_dtype(args.x_dtype).x_precision(args.x_precision);
        let Shape { m, n, k } = subject.shape;
        let problem = match (args.op, weights.first(), experts.first()) {
            (Op::Experts, _, Some(first)) => {
                let of_each =
                    |problem: Problem| state(if args.gated { problem.activation(Activation::Silu) } else { problem });
                TuneProblem::experts(ExpertProblem::indexed(first, m, args.top_k).each(of_each), &experts)
            }
            (_, Some(first), _) => TuneProblem::new(state(Problem::new(first, m)), &weights),
            _ => {
                let product = Matmul::new([m, n, k], args.x_dtype, args.x_dtype, args.x_dtype);
                TuneProblem::Matmul(product.operand_precision(args.x_precision))
            }
        };
        let outcome = ctx.tune(&[problem], budget, |_| ())?;
        rows.extend(outcome.tunings.iter().map(|tuning| row(subject, tuning)));
        measured = outcome.table;
        ctx = ctx.with_tuned(measured.clone());
        progress.step(1);
    }
    drop(progress);
    let ((), table) = update_tuned(&path, |table| table.renew(measured.measured_since(&before)))?;
    let left = subjects.len() - rows.len();
    table::print(rows, printing)?;
    said(
        printing,
        &format!(
            "{:.1} s, {left} of {} problems not begun; {} measurements in {}",
            start.elapsed().as_secs_f64(),
            subjects.len(),
            table.len(),
            path.display()
        ),
    )?;
    Ok(Holds::Yes)
}

fn row(subject: &Subject, tuning: &Tuning) -> TuneRow {
    TuneRow {
        shape: subject.shape.to_string(),
        format: subject.format().to_string(),
        kernel_id: tuning.kernel_id.clone(),
        microseconds: tuning.seconds * 1e6,
        gain: Some(tuning.first_seconds / tuning.seconds - 1.0).filter(|gain| gain.is_finite()),
        measured: tuning.measured,
        dropped: tuning.dropped,
        left_out: tuning.left_out,
        complete: tuning.complete,
    }
}

fn import(path: &Path, other: &Path, printing: Printing) -> anyhow::Result<Holds> {
    let Some(found) = read_tuned(other).with_context(|| other.display().to_string())? else {
        bail!("{}: there is no such file", other.display());
    };
    check_place(path)?;
    let all = found.len();
    let (taken, table) = update_tuned(path, |table| table.merge(found))?;
    said(printing, &format!("{taken} of {all} measurements taken over; {} in {}", table.len(), path.display()))?;
    Ok(Holds::Yes)
}

/// Adds or removes an avoided kernel.
fn known_bad(path: &Path, args: &Args, printing: Printing) -> anyhow::Result<Holds> {
    check_place(path)?;
    let (is_allowed, table) = update_tuned(path, |table| {
        if let (Some(kernel), Some(why)) = (args.avoid, &args.why) {
            let kernel = AvoidedKernel::new(kernel, why);
            table.avoid(args.on.iter().fold(kernel, |kernel, name| kernel.on(name)));
        }
        args.allow.as_ref().is_none_or(|kernel| table.allow(kernel))
    })?;
    if let Some(kernel) = args.allow.as_ref().filter(|_| !is_allowed) {
        bail!("{kernel} is not avoided in {}", path.display());
    }
    said(printing, &format!("{} kernels are avoided, says {}", table.avoided().len(), path.display()))?;
    Ok(Holds::Yes)
}

/// Checks that a table can be written at `path`. Creates its
/// folder if missing.
fn check_place(path: &Path) -> anyhow::Result<()> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    WholeFile::create(path, Existing::Replace).map(drop)
}

/// Copies of a weight: as many as no cache holds, or as can be
/// loaded before `until`.
fn copies<H, W>(
    ctx: &Context,
    subject: &Subject,
    host: &H,
    until: Instant,
    load: impl Fn(&Context, &H) -> Result<W, qgemm_api::Error>,
    bytes: impl Fn(&W) -> usize,
) -> anyhow::Result<Vec<W>> {
    let first = load(ctx, host)?;
    let copies = ctx.copies_beyond_cache(bytes(&first));
    let mut weights = vec![first];
    while weights.len() < copies && Instant::now() < until {
        weights.push(load(ctx, host)?);
    }
    if weights.len() < copies {
        eprintln!("{subject}: {} of {copies} copies were loaded in its time; caches may help it", weights.len());
    }
    Ok(weights)
}

/// Least measuring time of a problem.
const LEAST: Duration = Duration::from_millis(1);

fn said(printing: Printing, line: &str) -> anyhow::Result<()> {
    if printing.is_text() { out::line(line) } else { Ok(()) }
}

impl Args {
    /// Experts with copies of a subject's weight.
    fn host_experts(&self, subject: &Subject) -> anyhow::Result<HostExperts> {
        let weight = subject.weight()?;
        Ok(match self.gated {
            true => HostExperts::gated(&vec![(weight.clone(), weight); self.experts])?,
            false => HostExperts::new(&vec![weight; self.experts])?,
        })
    }

    fn subjects(&self) -> anyhow::Result<Vec<Subject>> {
        ensure!(
            matches!(self.op, Op::Gemm | Op::Experts | Op::Matmul),
            "gemm, experts and matmul are tuned; {} is not",
            self.op.name()
        );
        ensure!(self.op == Op::Gemm || self.model.is_none(), "only the products of a model are tuned from its file");
        subject::chosen(self.model.as_deref(), self.opening, &self.shape, self.format)
    }
}
