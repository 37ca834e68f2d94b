//! `qgemm prepare`: compiles and loads the kernels of a model's
//! products into the cache.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use qgemm_api::{Context, DType, PrepareLimits, Problem, XPrecision};
use serde::Serialize;

use crate::bench::subject;
use crate::choice::{self, FormatChoice, Sizes};
use crate::holds::Holds;
use crate::opening::Opening;
use crate::out::{self, Printing};
use crate::progress::Progress;
use crate::table::{self, Column, Row, numbers, words};

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Prepare the products of this model.
    model: Option<PathBuf>,
    #[command(flatten)]
    opening: Opening,
    /// Device: cpu, cuda:0, wgpu:0, or auto (the best available).
    #[arg(long, default_value = "auto")]
    device: String,
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
    /// Start no more kernels after this time, such as 2s, 500ms or
    /// 3m.
    #[arg(long, value_parser = choice::duration)]
    budget: Option<Duration>,
    /// Megabytes of host memory for kernels that compile in parallel.
    #[arg(long, value_name = "MB")]
    memory: Option<usize>,
}

#[derive(Serialize)]
struct PrepareRow {
    shape: String,
    format: String,
    kernel_id: String,
    /// Time to plan it now.
    plan_microseconds: f64,
}

impl Row for PrepareRow {
    const COLUMNS: &'static [Column] =
        &[words("shape", 18), words("format", 14), numbers("plan us", 10), words("kernel", 0)];

    fn cells(&self) -> Vec<String> {
        let time = format!("{:.1}", self.plan_microseconds);
        vec![self.shape.clone(), self.format.clone(), time, self.kernel_id.clone()]
    }
}

/// Runs the command.
///
/// # Errors
/// When the device or the model fails, or a problem has no plan.
pub fn run(args: &Args, printing: Printing) -> anyhow::Result<Holds> {
    let subjects = subject::chosen(args.model.as_deref(), args.opening, &args.shape, args.format)?;
    let start = Instant::now();
    let ctx = Context::open(&args.device)?;
    let opened = start.elapsed();
    let problem = |subject: &subject::Subject| -> anyhow::Result<Problem> {
        let weight = ctx.describe_weight(subject.format(), subject.shape.n, subject.shape.k)?;
        Ok(weight.problem(subject.shape.m).x_dtype(args.x_dtype).x_precision(args.x_precision))
    };
    let problems = subjects.iter().map(problem).collect::<anyhow::Result<Vec<_>>>()?;
    let progress = Progress::new(problems.len() as u64, "preparing");
    let start = Instant::now();
    let limits = args.budget.iter().fold(PrepareLimits::default(), |limits, &time| limits.time(time));
    let limits = args.memory.iter().fold(limits, |limits, mb| limits.memory(mb.saturating_mul(1 << 20)));
    let prepared = ctx.prepare_within(&problems, limits, |_| progress.step(1))?;
    let seconds = start.elapsed().as_secs_f64();
    drop(progress);
    let mut rows = Vec::new();
    for (subject, problem) in subjects.iter().zip(&problems).take(prepared) {
        let start = Instant::now();
        let plan = ctx.plan(problem)?;
        rows.push(PrepareRow {
            shape: subject.shape.to_string(),
            format: subject.format().to_string(),
            kernel_id: plan.kernel_id().map_or_else(|| "-".into(), |id| id.to_string()),
            plan_microseconds: start.elapsed().as_secs_f64() * 1e6,
        });
    }
    table::print(rows, printing)?;
    if printing.is_text() {
        out::line(&format!(
            "{prepared} of {} problems in {seconds:.3} s, the device opened in {:.3} s",
            problems.len(),
            opened.as_secs_f64()
        ))?;
    }
    Ok(Holds::Yes)
}
