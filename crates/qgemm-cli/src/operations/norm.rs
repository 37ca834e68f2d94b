//! `--op norm` of the command: cases, explanation and measurement of norms.

use std::fmt;

use qgemm_api::{
    Buffer, Context, DType, GateFunction, Norm, NormArgs, NormFunction, NormKind, PlanRecord, QuantizedX, XFactor,
    XFormat,
};

use qgemm_testkit::{NormCase, Selection, TestCase};

use crate::bench::timing::time_launches;
use crate::bench::{Args, BenchRow, copies};
use crate::choice::Sizes;
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "RxC: rows x columns";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] = &["--from", "--to", "--x-format"];

/// Default rows and columns.
const SHAPES: [[usize; 2]; 3] = [[1, 4096], [512, 4096], [4096, 8192]];

/// A norm to measure, with a gamma in X's type. LayerNorm has a
/// beta.
#[derive(Clone, Copy)]
pub struct Subject {
    rows: usize,
    columns: usize,
    from: DType,
    to: XFormat,
    kind: NormKind,
    /// Whether a residual in X's type is added, with the sum in its
    /// memory.
    adds: bool,
    /// Whether the result is multiplied by the SiLU of a gate.
    gated: bool,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{} {}", self.rows, self.columns, self.description())
    }
}

/// Every shape as RMSNorm, plain, with a residual and with a gate, and
/// as LayerNorm. The default type is f16.
///
/// # Errors
/// When a shape is invalid.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let shapes = match args.shape[..] {
        [] => SHAPES.to_vec(),
        _ => args.shape.iter().map(|sizes| sizes.norm()).collect::<anyhow::Result<_>>()?,
    };
    let from = args.from.unwrap_or(DType::F16);
    let to = args.x_format.unwrap_or(args.to.unwrap_or(from).into());
    let of_shape = |[rows, columns]: [usize; 2]| {
        let plain = Subject { rows, columns, from, to, kind: NormKind::Rms, adds: false, gated: false };
        let all = [
            plain,
            Subject { adds: true, ..plain },
            Subject { gated: true, ..plain },
            Subject { kind: NormKind::Layer, ..plain },
        ];
        // Quantized results have no gate.
        all.into_iter().filter(move |subject| !subject.gated || to.plain().is_some())
    };
    Ok(shapes.into_iter().flat_map(of_shape).collect())
}

impl Subject {
    fn description(&self) -> String {
        let added = if self.adds {
            " residual"
        } else if self.gated {
            " gate"
        } else {
            ""
        };
        format!("{} {}->{}{added}", self.kind, self.from, self.to)
    }

    fn norm(&self) -> Norm {
        let function = NormFunction::new(self.kind, 1e-6).gamma(self.from);
        let function = if self.kind == NormKind::Layer { function.beta(self.from) } else { function };
        let norm = Norm::new(self.rows, self.columns, self.from, function).d_format(self.to);
        let norm = if self.gated { norm.gate(GateFunction::Silu) } else { norm };
        if self.adds { norm.residual(self.from).sum_in_place() } else { norm }
    }
}

/// Times the planned kernel of a subject, rotating copies of the
/// matrices.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let &Subject { rows, columns, from, to, kind, adds, gated } = subject;
    let plan = ctx.plan_norm(&subject.norm())?;
    let x_bytes = rows * columns * from.bytes();
    let d_bytes = to.plain().map_or(0, |dtype| rows * columns * dtype.bytes());
    let places: Vec<usize> = (0..copies(ctx, plan.bytes() as usize)).collect();
    let values: Vec<f32> = (0..rows * columns).map(|i| (i % 37) as f32 * 0.1 - 1.7).collect();
    let encoded = from.encode(&values);
    let uploaded = || places.iter().map(|_| ctx.upload(&encoded)).collect::<Result<Vec<Buffer>, _>>();
    let x = uploaded()?;
    let z = if gated { uploaded()? } else { Vec::new() };
    let sum_bytes = if adds { x_bytes } else { 0 };
    let mut d: Vec<Buffer> = places.iter().map(|_| ctx.allocate(d_bytes)).collect::<Result<_, _>>()?;
    // They grow by X with every run, which does not change the time.
    let mut sum: Vec<Buffer> = places.iter().map(|_| ctx.allocate(sum_bytes)).collect::<Result<_, _>>()?;
    let of_columns = ctx.upload(&from.encode(&vec![1.0; columns]))?;
    let mut planes: Vec<QuantizedX> = match to.plain() {
        Some(_) => Vec::new(),
        None => places.iter().map(|_| ctx.allocate_normed_x(&plan)).collect::<Result<_, _>>()?,
    };
    let is_given = to.parts(false, None).is_some_and(|parts| parts.factor == XFactor::Given);
    let factor = is_given.then(|| ctx.upload(&[0.02f32])).transpose()?;
    let stream = ctx.new_stream()?;
    let launch = |&place: &usize| {
        let args = match planes.get_mut(place) {
            Some(planes) => NormArgs::quantized(&x[place], planes),
            None => NormArgs::new(&x[place], &mut d[place]),
        };
        let mut args = args.gamma(&of_columns);
        args.factor = factor.as_ref().map(Into::into);
        if kind == NormKind::Layer {
            args = args.beta(&of_columns);
        }
        args.gate = z.get(place).map(Into::into);
        if adds {
            args = args.sum(&mut sum[place]);
        }
        plan.run(&stream, args)
    };
    let timing = time_launches(ctx, &stream, &places, args.pace(), launch)?;
    Ok(BenchRow {
        shape: format!("{rows}x{columns}"),
        format: subject.description(),
        x_dtype: from.to_string(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        ..BenchRow::timed(ctx, timing, plan.bytes(), bandwidth, places.len())
    })
}

/// Each shape as RMSNorm and LayerNorm, with and without a
/// residual, for every pair of types or from every type to a
/// quantized format.
///
/// # Errors
/// When a shape is invalid, or a format cannot store it.
pub fn cases(args: &verify::Args, _: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    let mut cases: Vec<Box<dyn TestCase>> = Vec::new();
    for sizes in &args.shape {
        let [rows, columns] = sizes.norm()?;
        for (x, d) in DType::ALL.into_iter().flat_map(|x| DType::ALL.map(|d| (x, d))) {
            for kind in NormKind::ALL {
                let case = NormCase::new(rows, columns, kind, x, d);
                let case = match args.x_format {
                    Some(_) if d != x => continue,
                    Some(format) => case.quantized(format),
                    None => case,
                };
                cases.push(Box::new(case));
                cases.push(Box::new(case.adding(x, x)));
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
    let [rows, columns] = sizes.norm()?;
    let function = NormFunction::rms(1e-6).gamma(args.x_dtype);
    Ok(ctx.explain_norm(&Norm::new(rows, columns, args.x_dtype, function))?)
}
