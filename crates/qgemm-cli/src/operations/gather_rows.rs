//! `--op gather_rows` of the command: cases, explanation and measurement of row gathers.

use std::fmt;

use qgemm_api::{Buffer, Context, DType, Format, GatherRows, GatherRowsArgs, PlanRecord};
use qgemm_testkit::{GatherRowsCase, Selection, TestCase};

use crate::bench::subject::repeated_rows;
use crate::bench::timing::time_launches;
use crate::bench::{Args, BenchRow, copies_of_part};
use crate::choice::{FormatChoice, Shape, Sizes};
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "MxNxK: ids x rows x columns";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] = &["--format"];

/// Default ids, rows of the weight and columns: a decode step and a
/// prompt with the vocabulary of Llama 3.
const SHAPES: [Shape; 2] = [Shape { m: 1, n: 128_256, k: 4096 }, Shape { m: 512, n: 128_256, k: 4096 }];

/// A gather to measure: `m` ids among `n` rows of `k` columns.
pub struct Subject {
    shape: Shape,
    format: Format,
    d_dtype: DType,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}->{}", self.shape, self.format, self.d_dtype)
    }
}

/// Every shape in every format.
///
/// # Errors
/// When a shape is invalid, or a named format cannot store it.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let shapes = match args.shape[..] {
        [] => SHAPES.to_vec(),
        _ => args.shape.iter().map(Sizes::gemm).collect::<anyhow::Result<_>>()?,
    };
    let choice = args.format.unwrap_or(FormatChoice::One("q4_k".parse()?));
    let mut subjects = Vec::new();
    for (shape, format) in shapes.into_iter().flat_map(|shape| choice.formats().into_iter().map(move |f| (shape, f))) {
        match format.check_k(shape.k) {
            Ok(()) => subjects.push(Subject { shape, format, d_dtype: args.x_dtype }),
            Err(error) if choice == FormatChoice::All => eprintln!("left out: {error}"),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(subjects)
}

/// Times the planned kernel of a subject, with other ids and another
/// D for each launch.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let &Subject { shape: Shape { m, n, k }, format, d_dtype } = subject;
    let weight = ctx.load(&repeated_rows(format, n, k)?)?;
    let plan = ctx.plan_gather_rows(&GatherRows::new(&weight, m).d_dtype(d_dtype))?;
    let places: Vec<usize> = (0..copies_of_part(ctx, plan.bytes() as usize, plan.bytes() as usize)).collect();
    // A stride that is coprime to most numbers of rows.
    let ids = |place: usize| (0..m).map(|i| ((place * m + i) * 7919 % n) as u32).collect::<Vec<_>>();
    let ids: Vec<Buffer> = places.iter().map(|&place| ctx.upload(&ids(place))).collect::<Result<_, _>>()?;
    let bytes = m * k * d_dtype.bytes();
    let mut d: Vec<Buffer> = places.iter().map(|_| ctx.allocate(bytes)).collect::<Result<_, _>>()?;
    let mut status = ctx.allocate(16)?;
    let stream = ctx.new_stream()?;
    let launch =
        |&place: &usize| plan.run(&stream, GatherRowsArgs::new(&weight, &ids[place], &mut d[place], &mut status));
    let timing = time_launches(ctx, &stream, &places, args.pace(), launch)?;
    Ok(BenchRow {
        shape: subject.shape.to_string(),
        format: format.to_string(),
        x_dtype: d_dtype.to_string(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        ..BenchRow::timed(ctx, timing, plan.bytes(), bandwidth, places.len())
    })
}

/// Each shape, ids x rows x columns, with every format that can store
/// it and every type of D.
///
/// # Errors
/// When a shape is invalid, or a format cannot store it.
pub fn cases(args: &verify::Args, wanted: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    let mut cases: Vec<Box<dyn TestCase>> = Vec::new();
    for Shape { m, n, k } in args.shape.iter().map(Sizes::gemm).collect::<anyhow::Result<Vec<_>>>()? {
        for &format in &wanted.formats {
            match format.check_k(k) {
                Ok(()) => cases.extend(DType::ALL.map(|d_dtype| -> Box<dyn TestCase> {
                    Box::new(GatherRowsCase { d_dtype, ..GatherRowsCase::new(format, [m, n, k]) })
                })),
                Err(error) if args.format == FormatChoice::All => eprintln!("left out: {error}"),
                Err(error) => return Err(error.into()),
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
    let weight = args.weight(ctx, shape.n, shape.k)?;
    Ok(ctx.explain_gather_rows(&GatherRows::of_described(&weight, shape.m).d_dtype(args.x_dtype))?)
}
