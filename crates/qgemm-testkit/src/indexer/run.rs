//! Runs one indexer on a device and judges the result.

use qgemm_api::{Buffer, Context, DeviceKind, Error, Indexer, IndexerArgs, IndexerPlan, Workspace};
use qgemm_formats::DType;
use qgemm_hal::{DeviceInfo, KvFormat, Variant};

use super::case::{IndexedKeys, IndexerCase};
use super::oracle::{Inputs, Score, chosen};
use super::stored::Rows;
use crate::compare::{Mismatch, compare};
use crate::expected::Expected;
use crate::limits::Tolerance;
use crate::operand::Operand;
use crate::outcome::{Exemption, Failure, Outcome, Verdict, WrongBits};

/// Reason that Volta and Turing do not support bf16.
const NO_BF16: &str = "tensor cores before Ampere multiply no bf16, whose numbers f16 cannot hold";

/// Exemptions. An exemption fails if the case can be planned.
const EXEMPTIONS: &[Exemption<IndexerCase>] = &[
    Exemption { device: DeviceKind::Cuda, applies: has_no_bf16, reason: NO_BF16 },
    Exemption { device: DeviceKind::Emu, applies: has_no_bf16, reason: NO_BF16 },
];

fn has_no_bf16(case: &IndexerCase, info: &DeviceInfo) -> bool {
    let is_before = info.variant.is_some_and(|variant| variant < Variant::Sm80);
    is_before && case.format == KvFormat::Plain(DType::BF16) && case.queries * case.most_keys() > 0
}

/// Error limit of scores. Tensor-core sums have 14 bits within
/// 128 columns.
const LIMIT: f64 = 1e-6;

/// Runs `case` on poisoned memory and judges the result. It runs
/// twice where a second run may differ.
pub fn run(ctx: &Context, case: &IndexerCase) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, EXEMPTIONS);
    outcome
}

/// Inputs of runs on the device, with key offsets.
struct Given {
    q: (Buffer, Rows),
    k: (Buffer, Rows),
    weights: (Buffer, Operand),
    q_scales: Buffer,
    k_scales: Buffer,
    ranges: [Buffer; 2],
    lengths: Buffer,
    table: Buffer,
}

/// Strides of a case, in elements.
struct Strides {
    q: [usize; 2],
    k_row: usize,
    /// Page strides of elements and of scales.
    page: [usize; 2],
}

impl Strides {
    fn of(case: &IndexerCase) -> Self {
        let (_, page_size) = case.pages();
        let head = case.features + case.gap;
        let k_row = case.features + case.gap;
        let page = if case.scales_in_pages {
            // Keys of a page, its scales, and a gap.
            let bytes = (page_size * k_row).next_multiple_of(16) + (4 * page_size).next_multiple_of(16);
            [bytes, bytes / 4]
        } else {
            [page_size * k_row + case.gap, page_size + case.gap]
        };
        Self { q: [case.heads * head, head], k_row, page }
    }

    /// Byte of the first page's scales, if pages hold scales.
    fn scales_at(&self, case: &IndexerCase) -> usize {
        (case.pages().1 * self.k_row).next_multiple_of(16)
    }
}

fn judge(ctx: &Context, case: &IndexerCase, outcome: &mut Outcome) -> Result<(), Failure> {
    let inputs = Inputs::of(case);
    let strides = Strides::of(case);
    let given = upload(ctx, case, &inputs, &strides).map_err(Failure::of_run)?;
    let indexer = described(case, &strides, &given);
    let scores = Operand::new(DType::F32, case.queries, case.most_keys(), case.gap, case.offset);
    let scored = indexer.clone().scores_stride(scores.row_stride() as u64);
    let plan = ctx.plan_indexer(&scored).map_err(Failure::of_plan)?;
    outcome.kernel = Some(plan.kernel_name().to_owned());
    outcome.kernel_id = plan.kernel_id();
    Failure::check_launched(plan.sequence(), plan.kernel_id())?;
    let first = run_on(ctx, &plan, case, &given, &scores, &strides)?;
    let got = scores.decode(&first);
    check(case, &inputs, &got, outcome)?;
    if let Some(byte) = scores.first_written_outside(&first) {
        return Err(Failure::WroteOutside(byte));
    }
    // Emulated threads run in one order, but the workspace that the
    // first run leaves must not change the second.
    let is_emulated = ctx.info().id.kind == DeviceKind::Emu;
    if !is_emulated {
        Failure::check_same(&first, &run_on(ctx, &plan, case, &given, &scores, &strides)?)?;
    }
    let Some(count) = case.best else { return Ok(()) };
    let plan = ctx.plan_indexer(&indexer.best(count)).map_err(Failure::of_plan)?;
    Failure::check_launched(plan.sequence(), plan.kernel_id())?;
    let indices = Operand::new(DType::F32, 1, case.queries * count, 0, case.offset);
    let best = run_on(ctx, &plan, case, &given, &indices, &strides)?;
    check_chosen(case, &inputs, &got, &best[indices.range()], count)?;
    if let Some(byte) = indices.first_written_outside(&best).filter(|_| case.queries * count > 0) {
        return Err(Failure::WroteOutside(byte));
    }
    Failure::check_same(&best, &run_on(ctx, &plan, case, &given, &indices, &strides)?)
}

fn upload(ctx: &Context, case: &IndexerCase, inputs: &Inputs, strides: &Strides) -> Result<Given, Error> {
    let features = case.features;
    let mut q = Rows::new(case.format, case.queries * strides.q[0], case.offset);
    for (head, values) in inputs.q.chunks_exact(features).enumerate() {
        q.put(head * strides.q[1], values);
    }
    let (pages, page_size) = case.pages();
    let mut k = Rows::new(case.format, pages * strides.page[0], case.offset);
    let mut k_scales = vec![f32::NAN; pages * strides.page[1] + 1];
    for (row, values) in inputs.k.chunks_exact(features).enumerate() {
        let (page, at) = (row / page_size, row % page_size);
        k.put(page * strides.page[0] + at * strides.k_row, values);
        match case.scales_in_pages {
            true => k.put_scale(page * strides.page[0] + strides.scales_at(case) + 4 * at, inputs.k_scales[row]),
            false => k_scales[page * strides.page[1] + at] = inputs.k_scales[row],
        }
    }
    let weights = Operand::new(DType::F32, case.queries, case.heads, case.gap, case.offset);
    let (starts, ends): (Vec<u32>, Vec<u32>) = match &case.keys {
        IndexedKeys::Ranges(_, ranges) => ranges.iter().copied().unzip(),
        _ => Default::default(),
    };
    let lengths: Vec<u32> = match &case.keys {
        IndexedKeys::Paged(_, lengths) => lengths.iter().map(|&keys| keys as u32).collect(),
        _ => Vec::new(),
    };
    Ok(Given {
        q: (ctx.upload(&q.bytes)?, q),
        k: (ctx.upload(&k.bytes)?, k),
        weights: (ctx.upload(&weights.encode(&inputs.weights))?, weights),
        q_scales: ctx.upload(&inputs.q_scales)?,
        k_scales: ctx.upload(&k_scales)?,
        ranges: [ctx.upload(&starts)?, ctx.upload(&ends)?],
        lengths: ctx.upload(&lengths)?,
        table: ctx.upload(&inputs.table)?,
    })
}

fn described(case: &IndexerCase, strides: &Strides, given: &Given) -> Indexer {
    let keys = case.most_keys();
    let mut indexer = Indexer::new(case.format, case.queries, case.heads, case.features, keys)
        .q_strides(strides.q[0] as u64, strides.q[1] as u64)
        .k_stride(strides.k_row as u64)
        .weights_stride(given.weights.1.row_stride() as u64)
        .alignment(given.q.1.alignment());
    indexer = match &case.keys {
        IndexedKeys::All(_) => indexer,
        IndexedKeys::Ranges(..) => indexer.ranges(),
        IndexedKeys::Paged(size, lengths) => indexer
            .paged(lengths.len(), case.pages().0, *size, case.table_width())
            .page_strides(strides.page[0] as u64, strides.page[1] as u64),
    };
    if case.q_scales { indexer.q_scales() } else { indexer }
}

/// Runs the plan on a poisoned result, and returns it.
fn run_on(
    ctx: &Context,
    plan: &IndexerPlan,
    case: &IndexerCase,
    given: &Given,
    result: &Operand,
    strides: &Strides,
) -> Result<Vec<u8>, Failure> {
    let run = || {
        let mut buffer = ctx.upload(&result.poison())?;
        let mut workspace: Workspace = ctx.workspace(plan.workspace_bytes())?;
        let ((q, q_rows), (k, k_rows), (weights, of_weights)) = (&given.q, &given.k, &given.weights);
        let mut args = IndexerArgs::new(
            q.slice(q_rows.range(0))?,
            k.slice(k_rows.range(0))?,
            weights.slice(of_weights.range())?,
            buffer.slice_mut(result.range())?,
        );
        args.q_scales = case.q_scales.then(|| (&given.q_scales).into());
        if case.format.has_factors() {
            let in_pages = case.scales_in_pages;
            let scales =
                if in_pages { k.slice(k_rows.range(strides.scales_at(case)))? } else { (&given.k_scales).into() };
            args.k_scales = Some(scales);
        }
        if let IndexedKeys::Ranges(..) = case.keys {
            args = args.ranges(&given.ranges[0], &given.ranges[1]);
        }
        if let IndexedKeys::Paged(..) = case.keys {
            args.lengths = Some((&given.lengths).into());
            args.block_table = Some((&given.table).into());
        }
        plan.run(&ctx.default_stream(), args.workspace(&mut workspace))?;
        let bytes = ctx.download(&buffer)?;
        buffer.raw().check_guards()?;
        Ok::<_, Error>(bytes)
    };
    run().map_err(Failure::of_run)
}

/// Checks the scores, and −∞ for masked keys.
fn check(case: &IndexerCase, inputs: &Inputs, got: &[f32], outcome: &mut Outcome) -> Result<(), Failure> {
    let (m, n) = (case.queries, case.most_keys());
    let (mut finite, mut values, mut energy) = (got.to_vec(), vec![0.0; m * n], vec![0.0; m * n]);
    for row in 0..m {
        for (column, expected) in inputs.scores(case, row).into_iter().enumerate() {
            let at = row * n + column;
            let Score { value, energy: own } = expected.unwrap_or(Score { value: f64::NEG_INFINITY, energy: 0.0 });
            let got = f64::from(got[at]);
            let mismatch = Mismatch { row, column, expected: value, got };
            let must_be_equal = !value.is_finite() || case.has_exact_scores();
            if must_be_equal {
                if value != got && !(value.is_nan() && got.is_nan()) {
                    return Err(Failure::NotExact(mismatch));
                }
                finite[at] = 0.0;
                continue;
            }
            (values[at], energy[at]) = (value, own);
        }
    }
    let tolerance = Tolerance::relative(LIMIT);
    let comparison = compare(&finite, &Expected { m, n, values, energy, floor: vec![0.0; m * n] }, tolerance);
    (outcome.comparison, outcome.limit) = (Some(comparison), Some(tolerance.nmse));
    if comparison.within(tolerance) { Ok(()) } else { Err(Failure::Inaccurate(comparison)) }
}

/// Checks that the chosen keys follow from the device's scores.
fn check_chosen(case: &IndexerCase, inputs: &Inputs, scores: &[f32], best: &[u8], count: usize) -> Result<(), Failure> {
    let n = case.most_keys();
    for row in 0..case.queries {
        let scores = &scores[row * n..(row + 1) * n];
        let expected = chosen(case, row, scores, &inputs.table, count);
        for (column, expected) in expected.into_iter().enumerate() {
            let at = 4 * (row * count + column);
            let got = i32::from_le_bytes([best[at], best[at + 1], best[at + 2], best[at + 3]]);
            if got != expected {
                let (expected, got) = (expected.cast_unsigned(), got.cast_unsigned());
                return Err(Failure::WrongBits(WrongBits { operand: "indices", row, column, expected, got }));
            }
        }
    }
    Ok(())
}
