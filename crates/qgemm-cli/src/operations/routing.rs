//! `--op routing` of the command: cases, explanation and measurement of routing.

use std::fmt;

use qgemm_api::{Buffer, Context, DType, PlanRecord, Routing, RoutingArgs, RoutingLists, Scoring};

use qgemm_testkit::{RoutingCase, RoutingFrom, Selection, TestCase};

use crate::bench::timing::time_launches;
use crate::bench::{Args, BenchRow, copies};
use crate::choice::Sizes;
use crate::{explain, verify};

/// Sizes of `--shape`.
pub const SHAPE: &str = "TxExK: tokens x experts x experts per token";

/// Options of `bench` that apply to this operation, but not to all.
pub const BENCH_OPTIONS: &[&str] = &[];

/// Default tokens, experts and experts per token.
const SHAPES: [[usize; 3]; 5] = [[1, 128, 8], [32, 128, 8], [512, 128, 8], [4096, 128, 8], [4096, 256, 8]];

/// A routing to measure: softmax of f32 logits with lists, or
/// lists of given ids.
pub struct Subject {
    shape: [usize; 3],
    given_ids: bool,
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [tokens, experts, top_k] = self.shape;
        write!(f, "{tokens}x{experts}x{top_k} {}", self.source())
    }
}

/// Every shape, from logits and from ids.
///
/// # Errors
/// When a shape is invalid.
pub fn subjects(args: &Args) -> anyhow::Result<Vec<Subject>> {
    let shapes: Vec<[usize; 3]> = match args.shape[..] {
        [] => SHAPES.to_vec(),
        _ => args.shape.iter().map(|sizes| sizes.routing()).collect::<anyhow::Result<_>>()?,
    };
    Ok(shapes.into_iter().flat_map(|shape| [false, true].map(|given_ids| Subject { shape, given_ids })).collect())
}

impl Subject {
    fn source(&self) -> &'static str {
        if self.given_ids { "ids" } else { "logits" }
    }

    /// Input of a run: logits, or ids spread over all experts.
    fn input(&self) -> Vec<u8> {
        let [tokens, experts, top_k] = self.shape;
        let mixed = |i: usize| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        match self.given_ids {
            false => DType::F32.encode(&(0..tokens * experts).map(|i| mixed(i) as f32 * 1e-6).collect::<Vec<_>>()),
            true => {
                let id = |slot: usize| ((mixed(slot / top_k) + slot % top_k) % experts) as i32;
                (0..tokens * top_k).flat_map(|slot| id(slot).to_le_bytes()).collect()
            }
        }
    }
}

/// Times the planned kernel of a subject, rotating copies of its
/// input.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let [tokens, experts, top_k] = subject.shape;
    let routing = match subject.given_ids {
        false => Routing::from_logits(tokens, experts, top_k, DType::F32).renormalized().lists(),
        true => Routing::from_ids(tokens, experts, top_k),
    };
    let plan = ctx.plan_routing(&routing)?;
    let input = subject.input();
    let places: Vec<usize> = (0..copies(ctx, input.len())).collect();
    let inputs: Vec<Buffer> = places.iter().map(|_| ctx.upload(&input)).collect::<Result<_, _>>()?;
    let words = |count: usize| ctx.allocate(count * 4);
    let slots = tokens * top_k;
    let (mut ids, mut weights, mut rows) = (words(slots)?, words(slots)?, words(slots)?);
    let (mut offsets, mut counts, mut status) = (words(experts + 1)?, words(experts)?, words(4)?);
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    let stream = ctx.new_stream()?;
    let launch = |&place: &usize| {
        let lists =
            RoutingLists { offsets: (&mut offsets).into(), counts: (&mut counts).into(), rows: (&mut rows).into() };
        let (input, status) = (&inputs[place], &mut status);
        let args = match subject.given_ids {
            true => RoutingArgs::of_ids(input, lists, status),
            false => RoutingArgs::of_logits(input, &mut ids, &mut weights, status).lists(lists),
        };
        plan.run(&stream, args.workspace(&mut workspace))
    };
    let timing = time_launches(ctx, &stream, &places, args.pace(), launch)?;
    Ok(BenchRow {
        shape: format!("{tokens}x{experts}x{top_k}"),
        format: subject.source().to_owned(),
        x_dtype: DType::F32.to_string(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        ..BenchRow::timed(ctx, timing, plan.bytes(), bandwidth, places.len())
    })
}

/// Each shape with every type of logits and scoring, and with
/// given ids.
///
/// # Errors
/// When a shape is invalid, or a format cannot store it.
pub fn cases(args: &verify::Args, _: &Selection) -> anyhow::Result<Vec<Box<dyn TestCase>>> {
    let mut cases: Vec<Box<dyn TestCase>> = Vec::new();
    for sizes in &args.shape {
        let [tokens, experts, top_k] = sizes.routing()?;
        for (dtype, scoring) in DType::ALL.into_iter().flat_map(|dtype| Scoring::ALL.map(|scoring| (dtype, scoring))) {
            let from = RoutingFrom::Logits(dtype);
            cases.push(Box::new(RoutingCase { from, scoring, ..RoutingCase::new(tokens, experts, top_k) }));
        }
        cases.push(Box::new(RoutingCase::of_ids(tokens, experts, top_k)));
    }
    Ok(cases)
}

/// Plan record of the shape.
///
/// # Errors
/// When the shape is invalid.
pub fn explain(_: &explain::Args, ctx: &Context, sizes: &Sizes) -> anyhow::Result<PlanRecord> {
    let [tokens, experts, top_k] = sizes.routing()?;
    Ok(ctx.explain_routing(&Routing::from_logits(tokens, experts, top_k, DType::F32))?)
}
