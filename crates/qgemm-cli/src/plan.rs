//! `qgemm plan`: execution and memory plan of a model, as a file.

use std::path::PathBuf;

use anyhow::Context as _;
use qgemm_api::exec::{ExecPlan, RegionKind};
use qgemm_api::{Context, DType, KvFormat, PlanOptions, Ranks, Tuned, XPrecision, open_model};

use crate::holds::Holds;
use crate::out::{self, Printing};
use crate::table::bytes;
use crate::text_file;
use crate::whole_file::{Existing, WholeFile};

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// A GGUF or safetensors model of an architecture that `qgemm run`
    /// serves, or of bert.
    model: PathBuf,
    /// Tokens of a step.
    #[arg(long)]
    batch: usize,
    /// Sequences that share the tokens equally. Default: one per
    /// token (a decode step); 1 for encoders and with --train.
    /// State 1 for a prompt.
    #[arg(long)]
    sequences: Option<usize>,
    /// KV-cache capacity per sequence, in keys (default: the model's
    /// context length, at most 4096).
    #[arg(long)]
    context: Option<usize>,
    /// Format of keys and values in the cache (default: the type of
    /// the activations).
    #[arg(long)]
    kv_format: Option<KvFormat>,
    /// Rotate keys and values in the cache by a Hadamard matrix, which
    /// formats of few bits lose less of.
    #[arg(long)]
    rotate_cache: bool,
    /// Tokens of a page of the KV cache (default: no pages).
    #[arg(long)]
    page_size: Option<usize>,
    /// Pages of the cache, which plans of other batches share (default:
    /// enough for the capacity of all sequences).
    #[arg(long, requires = "page_size")]
    pages: Option<usize>,
    /// Slots of recurrent states, which plans of other batches share
    /// (default: one for each sequence).
    #[arg(long)]
    slots: Option<usize>,
    /// Sample the next token of each sequence.
    #[arg(long)]
    sampling: bool,
    /// Plan one rank of this many, among which the model is divided
    /// (tensor parallelism). No rank needs to be present.
    #[arg(long, value_name = "RANKS")]
    tp: Option<usize>,
    /// Divide experts by expert: each rank has some of them, instead
    /// of a slice of each (expert parallelism).
    #[arg(long, requires = "tp")]
    expert_parallel: bool,
    /// The rank to plan, from 0 on.
    #[arg(long, default_value_t = 0, requires = "tp")]
    rank: usize,
    /// Device: cpu, cuda:0, wgpu:0, auto (the best available), or a
    /// chip that need not be present, such as emu:sm90.
    #[arg(long, default_value = "auto")]
    device: String,
    /// Type of the activations; logits are f32.
    #[arg(long, default_value = "f16")]
    x_dtype: DType,
    /// Permitted rounding of activations: auto, exact, f16, bf16,
    /// tf32, bf16x3, int8, int8_token, e4m3, e4m3_token, mxfp8, mxfp4
    /// or nvfp4.
    #[arg(long, default_value_t)]
    x_precision: XPrecision,
    /// Compute the logits of all tokens, not only of the last of each
    /// sequence.
    #[arg(long)]
    all_logits: bool,
    /// Add the gradients of a training step, and the state of an
    /// optimizer with two moments.
    #[arg(long)]
    train: bool,
    /// Write the plan to this file (schema qgemm.exec.v1,
    /// docs/guide/plans.md).
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Read this plan instead of making one, and check that it fits
    /// the device and the model.
    #[arg(long, value_name = "FILE", conflicts_with = "output")]
    check: Option<PathBuf>,
}

/// Runs the command.
///
/// # Errors
/// When the model, the device or a file fails, or a plan does not fit.
pub fn run(args: &Args, printing: Printing) -> anyhow::Result<Holds> {
    let json = printing.json("plan")?;
    let ctx = Context::open(&args.device)?.with_tuned(Tuned::Auto);
    let plan = match &args.check {
        Some(path) => {
            let text = text_file::read(path)?;
            let loaded = ctx.load_plan(&text, &open_model(&args.model)?);
            loaded.with_context(|| path.display().to_string())?.exec_plan().clone()
        }
        None => {
            let mut options = PlanOptions::new(args.batch);
            (options.sequences, options.context) = (args.sequences, args.context);
            (options.x_dtype, options.x_precision, options.train) = (args.x_dtype, args.x_precision, args.train);
            (options.kv_format, options.page_size, options.pages) = (args.kv_format, args.page_size, args.pages);
            (options.rotate_cache, options.slots) = (args.rotate_cache, args.slots);
            options.ranks = args.tp.map(|world| Ranks { rank: args.rank, world });
            options.expert_parallel = args.expert_parallel;
            (options.all_logits, options.sampling) = (args.all_logits, args.sampling);
            // First, so that an unwritable output does not waste the work.
            let file = args.output.as_ref().map(|path| WholeFile::create(path, Existing::Replace)).transpose()?;
            let plan = ctx.plan_model(&args.model, &options)?;
            if let Some(file) = file {
                file.finish_with(serde_json::to_string_pretty(&plan)?.as_bytes())?;
            }
            plan
        }
    };
    match json {
        true => out::json(&plan)?,
        false => out::line(&summary(&plan))?,
    }
    Ok(Holds::Yes)
}

/// Summary of a plan in a few lines.
fn summary(plan: &ExecPlan) -> String {
    let (model, device, memory) = (&plan.model, &plan.runtime.device, &plan.memory);
    let of = |kind: RegionKind| -> u64 {
        memory.regions.iter().filter(|region| region.kind == kind).map(|region| region.bytes as u64).sum()
    };
    let seconds: f64 = plan.ops.iter().map(|op| op.estimate_seconds).sum();
    let changes = memory.arena_bytes.saturating_sub(memory.weights_end) as u64;
    let apart = memory.bytes_without_reuse.saturating_sub(memory.weights_end) as u64;
    let of_rank = plan.runtime.ranks.map_or_else(String::new, |Ranks { rank, world }| {
        let (count, moved) = plan.collectives().fold((0, 0u64), |(n, sum), (_, bytes)| (n + 1, sum + bytes as u64));
        format!("\nrank {rank} of {world}: {count} collectives of {} in all, without their time", bytes(moved))
    });
    format!(
        "{}, {} layers, {} tokens of {} sequences, on {} ({})\n{} operations, {:.1} us expected{of_rank}\narena {}: weights {}, workspace {}, \
         KV cache {}, recurrent states {}, all that changes {} ({} without reuse)",
        model.architecture,
        model.layers,
        model.batch,
        model.sequences,
        device.name,
        device.id,
        plan.ops.len(),
        seconds * 1e6,
        bytes(memory.arena_bytes as u64),
        bytes(of(RegionKind::Weight)),
        bytes(of(RegionKind::Workspace)),
        bytes(of(RegionKind::KvCache)),
        bytes(of(RegionKind::RecurrentState)),
        bytes(changes),
        bytes(apart),
    )
}
