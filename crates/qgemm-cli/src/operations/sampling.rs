//! `--op sampling` of the command: cases, explanation and measurement of sampling.

use std::fmt;

use qgemm_api::{Context, DType, PlanRecord, Sampling, SamplingArgs, SamplingParameters};
use qgemm_testkit::{SamplingCase, SamplingRules, Selection, TestCase};

use crate::bench::timing::time_launches;
use crate::bench::{Args, BenchRow, copies};
use crate::choice::Sizes;
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "RxV: rows x vocabulary";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] = &[];

/// Default rows and vocabularies: a session and a batch, with the
/// vocabulary of Qwen 3.
const SHAPES: [[usize; 2]; 2] = [[1, 151_936], [32, 151_936]];

/// Earlier tokens of a measured row with a penalty.
const EARLIER: usize = 1024;

/// Parameters that are measured.
#[derive(Clone, Copy)]
enum Rules {
    Argmax,
    Temperature,
    TopKTopP,
    Penalty,
}

impl Rules {
    const ALL: [Self; 4] = [Self::Argmax, Self::Temperature, Self::TopKTopP, Self::Penalty];

    fn name(self) -> &'static str {
        match self {
            Self::Argmax => "argmax",
            Self::Temperature => "temperature",
            Self::TopKTopP => "top-k, top-p",
            Self::Penalty => "penalty, top-k, top-p",
        }
    }

    fn parameters(self) -> SamplingParameters {
        let plain = SamplingParameters::default();
        let warm = SamplingParameters { temperature: 0.8, seed: 7, ..plain };
        let cut = SamplingParameters { top_k: 40, top_p: 0.95, ..warm };
        match self {
            Self::Argmax => plain,
            Self::Temperature => warm,
            Self::TopKTopP => cut,
            Self::Penalty => SamplingParameters { repetition_penalty: 1.1, ..cut },
        }
    }
}

/// A sampling to measure.
pub struct Subject {
    shape: [usize; 2],
    rules: Rules,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [rows, vocabulary] = self.shape;
        write!(f, "{rows}x{vocabulary} {}", self.rules.name())
    }
}

/// Every shape with every kind of parameters.
///
/// # Errors
/// When a shape is invalid.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let shapes: Vec<[usize; 2]> = match args.shape[..] {
        [] => SHAPES.to_vec(),
        _ => args.shape.iter().map(|sizes| sizes.matrix("sampling")).collect::<anyhow::Result<_>>()?,
    };
    Ok(shapes.into_iter().flat_map(|shape| Rules::ALL.map(|rules| Subject { shape, rules })).collect())
}

impl Subject {
    fn sampling(&self) -> Sampling {
        let sampling = Sampling::new(self.shape[0], self.shape[1]);
        if matches!(self.rules, Rules::Penalty) { sampling.penalized(EARLIER) } else { sampling }
    }

    /// Logits as a model's: sums of four uniform numbers in -10 to 10.
    fn logits(&self) -> Vec<f32> {
        let mixed = |i: usize| i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let logit = |i: usize| {
            let bits = mixed(mixed(i) ^ mixed(i) >> 29);
            (0..4).map(|byte| (bits >> (24 + 8 * byte) & 255) as f32 / 51.0 - 2.5).sum()
        };
        (0..self.shape[0] * self.shape[1]).map(logit).collect()
    }
}

/// Times the planned kernels of a subject, rotating copies of the
/// logits.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let [rows, vocabulary] = subject.shape;
    let plan = ctx.plan_sampling(&subject.sampling())?;
    let logits = subject.logits();
    let places: Vec<usize> = (0..copies(ctx, logits.len() * DType::F32.bytes())).collect();
    let copies = places.iter().map(|_| ctx.upload(&logits)).collect::<Result<Vec<_>, _>>()?;
    let row = |position| SamplingParameters { position, ..subject.rules.parameters() }.words();
    let parameters = ctx.upload(&(0..rows as u64).flat_map(row).collect::<Vec<u32>>())?;
    let earlier = ctx.upload(&(0..rows * EARLIER).map(|i| (i * 7919 % vocabulary) as u32).collect::<Vec<_>>())?;
    let lengths = ctx.upload(&vec![EARLIER as u32; rows])?;
    let (mut ids, mut status) = (ctx.allocate(rows * 4)?, ctx.allocate(rows * 16)?);
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    let stream = ctx.new_stream()?;
    let launch = |&place: &usize| {
        let args = SamplingArgs::new(&copies[place], &parameters, &mut ids, &mut status).workspace(&mut workspace);
        let is_penalized = matches!(subject.rules, Rules::Penalty);
        plan.run(&stream, if is_penalized { args.earlier(&earlier, &lengths) } else { args })
    };
    let timing = time_launches(ctx, &stream, &places, args.pace(), launch)?;
    Ok(BenchRow {
        shape: format!("{rows}x{vocabulary}"),
        format: subject.rules.name().to_owned(),
        x_dtype: DType::F32.to_string(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        ..BenchRow::timed(ctx, timing, plan.bytes(), bandwidth, places.len())
    })
}

/// Each shape with every kind of parameters, with a penalty and
/// without, and with log-probabilities.
///
/// # Errors
/// When a shape is invalid.
pub fn cases(args: &verify::Args, _: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    let mut cases: Vec<Box<dyn TestCase>> = Vec::new();
    for sizes in &args.shape {
        let [rows, vocabulary] = sizes.matrix("sampling")?;
        for rules in SamplingRules::ALL {
            let case = SamplingCase::new(rows, vocabulary, rules);
            let all = SamplingCase { earlier: Some(100), log_probabilities: Some(4), ..case };
            cases.extend([case, all].map(|case| -> Box<dyn TestCase> { Box::new(case) }));
        }
    }
    Ok(cases)
}

/// Plan record of the shape.
///
/// # Errors
/// When the shape is invalid.
pub fn explain(_: &explain::Args, ctx: &Context, sizes: &Sizes) -> anyhow::Result<PlanRecord> {
    let [rows, vocabulary] = sizes.matrix("sampling")?;
    Ok(ctx.explain_sampling(&Sampling::new(rows, vocabulary))?)
}
