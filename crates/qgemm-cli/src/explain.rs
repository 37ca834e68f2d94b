//! `qgemm explain`: chosen kernel of a shape, other candidates,
//! and why.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use qgemm_api::{
    Activation, Attention, Context, Conversion, DType, Format, Gradient, Indexer, Keys, KvAppend, KvFormat, MaskBits,
    Matmul, Norm, NormFunction, Optimizer, PlanRecord, Quantization, Queries, Rotary, Routing, XFormat, XPrecision,
};

use crate::choice::{self, IndexerShape, Op, Sizes, keys_of};
use crate::holds::Holds;
use crate::out;

/// Options of the command.
#[derive(clap::Args)]
pub struct Args {
    /// Device: cpu, cuda:0, wgpu:0, auto (the best available), or a
    /// chip that need not be present: emu:sm70, emu:sm75, emu:sm80,
    /// emu:sm89, emu:sm90, emu:sm120.
    #[arg(long, default_value = "auto")]
    device: String,
    /// The operation.
    #[arg(long, value_enum, default_value_t = Op::Gemm)]
    op: Op,
    /// Shapes. gemm, experts (of each), matmul, and gradient (of the
    /// forward product): MxNxK (tokens x output features x input
    /// features).
    /// convert, norm, quantize: RxC. routing: TxExK. attention:
    /// BxQxSxHxGxD.
    #[arg(long, value_name = "SIZES", num_args = 1.., required = true)]
    shape: Vec<Sizes>,
    /// Weight format.
    #[arg(long, default_value = "q4_0")]
    format: Format,
    /// Type of the activations and of the output.
    #[arg(long, default_value = "f16")]
    x_dtype: DType,
    /// Permitted rounding of activations: auto, exact, f16, bf16,
    /// tf32, bf16x3, int8, int8_token, e4m3, or e4m3_token.
    #[arg(long, default_value_t)]
    x_precision: XPrecision,
    /// gemm: X is given quantized in this format. quantize: the
    /// format (default: q8_0).
    #[arg(long)]
    x_format: Option<XFormat>,
    /// A gated pair (SwiGLU) with N output features.
    #[arg(long)]
    gated: bool,
    /// Require that a row's bits do not depend on its batch.
    #[arg(long)]
    batch_invariant: bool,
    /// Limit of workspace bytes.
    #[arg(long, value_name = "BYTES")]
    max_workspace: Option<usize>,
    /// gemm, experts, attention: only this kernel family.
    #[arg(long)]
    family: Option<String>,
    /// attention: keys and values are in pages of this many keys.
    #[arg(long, value_name = "KEYS")]
    page_size: Option<NonZeroUsize>,
    /// attention: with a bit mask in device memory.
    #[arg(long)]
    mask_bits: bool,
    /// experts: number of experts.
    #[arg(long, default_value_t = 32)]
    experts: usize,
    /// experts: experts per token (top-k).
    #[arg(long, default_value_t = 4)]
    top_k: usize,
    /// Use the measured configs of this table; `auto` is the table of
    /// `qgemm tune`.
    #[arg(long, value_name = "FILE")]
    tuned: Option<PathBuf>,
}

/// Runs the command.
///
/// # Errors
/// When the device fails to open, or a shape is invalid.
pub fn run(args: &Args, json: bool) -> anyhow::Result<Holds> {
    let mut ctx = Context::open(&args.device)?;
    if let Some(path) = &args.tuned {
        ctx = ctx.with_tuned(choice::tuned(path)?);
    }
    let records = args.shape.iter().map(|sizes| args.record(&ctx, sizes)).collect::<anyhow::Result<Vec<_>>>()?;
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
    fn record(&self, ctx: &Context, sizes: &Sizes) -> anyhow::Result<PlanRecord> {
        let state = |problem: qgemm_api::Problem| {
            let problem = problem.x_format(self.x_format.unwrap_or(self.x_dtype.into())).x_precision(self.x_precision);
            let problem = problem.d_dtype(self.x_dtype);
            let problem = problem.batch_invariant(self.batch_invariant);
            let problem = if self.gated { problem.activation(Activation::Silu) } else { problem };
            let problem = self.max_workspace.iter().fold(problem, |problem, &bytes| problem.max_workspace(bytes));
            self.family.iter().fold(problem, |problem, family| problem.family(family))
        };
        let weight = |n, k| {
            let weight = ctx.describe_weight(self.format, n, k)?;
            if self.gated { weight.gated() } else { Ok(weight) }
        };
        Ok(match self.op {
            Op::Gemm => {
                let shape = sizes.gemm()?;
                ctx.explain(&state(weight(shape.n, shape.k)?.problem(shape.m)))?
            }
            Op::Experts => {
                let shape = sizes.gemm()?;
                let experts = weight(shape.n, shape.k)?.experts(self.experts)?;
                ctx.explain_experts(&experts.indexed(shape.m, self.top_k).each(state))?
            }
            Op::Convert => {
                let [rows, columns] = sizes.convert()?;
                ctx.explain_conversion(&Conversion::new(rows, columns, DType::F32, self.x_dtype))?
            }
            Op::Routing => {
                let [tokens, experts, top_k] = sizes.routing()?;
                ctx.explain_routing(&Routing::from_logits(tokens, experts, top_k, DType::F32))?
            }
            Op::Matmul => {
                let shape = sizes.gemm()?;
                let dtype = self.x_dtype;
                let product = Matmul::new([shape.m, shape.n, shape.k], dtype, dtype, dtype);
                ctx.explain_matmul(&product.operand_precision(self.x_precision))?
            }
            Op::Attention => {
                let [sequences, queries, keys, heads, kv_heads, dim] = sizes.attention()?;
                let (queries, keys) = (Queries::each(sequences, queries), keys_of(sequences, keys, self.page_size));
                let attention = Attention::new(self.x_dtype, heads, kv_heads, dim, queries, keys).causal();
                let attention = if self.mask_bits { attention.mask(MaskBits::of_tokens()) } else { attention };
                let attention = if self.batch_invariant { attention.batch_invariant() } else { attention };
                ctx.explain_attention(&self.family.iter().fold(attention, Attention::family))?
            }
            Op::Gradient => {
                let shape = sizes.gemm()?;
                let gradient = Gradient::new(shape.m, self.x_dtype, self.x_dtype);
                ctx.explain_gradient_of(&weight(shape.n, shape.k)?, &gradient)?
            }
            Op::Norm => {
                let [rows, columns] = sizes.norm()?;
                let function = NormFunction::rms(1e-6).gamma(self.x_dtype);
                ctx.explain_norm(&Norm::new(rows, columns, self.x_dtype, function))?
            }
            Op::Optimizer => {
                let optimizer = Optimizer::adamw(sizes.optimizer()?).gradient_dtype(self.x_dtype);
                ctx.explain_optimizer(&optimizer.copy(DType::BF16))?
            }
            Op::KvAppend => {
                let [tokens, heads, kv_heads, dim] = sizes.kv_append()?;
                let (queries, keys) = (Queries::each(tokens, 1), Keys::lengths(1));
                let append = KvAppend::new(self.x_dtype, heads, kv_heads, dim, queries, keys);
                ctx.explain_kv_append(&append.rotary(Rotary::neox(dim)))?
            }
            Op::Indexer => {
                let IndexerShape { sequences, queries, keys, heads, features } = sizes.indexer()?;
                let of = |queries| Indexer::new(KvFormat::E4M3, queries, heads, features, keys);
                ctx.explain_indexer(&match sequences {
                    None => of(queries),
                    Some(count) => of(queries * count).paged(count, count * keys.div_ceil(64), 64, keys.div_ceil(64)),
                })?
            }
            Op::Quantize => {
                let [rows, columns] = sizes.matrix(self.op.name())?;
                ctx.explain_quantization(&Quantization::new(
                    rows,
                    columns,
                    self.x_dtype,
                    self.x_format.unwrap_or(XFormat::Q8_0),
                ))?
            }
        })
    }
}
