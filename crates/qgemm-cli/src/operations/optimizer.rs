//! `--op optimizer` of the command: cases, explanation and measurement of optimizer steps.

use std::fmt;

use qgemm_api::{Buffer, Context, DType, Optimizer, OptimizerArgs, OptimizerStep, PlanRecord, UpdateKind, UpdateRule};

use qgemm_testkit::{OptimizerCase, Selection, TestCase};

use crate::bench::timing::time_launches;
use crate::bench::{Args, BenchRow, copies};
use crate::choice::Sizes;
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "N: parameters";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] = &[];

/// Default numbers of parameters: a small and a large layer.
const LENGTHS: [usize; 2] = [1 << 20, 1 << 26];

/// A step to measure: a gradient of `--x-dtype` and a copy in bf16.
pub struct Subject {
    len: usize,
    kind: UpdateKind,
    gradient: DType,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.len, self.description())
    }
}

impl Subject {
    fn description(&self) -> String {
        format!("{} {}", self.kind, self.gradient)
    }

    fn optimizer(&self) -> Optimizer {
        let optimizer = match self.kind {
            UpdateKind::AdamW => Optimizer::adamw(self.len),
            UpdateKind::Sgd => Optimizer::sgd(self.len),
            UpdateKind::Momentum => Optimizer::sgd(self.len).rule(UpdateRule::Sgd { momentum: 0.9 }),
        };
        optimizer.gradient_dtype(self.gradient).copy(DType::BF16)
    }
}

/// Every rule at every length.
///
/// # Errors
/// When a shape is invalid.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let lengths = match args.shape[..] {
        [] => LENGTHS.to_vec(),
        _ => args.shape.iter().map(|sizes| sizes.optimizer()).collect::<anyhow::Result<_>>()?,
    };
    let gradient = args.x_dtype;
    let of = |len| UpdateKind::ALL.map(|kind| Subject { len, kind, gradient });
    Ok(lengths.into_iter().flat_map(of).collect())
}

/// Times the planned kernel of a subject, rotating copies of all
/// operands.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let &Subject { len, kind, gradient } = subject;
    let plan = ctx.plan_optimizer(&subject.optimizer())?;
    let places: Vec<usize> = (0..copies(ctx, plan.bytes() as usize)).collect();
    let several = |bytes: usize| places.iter().map(|_| ctx.allocate(bytes)).collect::<Result<Vec<Buffer>, _>>();
    let f32_bytes = len * DType::F32.bytes();
    let (gradients, mut copy) = (several(len * gradient.bytes())?, several(len * DType::BF16.bytes())?);
    let [mut weights, mut moment1, mut moment2] = [several(f32_bytes)?, several(f32_bytes)?, several(f32_bytes)?];
    let step = ctx.upload(&plan.step(&OptimizerStep::new(10, 1e-3).weight_decay(0.1))?)?;
    let stream = ctx.new_stream()?;
    let launch = |&place: &usize| {
        let mut args = OptimizerArgs::new(&mut weights[place], &gradients[place], &step).copy(&mut copy[place]);
        if kind.moments() > 0 {
            args = args.moment1(&mut moment1[place]);
        }
        if kind.moments() > 1 {
            args = args.moment2(&mut moment2[place]);
        }
        plan.run(&stream, args)
    };
    let timing = time_launches(ctx, &stream, &places, args.pace(), launch)?;
    Ok(BenchRow {
        shape: len.to_string(),
        format: subject.description(),
        x_dtype: gradient.to_string(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        ..BenchRow::timed(ctx, timing, plan.bytes(), bandwidth, places.len())
    })
}

/// Each length with every rule and gradient type.
///
/// # Errors
/// When a shape is invalid, or a format cannot store it.
pub fn cases(args: &verify::Args, _: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    let mut cases: Vec<Box<dyn TestCase>> = Vec::new();
    for sizes in &args.shape {
        let len = sizes.optimizer()?;
        for (kind, dtype) in UpdateKind::ALL.into_iter().flat_map(|kind| DType::ALL.map(|dtype| (kind, dtype))) {
            cases.push(Box::new(OptimizerCase { copy: Some(DType::BF16), ..OptimizerCase::new(len, kind, dtype) }));
        }
    }
    Ok(cases)
}

/// Plan record of the shape.
///
/// # Errors
/// When the shape is invalid.
pub fn explain(args: &explain::Args, ctx: &Context, sizes: &Sizes) -> anyhow::Result<PlanRecord> {
    let optimizer = Optimizer::adamw(sizes.optimizer()?).gradient_dtype(args.x_dtype);
    Ok(ctx.explain_optimizer(&optimizer.copy(DType::BF16))?)
}
