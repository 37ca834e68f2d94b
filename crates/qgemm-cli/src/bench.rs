//! `qgemm bench`: measures kernels and language models, and
//! compares with earlier results.

pub mod baseline;
mod cliffs;
mod copies;
mod generation;
mod grid;
mod language_model;
pub mod roof;
mod row;
pub mod subject;
mod sweep;
mod timeline;
pub mod timing;
mod tokens;

use std::num::NonZeroUsize;
use std::path::PathBuf;

use anyhow::{bail, ensure};
use clap::ValueEnum;
use qgemm_api::{
    Activation, Context, DType, DeviceKind, FactorFormat, KvFormat, MatmulLayout, NormKind, Profile, Tuned, XFormat,
    XPrecision,
};

use crate::choice::{self, FormatChoice, Sizes};
use crate::contention::{self, Cores};
use crate::holds::Holds;
use crate::opening::Opening;
use crate::operations::experts::Form;
use crate::operations::{Op, gemm};
use crate::out::{self, Printing};
use crate::progress::Progress;
use crate::ranks::RankArgs;
use crate::table::Table;
use crate::whole_file::{Existing, WholeFile};
use baseline::Baseline;
pub use copies::{copies, copies_of_part, rotated};
use language_model::ModelArgs;
use roof::{AboveRoof, read_bandwidth};
pub use row::BenchRow;
use tokens::Tokens;

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Benchmark this language model: prefill and decode. With
    /// `--op gemm`, the products of its weights, one by one.
    pub model: Option<PathBuf>,
    #[command(flatten)]
    pub language_model: ModelArgs,
    #[command(flatten)]
    pub opening: Opening,
    /// Device: cpu, cuda:0, wgpu:0, or auto (the best available).
    #[arg(long, default_value = "auto")]
    pub device: String,
    #[command(flatten)]
    pub ranks: RankArgs,
    /// The operation (default: gemm, or a whole model).
    #[arg(long, value_enum)]
    pub op: Option<Op>,
    /// Weight format, or `all`. A model's unquantized weights are
    /// quantized to it.
    #[arg(long)]
    pub format: Option<FormatChoice>,
    /// Shapes: the help of `--op` has the sizes of each operation.
    /// With a model only the tokens count, in a sweep all but the
    /// tokens.
    #[arg(long, value_name = "SIZES", num_args = 1..)]
    pub shape: Vec<Sizes>,
    /// Type of the activations and of the output.
    #[arg(long, default_value = "f16")]
    pub x_dtype: DType,
    /// Permitted rounding of activations: auto, exact, f16, bf16,
    /// tf32, bf16x3, int8, int8_token, e4m3, e4m3_token, mxfp8, mxfp4
    /// or nvfp4.
    #[arg(long, default_value_t)]
    pub x_precision: XPrecision,
    /// gemm: normalize X first (rms or layer), with a gamma in X's
    /// type.
    #[arg(long)]
    pub norm: Option<NormKind>,
    /// gemm, experts: X is given quantized in this format. norm:
    /// format of the result. quantize: the format (default: all).
    #[arg(long)]
    pub x_format: Option<XFormat>,
    /// convert, norm: type of X (default: all types; norm: f16).
    #[arg(long)]
    pub from: Option<DType>,
    /// convert, norm: type of D (default: all types; norm: the type
    /// of X).
    #[arg(long)]
    pub to: Option<DType>,
    /// convert: X is stored as [columns, rows].
    #[arg(long)]
    pub transposed: bool,
    /// convert: gather the columns in reverse order.
    #[arg(long)]
    pub gathered: bool,
    /// convert to f16: rows have factors.
    #[arg(long)]
    pub row_factors: bool,
    /// experts: number of experts.
    #[arg(long, default_value_t = 32)]
    pub experts: usize,
    /// experts: experts per token (top-k).
    #[arg(long, default_value_t = 4)]
    pub top_k: usize,
    /// experts: how rows are assigned (default: every form).
    #[arg(long, value_enum)]
    pub form: Option<Form>,
    /// experts, `--form layer`: activation of gate and up, such as
    /// `gelu_tanh` or `clamped_swiglu(1.702,1,7)`.
    #[arg(long, default_value_t = Activation::Silu)]
    pub activation: Activation,
    /// experts: tokens are distributed by Zipf's law (expert r gets a
    /// share of 1/r), not evenly.
    #[arg(long)]
    pub zipf: bool,
    /// experts: tokens go to experts in turn, so that their rows
    /// differ by at most one.
    #[arg(long, conflicts_with = "zipf")]
    pub even: bool,
    /// experts: the index is ready before launch, so kernels may
    /// prefetch it.
    #[arg(long)]
    pub index_ready: bool,
    /// experts, matmul: run this candidate in the cost model's order
    /// (from 0), instead of the fastest.
    #[arg(long)]
    pub candidate: Option<usize>,
    /// matmul: storage order of A and B, nn, nt, tn or tt (default:
    /// every order).
    #[arg(long)]
    pub layout: Option<MatmulLayout>,
    /// matmul: type of A and B, f32, f16, bf16 or e4m3 (default:
    /// `--x-dtype`). `--x-dtype` is the type of D.
    #[arg(long)]
    pub factors: Option<FactorFormat>,
    /// matmul: number of products.
    #[arg(long, default_value_t = 1)]
    pub batch: usize,
    /// matmul: this many products over equal ranges of K, dYᵀ·X, with D
    /// in f32.
    #[arg(long, conflicts_with_all = ["layout", "batch"])]
    pub groups: Option<usize>,
    /// gemm, experts, attention: only this kernel family.
    #[arg(long)]
    pub family: Option<String>,
    /// attention: keys and values are in pages of this many keys, in
    /// shuffled order.
    #[arg(long, value_name = "KEYS")]
    pub page_size: Option<NonZeroUsize>,
    /// attention: format of keys and values (default: `--x-dtype`
    /// and, for one query, every quantized format). A model: of its
    /// cache (default: f16).
    #[arg(long, value_name = "FORMAT")]
    pub kv_format: Option<KvFormat>,
    /// kv_append: Hadamard rotation of queries, keys and values (default:
    /// false). A model: of its cache (default: true for q4_0).
    #[arg(long, value_name = "BOOL")]
    pub rotate_cache: Option<bool>,
    /// attention: format of values (default: that of keys).
    #[arg(long, value_name = "FORMAT", requires = "kv_format")]
    pub v_format: Option<KvFormat>,
    /// attention: with a bit mask in device memory, all bits set.
    #[arg(long)]
    pub mask_bits: bool,
    /// attention: with a sink a head.
    #[arg(long)]
    pub sinks: bool,
    /// attention: with an output gate.
    #[arg(long)]
    pub output_gate: bool,
    /// Measure all of these token counts, such as `1..256` or
    /// `1..64,80..256/16`. Fails if one takes longer than a larger
    /// one, or if one more token costs more than a tile of tokens.
    #[arg(long, value_name = "TOKENS", conflicts_with_all = ["model", "baseline", "save"])]
    pub sweep_m: Option<Tokens>,
    /// In a sweep: also measure every config that should take at most
    /// this many times as long as the best.
    #[arg(long, value_name = "TIMES", requires = "sweep_m", num_args = 0..=1, default_missing_value = "3")]
    pub all_configs: Option<f64>,
    /// Measure all candidates of this many random problems, dense and
    /// with experts; problems are the same in every run. List
    /// plans more than 10 % slower than the best candidate. Fails
    /// if these are more than one in ten.
    #[arg(long, value_name = "PROBLEMS", conflicts_with_all = ["model", "shape", "sweep_m", "baseline", "save"])]
    pub grid: Option<usize>,
    /// Idle the device for this time before each measurement (such as
    /// 400ms), and keep the measurement short. A card that has worked
    /// for a while runs tensor-core kernels slower.
    #[arg(long, value_name = "TIME", value_parser = choice::duration, conflicts_with_all = ["grid", "sweep_m"])]
    pub rest: Option<std::time::Duration>,
    /// In a grid: time limit without weights, such as 500s or 9m.
    #[arg(long, default_value = "5m", requires = "grid", value_parser = choice::duration)]
    pub budget: std::time::Duration,
    /// In a grid: megabytes of the largest weights.
    #[arg(long, default_value_t = 1024, value_name = "MB", requires = "grid")]
    pub largest: usize,
    /// Use the measured configs of this table; `auto` is the table of
    /// `qgemm tune`.
    #[arg(long, value_name = "FILE")]
    pub tuned: Option<PathBuf>,
    /// In a sweep over all configs: add the best to this table, for
    /// `--tuned` and `Context::with_tuned`.
    #[arg(long, value_name = "FILE", requires = "all_configs")]
    pub save_tuned: Option<PathBuf>,
    /// Compare with the results in this file. Fails if one is slower
    /// beyond the noise.
    #[arg(long, value_name = "FILE")]
    pub baseline: Option<PathBuf>,
    /// Save the results to this file, for a later `--baseline`.
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    /// Show the time of each kernel of a launch; with a file, also
    /// write a trace for Perfetto and chrome://tracing. A model: the
    /// kernels of a decode step in their places (CUDA, needs CUPTI).
    #[arg(long, value_name = "FILE", num_args = 0..=1, conflicts_with_all = ["sweep_m"])]
    pub profile: Option<Option<PathBuf>>,
}

/// Runs the command.
///
/// # Errors
/// When the device, the model or a file fails, or no kernel
/// supports a shape.
pub fn run(args: &Args, printing: Printing) -> anyhow::Result<Holds> {
    if let (Some(model), None) = (&args.model, args.op) {
        args.check_whole_model()?;
        let tuned = args.tuned.as_deref().map_or(Ok(Tuned::Auto), choice::tuned)?;
        return language_model::run(&args.ranks.open(&args.device, &tuned)?, args, model, printing);
    }
    ensure!(args.ranks.tp == 1, "`--tp` is of a whole model, without `--op`");
    let mut ctx = Context::open(&args.device)?;
    if let Some(path) = &args.tuned {
        ctx = ctx.with_tuned(choice::tuned(path)?);
    }
    if let Some(problems) = args.grid {
        return grid::run(&ctx, problems, args.budget, args.largest << 20, printing.json("bench --grid")?);
    }
    args.check()?;
    let baseline = args.baseline.as_deref().map(Baseline::read).transpose()?;
    // First, so that an unwritable output does not waste the work.
    let begin = |path: &PathBuf| WholeFile::create(path, Existing::Replace);
    let save = args.save.as_ref().map(begin).transpose()?;
    args.save_tuned.as_ref().map(begin).transpose()?;
    let trace = args.trace()?;
    if let Some(Tokens(tokens)) = &args.sweep_m {
        return sweep::run(&ctx, args, tokens, &gemm::subjects(args)?, printing);
    }
    let work = args.op().work(args)?;
    let progress = Progress::new(work.len() as u64, "measuring");
    progress.say("the read bandwidth".into());
    let mut bandwidth = read_bandwidth(&ctx)?;
    if printing.is_text() {
        let reads = format!("{} ({}), reads {:.1} GB/s", ctx.info().name, ctx.info().id, bandwidth / 1e9);
        progress.print(&reads)?;
    }
    let mut table = Table::new(printing);
    for work in &work {
        progress.say(work.to_string());
        let before = Cores::now();
        let mut row = work.measure(&ctx, args, bandwidth)?;
        row.contention = before.and_then(|before| before.others_since());
        if row.above_roof == Some(AboveRoof::RoofTooLow) {
            // Other work may have slowed the measurement of the roof.
            bandwidth = bandwidth.max(read_bandwidth(&ctx)?);
            row.judge_share(&ctx, bandwidth);
        }
        if let Some(baseline) = &baseline {
            baseline.judge(&mut row);
        }
        if args.profile.is_none() {
            row.profile = None;
        }
        table.push(row, &progress)?;
        progress.step(1);
    }
    let busy = gpu_contention(&ctx);
    drop(progress);
    let rows = table.finish()?;
    if printing.is_text() {
        busy.iter().try_for_each(|text| out::line(text))?;
    }
    let profile = Profile::joined(rows.iter().filter_map(|row| row.profile.as_ref()));
    if let (Some(profile), true) = (&profile, printing.is_text()) {
        out::line(&format!("\n{profile}"))?;
    }
    if let (Some(profile), Some(file)) = (&profile, trace) {
        file.finish_with(profile.chrome_trace().as_bytes())?;
    }
    if let Some(file) = save {
        baseline::save(file, &rows)?;
    }
    let regressions = rows.iter().filter(|row| row.regressed).count();
    if baseline.is_some() && printing.is_text() {
        let missing = rows.iter().filter(|row| row.slower.is_none()).count();
        out::line(&format!("{regressions} regressions beyond the noise; {missing} results have no baseline"))?;
    }
    Ok(if regressions == 0 { Holds::Yes } else { Holds::No })
}

impl Args {
    /// Time of a measurement.
    pub fn pace(&self) -> timing::Pace {
        self.rest.map_or(timing::Pace::Thorough, timing::Pace::Rested)
    }

    /// File of `--profile` for a trace, if one is named.
    fn trace(&self) -> anyhow::Result<Option<WholeFile>> {
        let path = self.profile.as_ref().and_then(Option::as_ref);
        path.map(|path| WholeFile::create(path, Existing::Replace)).transpose()
    }

    /// The operation.
    fn op(&self) -> Op {
        self.op.unwrap_or(Op::Gemm)
    }

    /// Type or format of X in tables.
    pub fn x_name(&self) -> String {
        self.x_format.map_or(self.x_dtype.to_string(), |format| format.to_string())
    }

    /// Checks that no option of another operation, or of a whole
    /// model, is given.
    fn check(&self) -> anyhow::Result<()> {
        let op = self.op();
        choice::check_x_format(op, self.x_format)?;
        if let Some((option, _)) = self.language_model.given().into_iter().find(|(_, is_given)| *is_given) {
            bail!("{option} is an option of a whole model: expected a model, and no `--op`");
        }
        for (option, _) in self.given().into_iter().filter(|(_, is_given)| *is_given) {
            let takers = Op::value_variants().iter().filter(|op| op.bench_options().contains(&option));
            let takers = takers.map(|op| format!("`--op {}`", op.name())).collect::<Vec<_>>().join(", ");
            ensure!(
                op.bench_options().contains(&option),
                "`--op {}` does not take {option}, which is an option of {takers}",
                op.name()
            );
        }
        Ok(())
    }

    /// Checks that no option of an operation is given, but for those
    /// that a whole model takes.
    fn check_whole_model(&self) -> anyhow::Result<()> {
        const TAKEN: &[&str] = &["a model", "--kv-format", "--rotate-cache"];
        let more = [
            ("--shape", !self.shape.is_empty()),
            ("--read", self.opening.read),
            ("--rest", self.rest.is_some()),
            ("--baseline", self.baseline.is_some()),
            ("--save", self.save.is_some()),
        ];
        let mut given = self.given().into_iter().chain(more).filter(|(option, _)| !TAKEN.contains(option));
        if let Some((option, _)) = given.find(|(_, is_given)| *is_given) {
            bail!("a whole model does not take {option}: state `--op gemm` for its products");
        }
        Ok(())
    }

    /// Options that not all operations take, and whether they are
    /// given.
    fn given(&self) -> [(&'static str, bool); 22] {
        [
            ("a model", self.model.is_some()),
            ("--format", self.format.is_some()),
            ("--family", self.family.is_some()),
            ("--sweep-m", self.sweep_m.is_some()),
            ("--norm", self.norm.is_some()),
            ("--x-format", self.x_format.is_some()),
            ("--from", self.from.is_some()),
            ("--to", self.to.is_some()),
            ("--transposed", self.transposed),
            ("--gathered", self.gathered),
            ("--row-factors", self.row_factors),
            ("--layout", self.layout.is_some()),
            ("--factors", self.factors.is_some()),
            ("--batch", self.batch != 1),
            ("--groups", self.groups.is_some()),
            ("--page-size", self.page_size.is_some()),
            ("--kv-format", self.kv_format.is_some()),
            ("--rotate-cache", self.rotate_cache.is_some()),
            ("--mask-bits", self.mask_bits),
            ("--sinks", self.sinks),
            ("--v-format", self.v_format.is_some()),
            ("--output-gate", self.output_gate),
        ]
    }
}

/// Remarks on what slows a CUDA device down.
fn gpu_contention(ctx: &Context) -> Vec<String> {
    if ctx.info().id.kind != DeviceKind::Cuda {
        return Vec::new();
    }
    // `nvidia-smi` numbers devices differently.
    let same = contention::gpus().into_iter().filter(|gpu| gpu.name == ctx.info().name);
    same.filter_map(|gpu| gpu.contention()).collect()
}
