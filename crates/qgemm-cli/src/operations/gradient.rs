//! `--op gradient` of the command: cases, explanation and measurement of gradients through a packed weight.

use anyhow::ensure;
use qgemm_api::{Context, DType, Gradient, GradientArgs, PlanRecord, Weight};

use qgemm_testkit::{GradientCase, Selection, TestCase};

use crate::bench::subject::{self, Subject, normal_rows};
use crate::bench::timing::time_launches;
use crate::bench::{Args, BenchRow, rotated};
use crate::choice::{self, FormatChoice, Shape, Sizes};
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "MxNxK of the forward product: tokens x output features x input features";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] = &["--format"];

/// Default tokens, output features and input features.
const SHAPES: [&str; 2] = ["512x4096x4096", "4096x4096x4096"];

/// Every shape with every format of the options.
///
/// # Errors
/// When a shape is invalid.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let shapes: Vec<Shape> = match args.shape[..] {
        [] => SHAPES.iter().map(|shape| shape.parse()).collect::<anyhow::Result<_>>()?,
        _ => choice::gemm_shapes(&args.shape)?,
    };
    subject::made_up(&shapes, args.format)
}

/// Times the planned kernel of a subject with dY and dX in one
/// type, rotating copies of the weight.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let (Shape { m, n, k }, dtype) = (subject.shape, args.x_dtype);
    let host = subject.weight()?;
    let weights = rotated(ctx, &host)?;
    let plan = ctx.plan_gradient(&weights[0], &Gradient::new(m, dtype, dtype))?;
    let dy = ctx.upload(&normal_rows(dtype, m, n))?;
    let mut dx = ctx.allocate(m * k * dtype.bytes())?;
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    let stream = ctx.new_stream()?;
    let launch = |weight: &Weight| plan.run(&stream, GradientArgs::new(&dy, weight, &mut dx).workspace(&mut workspace));
    let timing = time_launches(ctx, &stream, &weights, args.pace(), launch)?;
    Ok(BenchRow {
        shape: subject.shape.to_string(),
        format: subject.format().to_string(),
        x_dtype: dtype.to_string(),
        kernel: format!("{} parts of {}", plan.parts(), plan.kernel_name()),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        flops: 2.0 * m as f64 * n as f64 * k as f64 / timing.median,
        ..BenchRow::timed(ctx, timing, plan.bytes(), bandwidth, weights.len())
    })
}

/// Each shape with every type of dY and every format that can
/// store it. It is an error if a named format cannot.
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
            for dtype in DType::ALL {
                cases.push(Box::new(GradientCase::new(format, shape.m, shape.n, shape.k).of_types(dtype, dtype)));
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
    let gradient = Gradient::new(shape.m, args.x_dtype, args.x_dtype);
    Ok(ctx.explain_gradient_of(&args.weight(ctx, shape.n, shape.k)?, &gradient)?)
}
