//! `--op short_conv` of the command: cases, explanation and measurement of short
//! convolutions.

use std::fmt;

use qgemm_api::{Buffer, Context, DType, PlanRecord, Queries, ShortConv, ShortConvArgs};
use qgemm_testkit::{Selection, ShortConvCase, TestCase};

use crate::bench::timing::time_launches;
use crate::bench::{Args, BenchRow, copies};
use crate::choice::Sizes;
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "SxTxCxW: sequences x tokens of each x channels x kernel width";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] = &[];

/// Default shapes: steps of Qwen3-Next and a prompt, a step of LFM2.
const SHAPES: [[usize; 4]; 5] =
    [[1, 1, 8192, 4], [64, 1, 8192, 4], [1024, 1, 8192, 4], [1, 4096, 8192, 4], [64, 1, 2048, 3]];

/// Sequences to convolve, with state. Kernels of four taps have a bias
/// and SiLU; narrower ones have gates, as LFM2.
pub struct Subject {
    shape: [usize; 4],
    dtype: DType,
}

impl Subject {
    fn sizes(&self) -> String {
        self.shape.map(|size| size.to_string()).join("x")
    }

    fn is_gated(&self) -> bool {
        self.shape[3] < 4
    }

    fn conv(&self) -> ShortConv {
        let [sequences, tokens, channels, width] = self.shape;
        let conv = ShortConv::new(self.dtype, channels, width, Queries::each(sequences, tokens)).state(sequences);
        if self.is_gated() { conv.input_gate().output_gate() } else { conv.bias().silu() }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.sizes(), self.dtype)
    }
}

fn shape_of(sizes: &Sizes) -> anyhow::Result<[usize; 4]> {
    sizes.exactly("short_conv", "SxTxCxW, such as 64x1x8192x4")
}

/// Every shape, in `--x-dtype`.
///
/// # Errors
/// When a shape is invalid.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let shapes = match args.shape[..] {
        [] => SHAPES.to_vec(),
        _ => args.shape.iter().map(shape_of).collect::<anyhow::Result<_>>()?,
    };
    Ok(shapes.into_iter().map(|shape| Subject { shape, dtype: args.x_dtype }).collect())
}

/// Times the planned kernels of a subject, rotating copies of all
/// large operands.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let [sequences, tokens, channels, width] = subject.shape;
    let plan = ctx.plan_short_conv(&subject.conv())?;
    let element = subject.dtype.bytes();
    let (rows, states) = (sequences * tokens * channels * element, sequences * (width - 1) * channels * element);
    let places: Vec<usize> = (0..copies(ctx, plan.bytes() as usize)).collect();
    let several = |bytes: usize| places.iter().map(|_| ctx.allocate(bytes)).collect::<Result<Vec<Buffer>, _>>();
    let gates = if subject.is_gated() { rows } else { 0 };
    let (x, input_gate, output_gate) = (several(rows)?, several(gates)?, several(gates)?);
    let (mut d, mut state) = (several(rows)?, several(states)?);
    let weight = ctx.upload(&vec![0.25f32; channels * width])?;
    let bias = ctx.upload(&vec![0.5f32; channels])?;
    let slots = ctx.upload(&(0..sequences as i32).collect::<Vec<_>>())?;
    let stream = ctx.new_stream()?;
    let launch = |&place: &usize| {
        let args = ShortConvArgs::new(&x[place], &weight, &mut d[place]).state(&mut state[place]).slots(&slots);
        let args = match subject.is_gated() {
            true => args.input_gate(&input_gate[place]).output_gate(&output_gate[place]),
            false => args.bias(&bias),
        };
        plan.run(&stream, args)
    };
    let timing = time_launches(ctx, &stream, &places, args.pace(), launch)?;
    Ok(BenchRow {
        shape: subject.sizes(),
        format: if subject.is_gated() { "gates" } else { "bias silu" }.to_owned(),
        x_dtype: subject.dtype.to_string(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        ..BenchRow::timed(ctx, timing, plan.bytes(), bandwidth, places.len())
    })
}

/// Each shape in every type, with and without gates.
///
/// # Errors
/// When a shape is invalid.
pub fn cases(args: &verify::Args, _: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    let mut cases: Vec<Box<dyn TestCase>> = Vec::new();
    for sizes in &args.shape {
        let [sequences, tokens, channels, width] = shape_of(sizes)?;
        for (dtype, gates) in
            DType::ALL.into_iter().flat_map(|dtype| [[false; 2], [true; 2]].map(|gates| (dtype, gates)))
        {
            let case = ShortConvCase::new([sequences, tokens], channels, width);
            cases.push(Box::new(ShortConvCase { dtype, gates, ..case }));
        }
    }
    Ok(cases)
}

/// Plan record of the shape.
///
/// # Errors
/// When the shape is invalid.
pub fn explain(args: &explain::Args, ctx: &Context, sizes: &Sizes) -> anyhow::Result<PlanRecord> {
    Ok(ctx.explain_short_conv(&Subject { shape: shape_of(sizes)?, dtype: args.x_dtype }.conv())?)
}
