//! `qgemm explain`: chosen kernel of a shape, other candidates,
//! and why.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use qgemm_api::{Activation, Context, DType, DescribedWeight, Format, KvFormat, Problem, XFormat, XPrecision};

use crate::choice::{self, Sizes};
use crate::holds::Holds;
use crate::operations::Op;
use crate::out::{self, Printing};

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Device: cpu, cuda:0, wgpu:0, auto (the best available), or a
    /// chip that need not be present: emu:sm70, emu:sm75, emu:sm80,
    /// emu:sm89, emu:sm90, emu:sm120.
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// The operation.
    #[arg(long, value_enum, default_value_t = Op::Gemm)]
    pub op: Op,
    /// Shapes: the help of `--op` has the sizes of each operation.
    #[arg(long, value_name = "SIZES", num_args = 1.., required = true)]
    pub shape: Vec<Sizes>,
    /// Weight format.
    #[arg(long, default_value = "q4_0")]
    pub format: Format,
    /// Type of the activations and of the output.
    #[arg(long, default_value = "f16")]
    pub x_dtype: DType,
    /// Permitted rounding of activations: auto, exact, f16, bf16,
    /// tf32, bf16x3, int8, int8_token, e4m3, e4m3_token, mxfp8, mxfp4
    /// or nvfp4.
    #[arg(long, default_value_t)]
    pub x_precision: XPrecision,
    /// gemm: X is given quantized in this format. quantize: the
    /// format (default: q8_0).
    #[arg(long)]
    pub x_format: Option<XFormat>,
    /// A gated pair (SwiGLU) with N output features.
    #[arg(long)]
    pub gated: bool,
    /// Require that a row's bits do not depend on its batch.
    #[arg(long)]
    pub batch_invariant: bool,
    /// Limit of workspace bytes.
    #[arg(long, value_name = "BYTES")]
    pub max_workspace: Option<usize>,
    /// gemm, experts, attention: only this kernel family.
    #[arg(long)]
    pub family: Option<String>,
    /// attention: keys and values are in pages of this many keys.
    #[arg(long, value_name = "KEYS")]
    pub page_size: Option<NonZeroUsize>,
    /// attention: with a bit mask in device memory.
    #[arg(long)]
    pub mask_bits: bool,
    /// attention: with a sink a head.
    #[arg(long)]
    pub sinks: bool,
    /// attention: with an output gate.
    #[arg(long)]
    pub output_gate: bool,
    /// attention: format of keys and values (default: `--x-dtype`).
    #[arg(long, value_name = "FORMAT")]
    pub kv_format: Option<KvFormat>,
    /// attention: format of values (default: that of keys).
    #[arg(long, value_name = "FORMAT", requires = "kv_format")]
    pub v_format: Option<KvFormat>,
    /// experts: number of experts.
    #[arg(long, default_value_t = 32)]
    pub experts: usize,
    /// experts: experts per token (top-k).
    #[arg(long, default_value_t = 4)]
    pub top_k: usize,
    /// Use the measured configs of this table; `auto` is the table of
    /// `qgemm tune`.
    #[arg(long, value_name = "FILE")]
    pub tuned: Option<PathBuf>,
}

/// Runs the command.
///
/// # Errors
/// When the device fails to open, or a shape is invalid.
pub fn run(args: &Args, printing: Printing) -> anyhow::Result<Holds> {
    let json = printing.json("explain")?;
    let mut ctx = Context::open(&args.device)?;
    if let Some(path) = &args.tuned {
        ctx = ctx.with_tuned(choice::tuned(path)?);
    }
    let records =
        args.shape.iter().map(|sizes| args.op.explain(args, &ctx, sizes)).collect::<anyhow::Result<Vec<_>>>()?;
    if json {
        out::json(&records)?;
    } else {
        for record in &records {
            out::line(&record.to_string())?;
        }
    }
    Ok(if records.iter().all(|record| record.kernel_id.is_some()) { Holds::Yes } else { Holds::No })
}

impl Args {
    /// A product with the options of the command.
    pub fn state(&self, problem: Problem) -> Problem {
        let problem = problem.x_format(self.x_format.unwrap_or(self.x_dtype.into())).x_precision(self.x_precision);
        let problem = problem.d_dtype(self.x_dtype);
        let problem = problem.batch_invariant(self.batch_invariant);
        let problem = if self.gated { problem.activation(Activation::Silu) } else { problem };
        let problem = self.max_workspace.iter().fold(problem, |problem, &bytes| problem.max_workspace(bytes));
        self.family.iter().fold(problem, |problem, family| problem.family(family))
    }

    /// A weight of the command's format, or a gated pair.
    ///
    /// # Errors
    /// When the format cannot store it.
    pub fn weight(&self, ctx: &Context, n: usize, k: usize) -> anyhow::Result<DescribedWeight> {
        let weight = ctx.describe_weight(self.format, n, k)?;
        Ok(if self.gated { weight.gated()? } else { weight })
    }
}
