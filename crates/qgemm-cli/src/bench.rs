//! `qgemm bench`: what kernels reach on a device, and whether they got slower.

mod baseline;
mod cliffs;
pub mod subject;
mod sweep;
mod timing;
mod tokens;

use std::fs;
use std::path::PathBuf;

use anyhow::Context as _;
use qgemm_api::{Args as RunArgs, Buffer, Context, DType, DeviceKind, Plan, TunedTable, Weight, XRounding};
use serde::{Deserialize, Serialize};

use crate::Holds;
use crate::choice::{self, FormatChoice, Shape};
use crate::progress::Progress;
use crate::table::{Column, Row, Table, numbers, words};
use baseline::Baseline;
use subject::Subject;
use timing::{Pace, Timing, time_launches};
use tokens::Tokens;

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Benchmark the weights of this model instead of made-up ones.
    model: Option<PathBuf>,
    /// Device: cpu, cuda:0, wgpu:0, or auto for the best there is.
    #[arg(long, default_value = "auto")]
    device: String,
    /// Weight format, or `all`. For a model's unquantized weights: the format to quantize them to.
    #[arg(long)]
    format: Option<FormatChoice>,
    /// Shapes, as tokens x output features x input features; with a model only the tokens count, with a sweep all but
    /// the tokens.
    #[arg(long, value_name = "MxNxK", num_args = 1.., default_values = ["1x4096x4096", "8x4096x4096", "512x4096x4096"])]
    shape: Vec<Shape>,
    /// Type of the activations and of the output.
    #[arg(long, default_value = "f16")]
    x_dtype: DType,
    /// How far activations may be rounded: exact, f16, bf16, or int8.
    #[arg(long, default_value = "int8", value_parser = choice::x_rounding)]
    x_rounding: XRounding,
    /// Only this kernel family.
    #[arg(long)]
    family: Option<String>,
    /// Measure every one of these numbers of tokens, such as `1..256` or `1..64,80..256/16`, and fail where a number
    /// takes longer than a larger one, or one token more costs more than a tile of tokens.
    #[arg(long, value_name = "TOKENS", conflicts_with_all = ["model", "baseline", "save"])]
    sweep_m: Option<Tokens>,
    /// In a sweep, measure all configurations that should take at most so many times as long as the best.
    #[arg(long, value_name = "TIMES", requires = "sweep_m", num_args = 0..=1, default_missing_value = "3")]
    all_configs: Option<f64>,
    /// Take the configurations measured in this file where they are known.
    #[arg(long, value_name = "FILE")]
    tuned: Option<PathBuf>,
    /// In a sweep over all configurations, save the best to this file, for `--tuned` and `Context::with_tuned`.
    #[arg(long, value_name = "FILE", requires = "all_configs")]
    save_tuned: Option<PathBuf>,
    /// Compare with the results in this file, and fail where one is slower beyond the noise.
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Save the results to this file, for a later `--baseline`.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
}

/// One measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BenchRow {
    device: String,
    shape: String,
    format: String,
    x_dtype: String,
    kernel: String,
    /// Median time of a launch.
    microseconds: f64,
    /// Half the distance between the quartiles, as a share of the median.
    noise: f64,
    /// Bytes moved at least, over the time.
    bytes_per_second: f64,
    /// Two operations a multiply-add, over the time.
    flops: f64,
    /// Share of the device's read bandwidth.
    bandwidth_share: f64,
    /// Copies of the weight that launches took in turn.
    copies: usize,
    /// Whether launches were replayed from a CUDA graph.
    graph: bool,
    /// How much slower than the baseline, as a share: 0.1 is 10 % slower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slower: Option<f64>,
    /// Whether that is beyond the noise.
    #[serde(default)]
    regressed: bool,
}

impl Row for BenchRow {
    const COLUMNS: &'static [Column] = &[
        words("shape", 18),
        words("format", 18),
        words("kernel", 32),
        numbers("time us", 10),
        numbers("noise", 6),
        numbers("GB/s", 8),
        numbers("TFLOP/s", 8),
        numbers("of read", 7),
        numbers("copies", 6),
        words("against baseline", 0),
    ];

    fn cells(&self) -> Vec<String> {
        let percent = |share: f64| format!("{:.1}%", share * 100.0);
        let against = self.slower.map(|slower| {
            let mark = if self.regressed { "  REGRESSION" } else { "" };
            format!("{:+.1}%{mark}", slower * 100.0)
        });
        vec![
            self.shape.clone(),
            self.format.clone(),
            self.kernel.clone(),
            format!("{:.2}", self.microseconds),
            percent(self.noise),
            format!("{:.1}", self.bytes_per_second / 1e9),
            format!("{:.3}", self.flops / 1e12),
            percent(self.bandwidth_share),
            self.copies.to_string(),
            against.unwrap_or_default(),
        ]
    }
}

/// Runs the command.
///
/// # Errors
/// When the device, the model or a file fails, or no kernel serves a shape.
pub fn run(args: &Args, json: bool) -> anyhow::Result<Holds> {
    let mut ctx = Context::open(&args.device)?;
    if let Some(path) = &args.tuned {
        let text = fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
        ctx = ctx.with_tuned(TunedTable::from_json(&text).with_context(|| path.display().to_string())?);
    }
    let baseline = args.baseline.as_deref().map(Baseline::read).transpose()?;
    let subjects = match &args.model {
        Some(path) => subject::from_model(path, &args.shape, args.format)?,
        None => subject::made_up(&args.shape, args.format)?,
    };
    if let Some(Tokens(tokens)) = &args.sweep_m {
        return sweep::run(&ctx, args, tokens, &subjects, json);
    }
    let bandwidth = read_bandwidth(&ctx)?;
    if !json {
        println!("{} ({}), reads {:.1} GB/s", ctx.info().name, ctx.info().id, bandwidth / 1e9);
    }
    let progress = Progress::new(subjects.len() as u64, "measuring");
    let mut table = Table::new(json);
    for subject in &subjects {
        progress.say(subject.to_string());
        let mut row = measure(&ctx, args, subject, bandwidth)?;
        if let Some(baseline) = &baseline {
            baseline.judge(&mut row);
        }
        table.push(row, &progress);
        progress.step(1);
    }
    drop(progress);
    let rows = table.finish()?;
    if let Some(path) = &args.save {
        baseline::save(path, &rows)?;
    }
    let regressions = rows.iter().filter(|row| row.regressed).count();
    if baseline.is_some() && !json {
        let missing = rows.iter().filter(|row| row.slower.is_none()).count();
        println!("{regressions} regressions beyond the noise; {missing} results have no baseline");
    }
    Ok(if regressions == 0 { Holds::Yes } else { Holds::No })
}

fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let m = subject.shape.m;
    let bench = Bench::new(ctx, args.x_dtype, subject, m)?;
    let plan = ctx.plan(&args.problem(&bench.weights[0], m))?;
    let Timing { median, noise, graph } = bench.time(&plan, Pace::Thorough)?;
    let bytes_per_second = plan.bytes() / median;
    Ok(BenchRow {
        device: ctx.info().name.clone(),
        shape: subject.shape.to_string(),
        format: subject.format().to_string(),
        x_dtype: args.x_dtype.to_string(),
        kernel: plan.kernel_name().to_owned(),
        microseconds: median * 1e6,
        noise,
        bytes_per_second,
        flops: 2.0 * plan.macs() / median,
        bandwidth_share: bytes_per_second / bandwidth,
        copies: bench.weights.len(),
        graph,
        slower: None,
        regressed: false,
    })
}

/// A weight on the device, in copies, with activations and outputs.
struct Bench<'a> {
    ctx: &'a Context,
    weights: Vec<Weight>,
    x: Buffer,
    d_bytes: usize,
}

impl<'a> Bench<'a> {
    /// For up to `most` tokens.
    fn new(ctx: &'a Context, x_dtype: DType, subject: &Subject, most: usize) -> anyhow::Result<Self> {
        let Shape { n, k, .. } = subject.shape;
        let host = subject.weight()?;
        let first = ctx.load(&host)?;
        let count = copies(ctx, first.bytes());
        let mut weights = vec![first];
        while weights.len() < count {
            weights.push(ctx.load(&host)?);
        }
        let x = ctx.upload(&x_dtype.encode(&vec![0.5; most * k]))?;
        Ok(Self { ctx, weights, x, d_bytes: most * n * x_dtype.bytes() })
    }

    fn time(&self, plan: &Plan, pace: Pace) -> anyhow::Result<Timing> {
        let mut d = self.ctx.allocate(self.d_bytes)?;
        let mut workspace = self.ctx.workspace(plan.workspace_bytes())?;
        let stream = self.ctx.new_stream()?;
        let launch = |weight: &Weight| {
            let args =
                RunArgs { workspace: Some(&mut workspace), ..RunArgs::new((&self.x).into(), weight, (&mut d).into()) };
            plan.run(&stream, args)
        };
        Ok(time_launches(self.ctx, &stream, &self.weights, pace, launch)?)
    }
}

/// Least bytes that a processor reads from before it begins again. Its last cache may be shared by many, and reported
/// in part.
const HOST_BYTES: usize = 1 << 30;

/// So many copies of a weight of `bytes` bytes that none is still in the last-level cache when its turn comes.
fn copies(ctx: &Context, bytes: usize) -> usize {
    const CACHES: u64 = 2;
    const FEWEST: u64 = 2;
    const MOST: u64 = 512;
    let bytes = bytes as u64;
    // A device that does not tell its memory gets no bound from it.
    let in_memory = match ctx.info().memory_bytes {
        0 => MOST,
        memory => memory / 4 / bytes,
    };
    let host_bytes = if ctx.info().id.kind == DeviceKind::Cpu { HOST_BYTES as u64 } else { 0 };
    let beyond_cache = (CACHES * ctx.info().cache_bytes).max(host_bytes).div_ceil(bytes);
    beyond_cache.min(in_memory).clamp(FEWEST, MOST) as usize
}

/// Bytes a second that the device reads: measured now where it can be, else what the device says of itself.
fn read_bandwidth(ctx: &Context) -> anyhow::Result<f64> {
    const PROBE_BYTES: usize = 2 << 30;
    match ctx.info().id.kind {
        DeviceKind::Cuda => Ok(qgemm_api::cuda::read_bandwidth(&**ctx.device(), PROBE_BYTES)?),
        DeviceKind::Cpu => {
            let measured = qgemm_api::cpu::read_bandwidth(ctx.info().units as usize, HOST_BYTES);
            measured.context("no memory to measure the read bandwidth with")
        }
        _ => Ok(ctx.info().bandwidth),
    }
}
