//! `qgemm bench`: measures kernels, and compares with earlier
//! results.

mod attention;
pub mod baseline;
mod cliffs;
mod convert;
mod experts;
mod gemm;
mod gradient;
mod grid;
mod indexer;
mod kv_append;
mod matmul;
mod norm;
mod optimizer;
mod quantize;
mod routing;
pub mod subject;
mod sweep;
mod timing;
mod tokens;

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use qgemm_api::{
    Context, DType, DeviceKind, FactorFormat, KvFormat, MatmulLayout, NormKind, Profile, XFormat, XPrecision,
};
use serde::{Deserialize, Serialize};

use crate::choice::{self, FormatChoice, Op, Sizes};
use crate::holds::Holds;
use crate::measured;
use crate::opening::Opening;
use crate::out;
use crate::progress::Progress;
use crate::table::{Column, Row, Table, numbers, words};
use crate::whole_file::{Existing, WholeFile};
use baseline::Baseline;
use tokens::Tokens;

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Benchmark the weights of this model instead of random ones.
    model: Option<PathBuf>,
    #[command(flatten)]
    opening: Opening,
    /// Device: cpu, cuda:0, wgpu:0, or auto (the best available).
    #[arg(long, default_value = "auto")]
    device: String,
    /// The operation.
    #[arg(long, value_enum, default_value_t = Op::Gemm)]
    op: Op,
    /// Weight format, or `all`. A model's unquantized weights are
    /// quantized to it.
    #[arg(long)]
    format: Option<FormatChoice>,
    /// Shapes. gemm, experts (of each), gradient and matmul: MxNxK
    /// (tokens x output features x input features).
    /// convert, quantize and norm: RxC (rows x columns).
    /// routing: TxExK (tokens x experts x experts per token).
    /// attention: BxQxSxHxGxD (sequences x queries x keys of each x
    /// heads x KV heads x head dimension).
    /// optimizer: N (parameters).
    /// With a model only the tokens count, in a sweep all but the
    /// tokens.
    #[arg(long, value_name = "SIZES", num_args = 1..)]
    shape: Vec<Sizes>,
    /// Type of the activations and of the output.
    #[arg(long, default_value = "f16")]
    x_dtype: DType,
    /// Permitted rounding of activations: auto, exact, f16, bf16,
    /// tf32, bf16x3, int8, int8_token, e4m3, or e4m3_token.
    #[arg(long, default_value_t)]
    x_precision: XPrecision,
    /// gemm: normalize X first (rms or layer), with a gamma in X's
    /// type.
    #[arg(long)]
    norm: Option<NormKind>,
    /// gemm, experts: X is given quantized in this format. norm:
    /// format of the result. quantize: the format (default: all).
    #[arg(long)]
    x_format: Option<XFormat>,
    /// convert, norm: type of X (default: all types; norm: f16).
    #[arg(long)]
    from: Option<DType>,
    /// convert, norm: type of D (default: all types; norm: the type
    /// of X).
    #[arg(long)]
    to: Option<DType>,
    /// convert: X is stored as [columns, rows].
    #[arg(long)]
    transposed: bool,
    /// convert: gather the columns in reverse order.
    #[arg(long)]
    gathered: bool,
    /// convert to f16: rows have factors.
    #[arg(long)]
    row_factors: bool,
    /// experts: number of experts.
    #[arg(long, default_value_t = 32)]
    experts: usize,
    /// experts: experts per token (top-k).
    #[arg(long, default_value_t = 4)]
    top_k: usize,
    /// experts: how rows are assigned (default: every form).
    #[arg(long, value_enum)]
    form: Option<experts::Form>,
    /// experts: tokens are distributed by Zipf's law (expert r gets a
    /// share of 1/r), not evenly.
    #[arg(long)]
    zipf: bool,
    /// experts: tokens go to experts in turn, so that their rows
    /// differ by at most one.
    #[arg(long, conflicts_with = "zipf")]
    even: bool,
    /// experts: the index is ready before launch, so kernels may
    /// prefetch it.
    #[arg(long)]
    settled_index: bool,
    /// experts, matmul: run this candidate in the cost model's order
    /// (from 0), instead of the fastest.
    #[arg(long)]
    way: Option<usize>,
    /// matmul: storage order of A and B, nn, nt, tn or tt (default:
    /// every order).
    #[arg(long)]
    layout: Option<MatmulLayout>,
    /// matmul: type of A and B, f32, f16, bf16 or e4m3 (default:
    /// `--x-dtype`). `--x-dtype` is the type of D.
    #[arg(long)]
    factors: Option<FactorFormat>,
    /// matmul: number of products.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// matmul: this many products over equal ranges of K, dYᵀ·X, with D
    /// in f32.
    #[arg(long, conflicts_with_all = ["layout", "batch"])]
    groups: Option<usize>,
    /// gemm, experts, attention: only this kernel family.
    #[arg(long)]
    family: Option<String>,
    /// attention: keys and values are in pages of this many keys, in
    /// shuffled order.
    #[arg(long, value_name = "KEYS")]
    page_size: Option<NonZeroUsize>,
    /// attention: format of keys and values (default: `--x-dtype`
    /// and, for one query, every quantized format).
    #[arg(long, value_name = "FORMAT")]
    kv_format: Option<KvFormat>,
    /// attention: with a bit mask in device memory, all bits set.
    #[arg(long)]
    mask_bits: bool,
    /// Measure all of these token counts, such as `1..256` or
    /// `1..64,80..256/16`. Fails if one takes longer than a larger
    /// one, or if one more token costs more than a tile of tokens.
    #[arg(long, value_name = "TOKENS", conflicts_with_all = ["model", "baseline", "save"])]
    sweep_m: Option<Tokens>,
    /// In a sweep: also measure every config that should take at most
    /// this many times as long as the best.
    #[arg(long, value_name = "TIMES", requires = "sweep_m", num_args = 0..=1, default_missing_value = "3")]
    all_configs: Option<f64>,
    /// Measure all candidates of this many random problems, dense and
    /// with experts; problems are the same in every run. List
    /// plans more than 10 % slower than the best candidate. Fails
    /// if these are more than one in ten.
    #[arg(long, value_name = "PROBLEMS", conflicts_with_all = ["model", "shape", "sweep_m", "baseline", "save"])]
    grid: Option<usize>,
    /// Idle the device for this time before each measurement (such as
    /// 400ms), and keep the measurement short. A card that has worked
    /// for a while runs tensor-core kernels slower.
    #[arg(long, value_name = "TIME", value_parser = choice::duration, conflicts_with_all = ["grid", "sweep_m"])]
    rest: Option<std::time::Duration>,
    /// In a grid: time limit without weights, such as 500s or 9m.
    #[arg(long, default_value = "5m", requires = "grid", value_parser = choice::duration)]
    budget: std::time::Duration,
    /// In a grid: megabytes of the largest weights.
    #[arg(long, default_value_t = 1024, value_name = "MB", requires = "grid")]
    largest: usize,
    /// Use the measured configs of this table; `auto` is the table of
    /// `qgemm tune`.
    #[arg(long, value_name = "FILE")]
    tuned: Option<PathBuf>,
    /// In a sweep over all configs: add the best to this table, for
    /// `--tuned` and `Context::with_tuned`.
    #[arg(long, value_name = "FILE", requires = "all_configs")]
    save_tuned: Option<PathBuf>,
    /// Compare with the results in this file. Fails if one is slower
    /// beyond the noise.
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Save the results to this file, for a later `--baseline`.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Show the time of each kernel of a launch; with a file, also
    /// write a trace for Perfetto and chrome://tracing.
    #[arg(long, value_name = "FILE", num_args = 0..=1, conflicts_with_all = ["sweep_m"])]
    profile: Option<Option<PathBuf>>,
}

/// One measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BenchRow {
    device: String,
    shape: String,
    format: String,
    x_dtype: String,
    kernel: String,
    /// Identity of the kernel.
    #[serde(default)]
    kernel_id: Option<String>,
    /// Median time of a launch.
    #[serde(deserialize_with = "measured::time")]
    microseconds: f64,
    /// Half the interquartile range, relative to the median.
    #[serde(deserialize_with = "measured::share")]
    noise: f64,
    /// Minimum traffic over time.
    bytes_per_second: f64,
    /// Operations (two per multiply-add) over time.
    flops: f64,
    /// Share of the device's read bandwidth.
    bandwidth_share: f64,
    /// Copies of the weight that launches rotate through.
    copies: usize,
    /// Whether launches were replayed from a CUDA graph.
    graph: bool,
    /// Times of a launch's kernels, in order; only with `--profile`.
    #[serde(skip_deserializing, default, skip_serializing_if = "Option::is_none")]
    profile: Option<Profile>,
    /// Slowdown relative to the baseline: 0.1 is 10 % slower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slower: Option<f64>,
    /// Whether the slowdown exceeds the noise.
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
            if self.flops > 0.0 { format!("{:.3}", self.flops / 1e12) } else { "-".to_owned() },
            percent(self.bandwidth_share),
            self.copies.to_string(),
            against.unwrap_or_default(),
        ]
    }
}

/// Runs the command.
///
/// # Errors
/// When the device, the model or a file fails, or no kernel
/// supports a shape.
pub fn run(args: &Args, json: bool) -> anyhow::Result<Holds> {
    let mut ctx = Context::open(&args.device)?;
    if let Some(path) = &args.tuned {
        ctx = ctx.with_tuned(choice::tuned(path)?);
    }
    if let Some(problems) = args.grid {
        return grid::run(&ctx, problems, args.budget, args.largest << 20, json);
    }
    args.check()?;
    let baseline = args.baseline.as_deref().map(Baseline::read).transpose()?;
    // First, so that an unwritable output does not waste the work.
    let begin = |path: &PathBuf| WholeFile::create(path, Existing::Replace);
    let save = args.save.as_ref().map(begin).transpose()?;
    args.save_tuned.as_ref().map(begin).transpose()?;
    let trace = args.profile.as_ref().and_then(Option::as_ref).map(begin).transpose()?;
    let work = match args.op {
        Op::Gemm => {
            let shapes = match args.shape[..] {
                [] => GEMM_SHAPES.iter().map(|shape| shape.parse()).collect::<anyhow::Result<_>>()?,
                _ => choice::gemm_shapes(&args.shape)?,
            };
            let subjects = match &args.model {
                Some(path) => subject::from_model(path, args.opening, &shapes, args.format)?,
                None => subject::made_up(&shapes, args.format)?,
            };
            if let Some(Tokens(tokens)) = &args.sweep_m {
                return sweep::run(&ctx, args, tokens, &subjects, json);
            }
            subjects.into_iter().map(Work::Gemm).collect()
        }
        Op::Convert => convert::subjects(args)?.into_iter().map(Work::Convert).collect::<Vec<_>>(),
        Op::Experts => experts::subjects(args)?.into_iter().map(Work::Experts).collect::<Vec<_>>(),
        Op::Routing => routing::subjects(args)?.into_iter().map(Work::Routing).collect(),
        Op::Matmul => matmul::subjects(args)?.into_iter().map(Work::Matmul).collect(),
        Op::Quantize => quantize::subjects(args)?.into_iter().map(Work::Quantize).collect(),
        Op::Attention => attention::subjects(args)?.into_iter().map(Work::Attention).collect(),
        Op::Norm => norm::subjects(args)?.into_iter().map(Work::Norm).collect(),
        Op::KvAppend => kv_append::subjects(args)?.into_iter().map(Work::KvAppend).collect(),
        Op::Indexer => indexer::subjects(args)?.into_iter().map(Work::Indexer).collect(),
        Op::Gradient => gradient::subjects(args)?.into_iter().map(Work::Gradient).collect(),
        Op::Optimizer => optimizer::subjects(args)?.into_iter().map(Work::Optimizer).collect(),
    };
    let bandwidth = read_bandwidth(&ctx)?;
    if !json {
        out::line(&format!("{} ({}), reads {:.1} GB/s", ctx.info().name, ctx.info().id, bandwidth / 1e9))?;
    }
    let progress = Progress::new(work.len() as u64, "measuring");
    let mut table = Table::new(json);
    for work in &work {
        let mut row = match work {
            Work::Gemm(subject) => {
                progress.say(subject.to_string());
                gemm::measure(&ctx, args, subject, bandwidth)?
            }
            Work::Convert(subject) => {
                progress.say(subject.to_string());
                convert::measure(&ctx, args, subject, bandwidth)?
            }
            Work::Experts(subject) => {
                progress.say(subject.to_string());
                experts::measure(&ctx, args, subject, bandwidth)?
            }
            Work::Routing(subject) => {
                progress.say(subject.to_string());
                routing::measure(&ctx, args, subject, bandwidth)?
            }
            Work::Matmul(subject) => {
                progress.say(subject.to_string());
                matmul::measure(&ctx, args, subject, bandwidth)?
            }
            Work::Quantize(subject) => {
                progress.say(subject.to_string());
                quantize::measure(&ctx, args, subject, bandwidth)?
            }
            Work::Attention(subject) => {
                progress.say(subject.to_string());
                attention::measure(&ctx, args, subject, bandwidth)?
            }
            Work::Norm(subject) => {
                progress.say(subject.to_string());
                norm::measure(&ctx, args, subject, bandwidth)?
            }
            Work::KvAppend(subject) => {
                progress.say(subject.to_string());
                kv_append::measure(&ctx, args, subject, bandwidth)?
            }
            Work::Indexer(subject) => {
                progress.say(subject.to_string());
                indexer::measure(&ctx, args, subject, bandwidth)?
            }
            Work::Gradient(subject) => {
                progress.say(subject.to_string());
                gradient::measure(&ctx, args, subject, bandwidth)?
            }
            Work::Optimizer(subject) => {
                progress.say(subject.to_string());
                optimizer::measure(&ctx, args, subject, bandwidth)?
            }
        };
        if let Some(baseline) = &baseline {
            baseline.judge(&mut row);
        }
        if args.profile.is_none() {
            row.profile = None;
        }
        table.push(row, &progress)?;
        progress.step(1);
    }
    drop(progress);
    let rows = table.finish()?;
    let profile = Profile::joined(rows.iter().filter_map(|row| row.profile.as_ref()));
    if let (Some(profile), false) = (&profile, json) {
        out::line(&format!("\n{profile}"))?;
    }
    if let (Some(profile), Some(file)) = (&profile, trace) {
        file.finish_with(profile.chrome_trace().as_bytes())?;
    }
    if let Some(file) = save {
        baseline::save(file, &rows)?;
    }
    let regressions = rows.iter().filter(|row| row.regressed).count();
    if baseline.is_some() && !json {
        let missing = rows.iter().filter(|row| row.slower.is_none()).count();
        out::line(&format!("{regressions} regressions beyond the noise; {missing} results have no baseline"))?;
    }
    Ok(if regressions == 0 { Holds::Yes } else { Holds::No })
}

/// Default shapes of products.
const GEMM_SHAPES: [&str; 3] = ["1x4096x4096", "8x4096x4096", "512x4096x4096"];

/// A measurement to make.
enum Work {
    Gemm(subject::Subject),
    Convert(convert::Subject),
    Experts(experts::Subject),
    Routing(routing::Subject),
    Matmul(matmul::Subject),
    Quantize(quantize::Subject),
    Attention(attention::Subject),
    Norm(norm::Subject),
    KvAppend(kv_append::Subject),
    Indexer(indexer::Subject),
    Gradient(subject::Subject),
    Optimizer(optimizer::Subject),
}

impl Args {
    /// Time of a measurement.
    fn pace(&self) -> timing::Pace {
        self.rest.map_or(timing::Pace::Thorough, timing::Pace::Rested)
    }

    /// Type or format of X in tables.
    fn x_name(&self) -> String {
        self.x_format.map_or(self.x_dtype.to_string(), |format| format.to_string())
    }

    /// Checks that no option of another operation is given.
    fn check(&self) -> anyhow::Result<()> {
        let of_convert =
            self.from.is_some() || self.to.is_some() || self.transposed || self.gathered || self.row_factors;
        let of_gemm = [self.model.is_some(), self.format.is_some(), self.family.is_some(), self.sweep_m.is_some()];
        choice::check_x_format(self.op, self.x_format)?;
        choice::check_norm(self.op, self.norm)?;
        ensure!(self.norm.is_none() || self.op == Op::Gemm, "bench has --norm for `--op gemm`");
        ensure!(
            self.op == Op::Attention || (self.page_size.is_none() && !self.mask_bits && self.kv_format.is_none()),
            "--page-size, --kv-format and --mask-bits are options of `--op attention`"
        );
        match self.op {
            Op::Gemm => ensure!(
                !of_convert,
                "--from, --to, --transposed, --gathered and --row-factors are options of `--op convert`"
            ),
            Op::Experts => ensure!(
                !of_convert && self.model.is_none() && self.sweep_m.is_none(),
                "a model, --sweep-m and the options of convert are not those of `--op experts`"
            ),
            Op::Convert => ensure!(
                !of_gemm.contains(&true),
                "a model, --format, --family and --sweep-m are options of `--op gemm`"
            ),
            Op::Matmul => ensure!(
                !of_convert && !of_gemm.contains(&true),
                "a model, --format, --family, --sweep-m and the options of convert are not those of `--op matmul`"
            ),
            Op::Routing => ensure!(
                !of_convert && !of_gemm.contains(&true),
                "a model, --format, --family, --sweep-m and the options of convert are not those of `--op routing`"
            ),
            Op::Quantize => ensure!(
                !of_convert && !of_gemm.contains(&true),
                "a model, --format, --family, --sweep-m and the options of convert are not those of `--op quantize`"
            ),
            Op::Attention => ensure!(
                !of_convert && self.model.is_none() && self.format.is_none() && self.sweep_m.is_none(),
                "a model, --format, --sweep-m and the options of convert are not those of `--op attention`"
            ),
            Op::KvAppend => ensure!(
                !of_convert && !of_gemm.contains(&true),
                "a model, --format, --family, --sweep-m and the options of convert are not those of `--op kv_append`"
            ),
            Op::Indexer => ensure!(
                !of_convert && !of_gemm.contains(&true),
                "a model, --format, --family, --sweep-m and the options of convert are not those of `--op indexer`"
            ),
            Op::Optimizer => ensure!(
                !of_convert && !of_gemm.contains(&true),
                "a model, --format, --family, --sweep-m and the options of convert are not those of `--op optimizer`"
            ),
            Op::Gradient => ensure!(
                !of_convert && self.model.is_none() && self.family.is_none() && self.sweep_m.is_none(),
                "a model, --family, --sweep-m and the options of convert are not those of `--op gradient`"
            ),
            Op::Norm => ensure!(
                !of_gemm.contains(&true) && !self.transposed && !self.gathered && !self.row_factors,
                "of the options of other operations, `--op norm` has --from and --to"
            ),
        }
        let of_matmul = self.layout.is_some() || self.factors.is_some() || self.batch != 1 || self.groups.is_some();
        ensure!(
            self.op == Op::Matmul || !of_matmul,
            "--layout, --factors, --batch and --groups are options of `--op matmul`"
        );
        Ok(())
    }
}

/// Least bytes that a CPU rotates through. Its last-level cache
/// may be shared, and reported in part.
const HOST_BYTES: usize = 1 << 30;

/// Number of copies of a weight such that none is still in the
/// last-level cache when it is used again.
fn copies(ctx: &Context, bytes: usize) -> usize {
    copies_of_part(ctx, bytes, bytes)
}

/// As [`copies`], for weights of `bytes` bytes of which a launch
/// reads `part`. On CPUs, whose cache is not known, all bytes
/// count.
fn copies_of_part(ctx: &Context, part: usize, bytes: usize) -> usize {
    const CACHES: u64 = 2;
    const FEWEST: u64 = 2;
    const MOST: u64 = 512;
    let is_cpu = ctx.info().id.kind == DeviceKind::Cpu;
    let (bytes, part) = (bytes as u64, if is_cpu { bytes } else { part.max(1) } as u64);
    // Unknown device memory gives no bound.
    let in_memory = match ctx.info().memory_bytes {
        0 => MOST,
        memory => memory / 4 / bytes,
    };
    let host_bytes = if is_cpu { HOST_BYTES as u64 } else { 0 };
    let beyond_cache = (CACHES * ctx.info().cache_bytes).max(host_bytes).div_ceil(part);
    beyond_cache.min(in_memory).clamp(FEWEST, MOST) as usize
}

/// Read bandwidth in bytes per second: measured if possible,
/// otherwise as the device reports it.
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
