//! `--op linear_attention` of the command: cases, explanation and measurement of linear attention.

use std::fmt;

use qgemm_api::{Buffer, Context, DType, Decay, LinearAttention, LinearAttentionArgs, PlanRecord, Queries};
use qgemm_testkit::{LinearAttentionCase, Selection, TestCase};

use crate::bench::subject::normal_rows;
use crate::bench::timing::time_launches;
use crate::bench::{Args, BenchRow, copies};
use crate::choice::Sizes;
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "BxTxHxGxD: sequences x tokens of each x heads x key heads x head dimension";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] = &[];

/// Default sequences, tokens, heads, key heads and head dimension: decode
/// of one sequence and of a batch, verification of guesses, and prefill.
const SHAPES: [[usize; 5]; 4] =
    [[1, 1, 48, 16, 128], [64, 1, 48, 16, 128], [8, 16, 48, 16, 128], [1, 4096, 48, 16, 128]];

/// Kind of linear attention.
#[derive(Clone, Copy, Debug)]
enum Form {
    /// Decay a head, delta rule.
    GatedDelta,
    /// Decay a key feature, delta rule.
    Kda,
    /// Decay a head, no delta term.
    Mamba,
}

impl Form {
    const ALL: [Self; 3] = [Self::GatedDelta, Self::Kda, Self::Mamba];

    fn name(self) -> &'static str {
        match self {
            Self::GatedDelta => "gated-delta",
            Self::Kda => "kda",
            Self::Mamba => "mamba-2",
        }
    }
}

/// A linear attention to measure.
pub struct Subject {
    shape: [usize; 5],
    form: Form,
    dtype: DType,
}

impl Subject {
    fn sizes(&self) -> String {
        self.shape.map(|size| size.to_string()).join("x")
    }

    fn attention(&self) -> LinearAttention {
        let [sequences, tokens, heads, key_heads, dim] = self.shape;
        let attention = LinearAttention::new(self.dtype, heads, dim, Queries::each(sequences, tokens), sequences)
            .key_heads(key_heads);
        match self.form {
            Form::GatedDelta => attention.decay(Decay::per_head()).beta().normalized(1e-6),
            Form::Kda => attention.decay(Decay::per_feature()).beta().normalized(1e-6),
            Form::Mamba => attention.decay(Decay::per_head()).beta().without_delta(),
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.sizes(), self.form.name())
    }
}

fn shape_of(sizes: &Sizes) -> anyhow::Result<[usize; 5]> {
    sizes.exactly("linear_attention", "BxTxHxGxD, such as 64x1x48x16x128")
}

/// Every shape as gated delta rule, KDA and Mamba-2.
///
/// # Errors
/// When a shape is invalid.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let shapes = match args.shape[..] {
        [] => SHAPES.to_vec(),
        _ => args.shape.iter().map(shape_of).collect::<anyhow::Result<_>>()?,
    };
    let dtype = args.x_dtype;
    let of_shape = |shape| Form::ALL.map(|form| Subject { shape, form, dtype });
    Ok(shapes.into_iter().flat_map(of_shape).collect())
}

/// Times the planned kernel of a subject, rotating copies of all
/// operands that tokens and sequences have.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let [sequences, each, heads, key_heads, dim] = subject.shape;
    let plan = ctx.plan_linear_attention(&subject.attention())?;
    let (tokens, width) = (sequences * each, subject.dtype.bytes());
    let places: Vec<usize> = (0..copies(ctx, plan.bytes() as usize)).collect();
    let several = |bytes: &[u8]| places.iter().map(|_| ctx.upload(bytes)).collect::<Result<Vec<Buffer>, _>>();
    let rows = |features: usize| several(&normal_rows(subject.dtype, tokens, features));
    let (q, k, v) = (rows(key_heads * dim)?, rows(key_heads * dim)?, rows(heads * dim)?);
    let decays = if matches!(subject.form, Form::Kda) { dim } else { 1 };
    let factors = |value: f32, count: usize| several(&DType::F32.encode(&vec![value; count]));
    let (decay, beta) = (factors(-0.02, tokens * heads * decays)?, factors(0.5, tokens * heads)?);
    let zeros = |bytes: usize| places.iter().map(|_| ctx.allocate(bytes)).collect::<Result<Vec<Buffer>, _>>();
    let (mut states, mut d) = (zeros(sequences * heads * dim * dim * 4)?, zeros(tokens * heads * dim * width)?);
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    let stream = ctx.new_stream()?;
    let launch = |&place: &usize| {
        let args = LinearAttentionArgs::new(&q[place], &k[place], &v[place], &mut states[place], &mut d[place]);
        plan.run(&stream, args.decay(&decay[place]).beta(&beta[place]).workspace(&mut workspace))
    };
    let timing = time_launches(ctx, &stream, &places, args.pace(), launch)?;
    Ok(BenchRow {
        shape: subject.sizes(),
        format: subject.form.name().to_owned(),
        x_dtype: subject.dtype.to_string(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        flops: plan.flops() / timing.median,
        ..BenchRow::timed(ctx, timing, plan.bytes(), bandwidth, places.len())
    })
}

/// Each shape in every type, as gated delta rule, KDA and Mamba-2.
///
/// # Errors
/// When a shape is invalid.
pub fn cases(args: &verify::Args, _: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    let mut cases: Vec<Box<dyn TestCase>> = Vec::new();
    for sizes in &args.shape {
        let [sequences, tokens, heads, key_heads, dim] = shape_of(sizes)?;
        for (dtype, form) in DType::ALL.into_iter().flat_map(|dtype| Form::ALL.map(|form| (dtype, form))) {
            let case = LinearAttentionCase::new(&vec![tokens; sequences], (heads, key_heads), (dim, dim));
            let case = LinearAttentionCase { dtype, ..case };
            cases.push(Box::new(match form {
                Form::GatedDelta => case,
                Form::Kda => case.per_feature(),
                Form::Mamba => case.mamba(),
            }));
        }
    }
    Ok(cases)
}

/// Plan record of the shape as gated delta rule.
///
/// # Errors
/// When the shape is invalid.
pub fn explain(args: &explain::Args, ctx: &Context, sizes: &Sizes) -> anyhow::Result<PlanRecord> {
    let subject = Subject { shape: shape_of(sizes)?, form: Form::GatedDelta, dtype: args.x_dtype };
    Ok(ctx.explain_linear_attention(&subject.attention())?)
}
