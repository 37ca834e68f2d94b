//! Runs one merge on a device and judges the result.

use qgemm_api::{Context, DeviceKind, Error, MergeAttention, MergeAttentionArgs, MergeAttentionPlan};
use qgemm_formats::DType;

use super::case::{MergeAttentionCase, MergeAttentionLayout};
use super::oracle::merge;
use crate::compare::{Mismatch, compare, first_difference};
use crate::limits::rounded_to;
use crate::operand::Operand;
use crate::outcome::{Exemption, Failure, Outcome, Verdict};

/// Exemptions. An exemption fails if the case can
/// be planned.
const EXEMPTIONS: &[Exemption<MergeAttentionCase>] = &[];
/// Error limit before D is rounded.
const LIMIT: f64 = 1e-11;
/// Error limit of a log-sum-exp, absolute and relative.
const LSE_LIMIT: f64 = 1e-6;

/// Runs `case` on poisoned memory and judges the
/// result. A second run must match, unless the device
/// is emulated.
pub fn run(ctx: &Context, case: &MergeAttentionCase) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, EXEMPTIONS);
    outcome
}

/// Memory layout of a case's operands: a row for
/// each head of a token.
struct Stored {
    partial: Operand,
    partial_lse: Operand,
    d: Operand,
    lse: Operand,
}

/// Rows of `[parts, tokens, heads]` in the order
/// of memory.
fn row_order(case: &MergeAttentionCase, parts: usize) -> Vec<usize> {
    let (tokens, heads) = (case.tokens, case.heads);
    let places = 0..parts * tokens * heads;
    let row = |place: usize| match case.layout {
        MergeAttentionLayout::PartsFirst => place,
        MergeAttentionLayout::HeadsFirst => {
            let (part, head, token) = (place / (tokens * heads), place / tokens % heads, place % tokens);
            (part * tokens + token) * heads + head
        }
        MergeAttentionLayout::TokensFirst => {
            let (token, part, head) = (place / (parts * heads), place / heads % parts, place % heads);
            (part * tokens + token) * heads + head
        }
    };
    places.map(row).collect()
}

/// Rows between parts, tokens and heads in memory.
fn row_strides(case: &MergeAttentionCase, parts: usize) -> [usize; 3] {
    let (tokens, heads) = (case.tokens, case.heads);
    match case.layout {
        MergeAttentionLayout::PartsFirst => [tokens * heads, heads, 1],
        MergeAttentionLayout::HeadsFirst => [tokens * heads, 1, tokens],
        MergeAttentionLayout::TokensFirst => [heads, parts * heads, 1],
    }
}

fn judge(ctx: &Context, case: &MergeAttentionCase, outcome: &mut Outcome) -> Result<(), Failure> {
    let rows = case.rows();
    let stored = Stored {
        partial: Operand::new(case.dtype, case.parts * rows, case.dim, case.gap, case.offset),
        partial_lse: Operand::new(DType::F32, 1, case.parts * rows, 0, case.offset),
        d: Operand::new(case.d_dtype, rows, case.dim, case.d_gap, case.offset),
        lse: Operand::new(DType::F32, 1, rows, 0, case.offset),
    };
    let plan = ctx.plan_merge_attention(&problem(case, &stored)).map_err(Failure::of_plan)?;
    outcome.kernel = Some(plan.kernel_name().to_owned());
    outcome.kernel_id = plan.kernel_id();
    Failure::check_launched(plan.sequence(), plan.kernel_id())?;

    let log_sums = case.log_sums();
    let partial = case.partial(&log_sums);
    let in_order = |values: &[f32]| -> Vec<f32> {
        let rows = row_order(case, case.parts).into_iter();
        rows.flat_map(|row| values[row * case.dim..][..case.dim].iter().copied()).collect()
    };
    let inputs = [stored.partial.encode(&in_order(&partial)), stored.partial_lse.encode(&log_sums)];
    let run = || run_on(ctx, &plan, case, &stored, &inputs).map_err(Failure::of_run);
    let (d, lse) = run()?;
    check(case, &stored, &partial, &log_sums, [&d, &lse], outcome)?;
    // Emulated threads run in one order: a second run is the same.
    if ctx.info().id.kind != DeviceKind::Emu {
        let (second, second_lse) = run()?;
        Failure::check_same(&d, &second)?;
        Failure::check_same(&lse, &second_lse)?;
    }
    Ok(())
}

fn problem(case: &MergeAttentionCase, stored: &Stored) -> MergeAttention {
    let scaled = |rows: [usize; 3], operand: &Operand| rows.map(|rows| (rows * operand.row_stride()) as u64);
    let [part, token, head] = scaled(row_strides(case, case.parts), &stored.partial);
    let [_, d_token, d_head] = scaled(row_strides(case, 1), &stored.d);
    let merge = MergeAttention::new(case.dtype, case.parts, case.tokens, case.heads, case.dim)
        .part_strides(part, token, head)
        .d_dtype(case.d_dtype)
        .d_strides(d_token, d_head)
        .alignment(stored.partial.alignment())
        .d_alignment(stored.d.alignment());
    if case.lse { merge.log_sum_exp() } else { merge }
}

/// Contents of the buffers around D and the
/// log-sum-exp after a run.
fn run_on(
    ctx: &Context,
    plan: &MergeAttentionPlan,
    case: &MergeAttentionCase,
    stored: &Stored,
    [partial, partial_lse]: &[Vec<u8>; 2],
) -> Result<(Vec<u8>, Vec<u8>), Error> {
    let (partial, partial_lse) = (ctx.upload(partial)?, ctx.upload(partial_lse)?);
    let (mut d, mut lse) = (ctx.upload(&stored.d.poison())?, ctx.upload(&stored.lse.poison())?);
    let mut args = MergeAttentionArgs::new(
        partial.slice(stored.partial.range())?,
        partial_lse.slice(stored.partial_lse.range())?,
        d.slice_mut(stored.d.range())?,
    );
    if case.lse {
        args = args.lse(lse.slice_mut(stored.lse.range())?);
    }
    plan.run(&ctx.default_stream(), args)?;
    let written = (ctx.download(&d)?, ctx.download(&lse)?);
    d.raw().check_guards()?;
    lse.raw().check_guards()?;
    Ok(written)
}

/// Checks results and log-sum-exps, and that
/// nothing else was written.
fn check(
    case: &MergeAttentionCase,
    stored: &Stored,
    partial: &[f32],
    log_sums: &[f32],
    [d, lse]: [&[u8]; 2],
    outcome: &mut Outcome,
) -> Result<(), Failure> {
    let outside = [(&stored.d, d), (&stored.lse, lse)];
    let outside = outside.into_iter().find_map(|(operand, bytes)| operand.first_written_outside(bytes));
    outside.map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))?;

    let in_memory = stored.d.decode(d);
    let mut got = vec![0.0; in_memory.len()];
    for (place, row) in row_order(case, 1).into_iter().enumerate() {
        got[row * case.dim..][..case.dim].copy_from_slice(&in_memory[place * case.dim..][..case.dim]);
    }
    let expected = merge(case, partial, log_sums);
    let tolerance = rounded_to(case.d_dtype, LIMIT);
    let comparison = compare(&got, &expected.d, tolerance);
    (outcome.comparison, outcome.limit) = (Some(comparison), Some(tolerance.nmse));
    if !comparison.within(tolerance) {
        return Err(Failure::Inaccurate(comparison));
    }
    let is_finite = log_sums.iter().all(|lse| lse.is_finite());
    if case.parts == 1 && is_finite {
        let rounded = |value: f32| case.d_dtype.decode(&case.d_dtype.encode(&[value]))[0];
        first_difference(&got, &expected.d, rounded).map_or(Ok(()), |bad| Err(Failure::NotExact(bad)))?;
    }
    let log_sums = stored.lse.decode(lse);
    for (place, &expected) in expected.lse.iter().enumerate().filter(|_| case.lse) {
        let (row, column, got) = (place / case.heads, place % case.heads, f64::from(log_sums[place]));
        let near = (got - expected).abs() <= LSE_LIMIT * (1.0 + expected.abs());
        if !(near || got == expected || got.is_nan() && expected.is_nan()) {
            return Err(Failure::WrongLogSumExp(Mismatch { row, column, expected, got }));
        }
    }
    Ok(())
}
