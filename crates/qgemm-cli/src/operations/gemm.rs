//! `--op gemm` of the command: cases, explanation and measurement of products with a quantized weight.

use anyhow::ensure;
use qgemm_api::{Args as RunArgs, Buffer, Context, DType, Plan, PlanRecord, Quantization, QuantizedX, Weight, XFactor};

use qgemm_testkit::{Case, Selection, TestCase, WeightKind};

use crate::bench::subject::{self, Subject, normal_rows};
use crate::bench::timing::{Pace, Timing, time_launches};
use crate::bench::{Args, BenchRow, rotated};
use crate::choice::{self, FormatChoice, Shape, Sizes};
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "MxNxK: tokens x output features x input features";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] = &["a model", "--format", "--family", "--sweep-m", "--norm", "--x-format"];

/// Default shapes of products.
const SHAPES: [&str; 3] = ["1x4096x4096", "8x4096x4096", "512x4096x4096"];

/// The weights of the model, or random ones, with every shape.
///
/// # Errors
/// When a shape is invalid, or the model cannot be opened.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let shapes = match args.shape[..] {
        [] => SHAPES.iter().map(|shape| shape.parse()).collect::<anyhow::Result<_>>()?,
        _ => choice::gemm_shapes(&args.shape)?,
    };
    match &args.model {
        Some(path) => subject::from_model(path, args.opening, &shapes, args.format),
        None => subject::made_up(&shapes, args.format),
    }
}

/// Times the planned kernel of a subject.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let m = subject.shape.m;
    let bench = Bench::new(ctx, args, subject, m)?;
    let plan = ctx.plan(&args.problem(&bench.weights[0], m))?;
    let timing = bench.time(&plan, args.pace())?;
    Ok(BenchRow {
        shape: subject.shape.to_string(),
        format: subject.format().to_string(),
        x_dtype: args.x_name(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        unused_math: plan.unused_math().map(|math| math.name().to_owned()),
        flops: 2.0 * plan.macs() / timing.median,
        ..BenchRow::timed(ctx, timing, plan.bytes(), bandwidth, bench.weights.len())
    })
}

/// Quantized `x`, with its given factor if the format takes one.
///
/// # Errors
/// When memory runs out, or the device fails.
pub fn quantized_x(
    ctx: &Context,
    quantization: &Quantization,
    x: &Buffer,
) -> anyhow::Result<(QuantizedX, Option<Buffer>)> {
    let plan = ctx.plan_quantization(quantization)?;
    let mut made = ctx.allocate_x(&plan)?;
    let is_given = plan.parts().factor == XFactor::Given;
    let factor = if is_given { Some(ctx.upload(&[0.01f32])?) } else { None };
    let mut run = made.args(x);
    run.factor = factor.as_ref().map(Into::into);
    plan.run(&ctx.default_stream(), run)?;
    Ok((made, factor))
}

/// Copies of a weight on the device, with activations and
/// outputs.
pub struct Bench<'a> {
    pub ctx: &'a Context,
    pub weights: Vec<Weight>,
    x: Buffer,
    /// Quantized X and its given factor, if X is given quantized.
    quantized: Option<(QuantizedX, Option<Buffer>)>,
    gamma: Buffer,
    d_bytes: usize,
}

impl<'a> Bench<'a> {
    /// Buffers for up to `most` tokens.
    ///
    /// # Errors
    /// When memory runs out, or the weight cannot be made.
    pub fn new(ctx: &'a Context, args: &Args, subject: &Subject, most: usize) -> anyhow::Result<Self> {
        let Shape { n, k, .. } = subject.shape;
        let host = subject.weight()?;
        let weights = rotated(ctx, &host)?;
        let x_dtype = args.x_dtype;
        let x = ctx.upload(&normal_rows(x_dtype, most, k))?;
        let quantized = match args.x_format {
            None => None,
            Some(format) => Some(quantized_x(ctx, &Quantization::new(most, k, x_dtype, format), &x)?),
        };
        let gamma = ctx.upload(&x_dtype.encode(&vec![1.0; k]))?;
        Ok(Self { ctx, weights, x, quantized, gamma, d_bytes: most * n * x_dtype.bytes() })
    }

    /// Times launches of a plan, rotating the copies.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn time(&self, plan: &Plan, pace: Pace) -> anyhow::Result<Timing> {
        let mut d = self.ctx.allocate(self.d_bytes)?;
        let mut workspace = self.ctx.workspace(plan.workspace_bytes())?;
        let stream = self.ctx.new_stream()?;
        let launch = |weight: &Weight| {
            let mut args = match &self.quantized {
                None => RunArgs::new(&self.x, weight, &mut d),
                Some((x, _)) => RunArgs::new(x, weight, &mut d),
            };
            args.x_factor = self.quantized.as_ref().and_then(|(_, factor)| factor.as_ref()).map(Into::into);
            args.gamma = plan.op().norm.map(|_| (&self.gamma).into());
            plan.run(&stream, args.workspace(&mut workspace))
        };
        Ok(time_launches(self.ctx, &stream, &self.weights, pace, launch)?)
    }
}

/// Each shape with every format that can store it. It is an error
/// if a named format cannot.
///
/// # Errors
/// When a shape is invalid, or a format cannot store it.
pub fn cases(args: &verify::Args, wanted: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    let mut cases: Vec<Box<dyn TestCase>> = Vec::new();
    for shape in choice::gemm_shapes(&args.shape)? {
        for &format in &wanted.formats {
            if let Err(error) = format.check_k(shape.k) {
                ensure!(args.format == FormatChoice::All, "{shape}: {error}");
                eprintln!("left out: {error}");
                continue;
            }
            for x_dtype in DType::ALL {
                let case = Case::new(format, shape.m, shape.n, shape.k);
                let case = match (args.x_format, args.norm) {
                    (Some(format), None) => case.with_x_format(format),
                    (normed_format, _) => Case { normed_format, ..case },
                };
                let (weights, norm) = (WeightKind::Raw, args.norm);
                cases.push(Box::new(Case { x_dtype, norm, weights, family: wanted.family, ..case }));
            }
        }
    }
    Ok(cases)
}

/// Plan record of the shape.
///
/// # Errors
/// When the shape is invalid.
pub fn explain(args: &explain::Args, ctx: &Context, sizes: &Sizes) -> anyhow::Result<PlanRecord> {
    let shape = sizes.gemm()?;
    Ok(ctx.explain(&args.state(args.weight(ctx, shape.n, shape.k)?.problem(shape.m)))?)
}
