//! `qgemm bench`: what kernels reach on a device, and whether they got slower.

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

use crate::Holds;
use crate::choice::{self, FormatChoice, Op, Sizes};
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
    /// Benchmark the weights of this model instead of made-up ones.
    model: Option<PathBuf>,
    #[command(flatten)]
    opening: Opening,
    /// Device: cpu, cuda:0, wgpu:0, or auto for the best there is.
    #[arg(long, default_value = "auto")]
    device: String,
    /// The operation.
    #[arg(long, value_enum, default_value_t = Op::Gemm)]
    op: Op,
    /// Weight format, or `all`. For a model's unquantized weights: the format to quantize them to.
    #[arg(long)]
    format: Option<FormatChoice>,
    /// Shapes, as MxNxK (tokens x output features x input features; of experts, those of each), of convert and quantize as RxC (rows x columns),
    /// of routing as TxExK (tokens x experts x experts of a token), of matmul as MxNxK, of attention as BxQxSxHxGxD (sequences x queries x keys of each x
    /// heads x heads of keys x features of a head), of norm as RxC, of optimizer as N (parameters); with a model only the
    /// tokens count, with a sweep all but the tokens.
    #[arg(long, value_name = "SIZES", num_args = 1..)]
    shape: Vec<Sizes>,
    /// Type of the activations and of the output.
    #[arg(long, default_value = "f16")]
    x_dtype: DType,
    /// How far activations may be rounded: auto, exact, f16, bf16, tf32, bf16x3, int8, int8_token, e4m3, or e4m3_token.
    #[arg(long, default_value_t)]
    x_precision: XPrecision,
    /// Of gemm: normalize X first, rms or layer, with a gamma of its type.
    #[arg(long)]
    norm: Option<NormKind>,
    /// Of gemm and experts: X is given in this format of codes and scales. Of norm: the format of the result. Of quantize: the format; every one when
    /// not given.
    #[arg(long)]
    x_format: Option<XFormat>,
    /// Of convert and norm: the type of X; when not given every type, of norm f16.
    #[arg(long)]
    from: Option<DType>,
    /// Of convert and norm: the type of D; when not given every type, of norm that of X.
    #[arg(long)]
    to: Option<DType>,
    /// Of convert: X is stored as [columns, rows].
    #[arg(long)]
    transposed: bool,
    /// Of convert: columns are gathered, in the reverse order.
    #[arg(long)]
    gathered: bool,
    /// Of convert to f16: each row has a factor.
    #[arg(long)]
    row_factors: bool,
    /// Of experts: how many there are.
    #[arg(long, default_value_t = 32)]
    experts: usize,
    /// Of experts: how many of them each token is given to.
    #[arg(long, default_value_t = 4)]
    top_k: usize,
    /// Of experts: how rows are given to them; every form when not given.
    #[arg(long, value_enum)]
    form: Option<experts::Form>,
    /// Of experts: tokens go to the r-th expert as often as goes with 1 / r, and not to all alike.
    #[arg(long)]
    zipf: bool,
    /// Of experts: tokens go to experts in turn, so that all have as many rows (to one more).
    #[arg(long, conflicts_with = "zipf")]
    even: bool,
    /// Of experts: kernels may read the index before the launches ahead of them are done.
    #[arg(long)]
    settled_index: bool,
    /// Of experts and matmul: not the way that the cost model takes for the fastest, but this one in its order, from 0.
    #[arg(long)]
    way: Option<usize>,
    /// Of matmul: how A and B are stored, nn, nt, tn or tt; every way when not given.
    #[arg(long)]
    layout: Option<MatmulLayout>,
    /// Of matmul: how elements of A and B are stored, f32, f16, bf16 or e4m3; those of D are of `--x-dtype`, and A's and B's, too, unless this is given.
    #[arg(long)]
    factors: Option<FactorFormat>,
    /// Of matmul: how many products.
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Of matmul: so many products of parts of K alike, dYᵀ·X, with D in f32.
    #[arg(long, conflicts_with_all = ["layout", "batch"])]
    groups: Option<usize>,
    /// Of gemm, experts and attention: only this kernel family.
    #[arg(long)]
    family: Option<String>,
    /// Of attention: keys and values lie in pages of so many keys, in another order than the sequence's.
    #[arg(long, value_name = "KEYS")]
    page_size: Option<NonZeroUsize>,
    /// Of attention: keys and values are of this format; that of `--x-dtype` and, for one query, every format of codes when not given.
    #[arg(long, value_name = "FORMAT")]
    kv_format: Option<KvFormat>,
    /// Of attention: bits in device memory, all of them set, say which keys a query sees.
    #[arg(long)]
    mask_bits: bool,
    /// Measure every one of these numbers of tokens, such as `1..256` or `1..64,80..256/16`, and fail where a number
    /// takes longer than a larger one, or one token more costs more than a tile of tokens.
    #[arg(long, value_name = "TOKENS", conflicts_with_all = ["model", "baseline", "save"])]
    sweep_m: Option<Tokens>,
    /// In a sweep, measure all configurations that should take at most so many times as long as the best.
    #[arg(long, value_name = "TIMES", requires = "sweep_m", num_args = 0..=1, default_missing_value = "3")]
    all_configs: Option<f64>,
    /// Measure all candidates of so many random problems, dense and
    /// with experts; problems are the same in every run. List
    /// plans more than 10 % slower than the best candidate. Fails
    /// if these are more than one in ten.
    #[arg(long, value_name = "PROBLEMS", conflicts_with_all = ["model", "shape", "sweep_m", "baseline", "save"])]
    grid: Option<usize>,
    /// Let the device idle so long before each measurement, such as 400ms, and keep that short: how figures of others often came about. Kernels
    /// that matrix instructions bind are 5 to 30 % slower on a card that has worked for a while.
    #[arg(long, value_name = "TIME", value_parser = choice::duration, conflicts_with_all = ["grid", "sweep_m"])]
    rest: Option<std::time::Duration>,
    /// Of a grid: time for all of it, weights not counted, such as 500s or 9m.
    #[arg(long, default_value = "5m", requires = "grid", value_parser = choice::duration)]
    budget: std::time::Duration,
    /// Of a grid: megabytes of the largest weights.
    #[arg(long, default_value_t = 1024, value_name = "MB", requires = "grid")]
    largest: usize,
    /// Take the configurations measured in this file where they are known; `auto` is the file that `qgemm tune` keeps.
    #[arg(long, value_name = "FILE")]
    tuned: Option<PathBuf>,
    /// In a sweep over all configurations, add the best to the table in this file, for `--tuned` and `Context::with_tuned`.
    #[arg(long, value_name = "FILE", requires = "all_configs")]
    save_tuned: Option<PathBuf>,
    /// Compare with the results in this file, and fail where one is slower beyond the noise.
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Save the results to this file, for a later `--baseline`.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Say what each kernel of a launch takes; with a file, write it there as a trace for Perfetto and chrome://tracing.
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
    /// Half the distance between the quartiles, as a share of the median.
    #[serde(deserialize_with = "measured::share")]
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
    /// What the kernels of one launch took, one after the other; only with `--profile`.
    #[serde(skip_deserializing, default, skip_serializing_if = "Option::is_none")]
    profile: Option<Profile>,
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
/// When the device, the model or a file fails, or no kernel serves a shape.
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
    // Before the work, which an output that cannot be written would waste.
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

/// Shapes of products, unless others are asked for.
const GEMM_SHAPES: [&str; 3] = ["1x4096x4096", "8x4096x4096", "512x4096x4096"];

/// One measurement to make.
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
    /// How much time a measurement gets.
    fn pace(&self) -> timing::Pace {
        self.rest.map_or(timing::Pace::Thorough, timing::Pace::Rested)
    }

    /// The type or the format of X in tables.
    fn x_name(&self) -> String {
        self.x_format.map_or(self.x_dtype.to_string(), |format| format.to_string())
    }

    /// That no option of another operation is given.
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

/// Least bytes that a processor reads from before it begins again. Its last cache may be shared by many, and reported
/// in part.
const HOST_BYTES: usize = 1 << 30;

/// So many copies of a weight of `bytes` bytes that none is still in the last-level cache when its turn comes.
fn copies(ctx: &Context, bytes: usize) -> usize {
    copies_of_part(ctx, bytes, bytes)
}

/// The same of weights of `bytes` bytes, of which a launch reads `part`. Processors, whose cache is not known, count all.
fn copies_of_part(ctx: &Context, part: usize, bytes: usize) -> usize {
    const CACHES: u64 = 2;
    const FEWEST: u64 = 2;
    const MOST: u64 = 512;
    let is_cpu = ctx.info().id.kind == DeviceKind::Cpu;
    let (bytes, part) = (bytes as u64, if is_cpu { bytes } else { part.max(1) } as u64);
    // A device that does not tell its memory gets no bound from it.
    let in_memory = match ctx.info().memory_bytes {
        0 => MOST,
        memory => memory / 4 / bytes,
    };
    let host_bytes = if is_cpu { HOST_BYTES as u64 } else { 0 };
    let beyond_cache = (CACHES * ctx.info().cache_bytes).max(host_bytes).div_ceil(part);
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
