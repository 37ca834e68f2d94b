//! `--op quantize` of the command: cases, explanation and measurement of quantization of activations.

use std::fmt;

use qgemm_api::{Buffer, Context, DType, PlanRecord, Quantization, QuantizedX, XFactor, XFormat};
use qgemm_testkit::{QuantizeCase, Selection, TestCase};

use crate::bench::timing::time_launches;
use crate::bench::{Args, BenchRow, copies};
use crate::choice::Sizes;
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "RxC: rows x columns";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] = &["--x-format"];

/// Default rows and columns.
const SHAPES: [[usize; 2]; 4] = [[1, 7168], [64, 7168], [512, 7168], [4096, 7168]];

/// A quantization to measure.
pub struct Subject {
    rows: usize,
    columns: usize,
    from: DType,
    to: XFormat,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{} {}->{}", self.rows, self.columns, self.from, self.to)
    }
}

/// Every shape from `--x-dtype`, in the given format or in all.
///
/// # Errors
/// When a shape is invalid.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let shapes: Vec<[usize; 2]> = match args.shape[..] {
        [] => SHAPES.to_vec(),
        _ => args.shape.iter().map(|sizes| sizes.matrix("quantize")).collect::<anyhow::Result<_>>()?,
    };
    let formats: Vec<XFormat> =
        QuantizeCase::formats().filter(|&to| args.x_format.is_none_or(|format| format == to)).collect();
    let of_shape =
        |[rows, columns]: [usize; 2]| formats.iter().map(move |&to| Subject { rows, columns, from: args.x_dtype, to });
    Ok(shapes.into_iter().flat_map(of_shape).collect())
}

/// Times the planned kernel of a subject, rotating copies of X
/// and of the result.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let &Subject { rows, columns, from, to } = subject;
    let plan = ctx.plan_quantization(&Quantization::new(rows, columns, from, to))?;
    let mixed = |i: usize| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f32 * 1e-6 - 8.0;
    let values = from.encode(&(0..rows * columns).map(mixed).collect::<Vec<_>>());
    let places: Vec<usize> = (0..copies(ctx, plan.bytes() as usize)).collect();
    let x: Vec<Buffer> = places.iter().map(|_| ctx.upload(&values)).collect::<Result<_, _>>()?;
    let mut results: Vec<QuantizedX> = places.iter().map(|_| ctx.allocate_x(&plan)).collect::<Result<_, _>>()?;
    let factor = match plan.parts().factor {
        XFactor::Given => Some(ctx.upload(&[0.02f32])?),
        _ => None,
    };
    let stream = ctx.new_stream()?;
    let launch = |&place: &usize| {
        let mut args = results[place].args(&x[place]);
        args.factor = factor.as_ref().map(Into::into);
        plan.run(&stream, args)
    };
    let timing = time_launches(ctx, &stream, &places, args.pace(), launch)?;
    Ok(BenchRow {
        shape: format!("{rows}x{columns}"),
        format: format!("{from}->{to}"),
        x_dtype: from.to_string(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        ..BenchRow::timed(ctx, timing, plan.bytes(), bandwidth, places.len())
    })
}

/// Each shape with every type of X and format.
///
/// # Errors
/// When a shape is invalid, or a format cannot store it.
pub fn cases(args: &verify::Args, _: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    let mut cases: Vec<Box<dyn TestCase>> = Vec::new();
    for sizes in &args.shape {
        let [rows, columns] = sizes.matrix("quantize")?;
        for to in QuantizeCase::formats().filter(|&to| args.x_format.is_none_or(|format| format == to)) {
            cases.extend(
                DType::ALL.map(|from| -> Box<dyn TestCase> { Box::new(QuantizeCase::new(rows, columns, from, to)) }),
            );
        }
    }
    Ok(cases)
}

/// Plan record of the shape.
///
/// # Errors
/// When the shape is invalid.
pub fn explain(args: &explain::Args, ctx: &Context, sizes: &Sizes) -> anyhow::Result<PlanRecord> {
    let [rows, columns] = sizes.matrix("quantize")?;
    Ok(ctx.explain_quantization(&Quantization::new(
        rows,
        columns,
        args.x_dtype,
        args.x_format.unwrap_or(XFormat::Q8_0),
    ))?)
}
