//! `--op convert` of the command: cases, explanation and measurement of conversions.

use std::fmt;

use anyhow::ensure;
use qgemm_api::{Buffer, Context, Conversion, ConversionArgs, DType, PlanRecord};

use qgemm_testkit::{ConvertCase, ConvertLayout, Selection, TestCase};

use crate::bench::subject::normal_rows;
use crate::bench::timing::time_launches;
use crate::bench::{Args, BenchRow, copies};
use crate::choice::Sizes;
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "RxC: rows x columns";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] = &["--from", "--to", "--transposed", "--gathered", "--row-factors"];

/// Default rows and columns.
const SHAPES: [[usize; 2]; 2] = [[512, 4096], [4096, 7168]];

/// A conversion to measure.
pub struct Subject {
    rows: usize,
    columns: usize,
    from: DType,
    to: DType,
    transposed: bool,
    gathered: bool,
    row_factors: bool,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{} {}", self.rows, self.columns, self.types())
    }
}

/// Every shape with every pair of types that the options allow.
///
/// # Errors
/// When a shape is invalid, or no pair of types is left.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let shapes = match args.shape[..] {
        [] => SHAPES.to_vec(),
        _ => args.shape.iter().map(|sizes| sizes.convert()).collect::<anyhow::Result<_>>()?,
    };
    let types = |given: Option<DType>| given.map_or(DType::ALL.to_vec(), |dtype| vec![dtype]);
    let mut subjects = Vec::new();
    for [rows, columns] in shapes {
        for from in types(args.from) {
            for to in types(args.to) {
                // Only f16 has row factors.
                if args.row_factors && to != DType::F16 {
                    continue;
                }
                let &Args { transposed, gathered, row_factors, .. } = args;
                subjects.push(Subject { rows, columns, from, to, transposed, gathered, row_factors });
            }
        }
    }
    ensure!(!subjects.is_empty(), "--row-factors: expected `--to f16`");
    Ok(subjects)
}

impl Subject {
    /// Types and options in tables.
    fn types(&self) -> String {
        let mut text = format!("{}->{}", self.from, self.to);
        let flags = [(self.transposed, "transposed"), (self.gathered, "gathered"), (self.row_factors, "row-factors")];
        for (_, name) in flags.iter().filter(|(on, _)| *on) {
            text.push(' ');
            text.push_str(name);
        }
        text
    }

    fn conversion(&self) -> Conversion {
        let mut conversion = Conversion::new(self.rows, self.columns, self.from, self.to);
        if self.transposed {
            conversion = conversion.x_transposed();
        }
        if self.gathered {
            conversion = conversion.gathered(self.columns);
        }
        if self.row_factors { conversion.row_factors() } else { conversion }
    }
}

/// Times the planned kernel of a subject, rotating copies of X and D.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let &Subject { rows, columns, from, to, .. } = subject;
    let plan = ctx.plan_conversion(&subject.conversion())?;
    let (x_bytes, d_bytes) = (rows * columns * from.bytes(), rows * columns * to.bytes());
    let places: Vec<usize> = (0..copies(ctx, x_bytes + d_bytes)).collect();
    let values = normal_rows(from, rows, columns);
    let x: Vec<Buffer> = places.iter().map(|_| ctx.upload(&values)).collect::<Result<_, _>>()?;
    let mut d: Vec<Buffer> = places.iter().map(|_| ctx.allocate(d_bytes)).collect::<Result<_, _>>()?;
    let reverse: Vec<u8> = (0..columns as u32).rev().flat_map(u32::to_le_bytes).collect();
    let order = if subject.gathered { Some(ctx.upload(&reverse)?) } else { None };
    let mut row_factors = if subject.row_factors { Some(ctx.allocate(rows * 4)?) } else { None };
    let stream = ctx.new_stream()?;
    let launch = |&place: &usize| {
        let mut args = ConversionArgs::new(&x[place], &mut d[place]);
        args.order = order.as_ref().map(Into::into);
        args.row_factors = row_factors.as_mut().map(Into::into);
        plan.run(&stream, args)
    };
    let timing = time_launches(ctx, &stream, &places, args.pace(), launch)?;
    Ok(BenchRow {
        shape: format!("{rows}x{columns}"),
        format: subject.types(),
        x_dtype: from.to_string(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        ..BenchRow::timed(ctx, timing, plan.bytes(), bandwidth, places.len())
    })
}

/// Each shape with every pair of types, plain and transposed.
///
/// # Errors
/// When a shape is invalid, or a format cannot store it.
pub fn cases(args: &verify::Args, _: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    let mut cases: Vec<Box<dyn TestCase>> = Vec::new();
    for sizes in &args.shape {
        let [rows, columns] = sizes.convert()?;
        for (from, to) in DType::ALL.into_iter().flat_map(|from| DType::ALL.map(|to| (from, to))) {
            for x_transposed in [false, true] {
                let layout = ConvertLayout { x_transposed, ..ConvertLayout::default() };
                cases.push(Box::new(ConvertCase { layout, ..ConvertCase::new(rows, columns, from, to) }));
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
    let [rows, columns] = sizes.convert()?;
    Ok(ctx.explain_conversion(&Conversion::new(rows, columns, DType::F32, args.x_dtype))?)
}
