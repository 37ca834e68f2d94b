//! `--op merge_attention` of the command: cases, explanation and measurement of merges of
//! partial attention results.

use std::fmt;

use qgemm_api::{Buffer, Context, DType, MergeAttention, MergeAttentionArgs, PlanRecord};
use qgemm_testkit::{MergeAttentionCase, Selection, TestCase};

use crate::bench::timing::time_launches;
use crate::bench::{Args, BenchRow, copies};
use crate::choice::Sizes;
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "PxTxHxD: parts x tokens x heads x head dimension";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] = &["--to"];

/// Default parts, tokens, heads and head dimension: a cascade's decode
/// step, and prefill over four devices' keys.
const SHAPES: [[usize; 4]; 3] = [[2, 64, 32, 128], [4, 4096, 32, 128], [8, 1024, 16, 512]];

/// A merge to measure, with the log-sum-exp.
pub struct Subject {
    shape: [usize; 4],
    from: DType,
    to: DType,
}

impl Subject {
    fn sizes(&self) -> String {
        self.shape.map(|size| size.to_string()).join("x")
    }

    fn description(&self) -> String {
        format!("{}->{}", self.from, self.to)
    }

    fn merge(&self) -> MergeAttention {
        let [parts, tokens, heads, dim] = self.shape;
        MergeAttention::new(self.from, parts, tokens, heads, dim).d_dtype(self.to).log_sum_exp()
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.sizes(), self.description())
    }
}

fn shape_of(sizes: &Sizes) -> anyhow::Result<[usize; 4]> {
    sizes.exactly("merge_attention", "PxTxHxD, such as 4x4096x32x128")
}

/// Every shape, from `--x-dtype` to `--to`.
///
/// # Errors
/// When a shape is invalid.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let shapes = match args.shape[..] {
        [] => SHAPES.to_vec(),
        _ => args.shape.iter().map(shape_of).collect::<anyhow::Result<_>>()?,
    };
    let (from, to) = (args.x_dtype, args.to.unwrap_or(args.x_dtype));
    Ok(shapes.into_iter().map(|shape| Subject { shape, from, to }).collect())
}

/// Times the planned kernel of a subject, rotating copies of all
/// operands.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let [parts, tokens, heads, dim] = subject.shape;
    let plan = ctx.plan_merge_attention(&subject.merge())?;
    let rows = tokens * heads;
    let places: Vec<usize> = (0..copies(ctx, plan.bytes() as usize)).collect();
    let several = |bytes: usize| places.iter().map(|_| ctx.allocate(bytes)).collect::<Result<Vec<Buffer>, _>>();
    // Zeros: equal weights of all parts, which are all read.
    let partial = several(parts * rows * dim * subject.from.bytes())?;
    let partial_lse = several(parts * rows * DType::F32.bytes())?;
    let (mut d, mut lse) = (several(rows * dim * subject.to.bytes())?, several(rows * DType::F32.bytes())?);
    let stream = ctx.new_stream()?;
    let launch = |&place: &usize| {
        let args = MergeAttentionArgs::new(&partial[place], &partial_lse[place], &mut d[place]);
        plan.run(&stream, args.lse(&mut lse[place]))
    };
    let timing = time_launches(ctx, &stream, &places, args.pace(), launch)?;
    Ok(BenchRow {
        shape: subject.sizes(),
        format: subject.description(),
        x_dtype: subject.from.to_string(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        ..BenchRow::timed(ctx, timing, plan.bytes(), bandwidth, places.len())
    })
}

/// Each shape from every type to every type.
///
/// # Errors
/// When a shape is invalid.
pub fn cases(args: &verify::Args, _: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    let mut cases: Vec<Box<dyn TestCase>> = Vec::new();
    for sizes in &args.shape {
        let [parts, tokens, heads, dim] = shape_of(sizes)?;
        for (dtype, d_dtype) in DType::ALL.into_iter().flat_map(|dtype| DType::ALL.map(|d_dtype| (dtype, d_dtype))) {
            let case = MergeAttentionCase::new(parts, [tokens, heads, dim]);
            cases.push(Box::new(MergeAttentionCase { dtype, d_dtype, ..case }));
        }
    }
    Ok(cases)
}

/// Plan record of the shape.
///
/// # Errors
/// When the shape is invalid.
pub fn explain(args: &explain::Args, ctx: &Context, sizes: &Sizes) -> anyhow::Result<PlanRecord> {
    let (shape, from) = (shape_of(sizes)?, args.x_dtype);
    Ok(ctx.explain_merge_attention(&Subject { shape, from, to: from }.merge())?)
}
