//! Runs one sampling on a device and judges the result.

use qgemm_api::{Buffer, Context, DeviceKind, Error, Sampling, SamplingArgs, SamplingFault, SamplingPlan};
use qgemm_formats::DType;

use super::case::SamplingCase;
use super::oracle::{LogProbabilities, Row};
use crate::operand::Operand;
use crate::outcome::{Exemption, Failure, Outcome, Verdict};

/// Exemptions. An exemption fails if the case can be planned.
const EXEMPTIONS: &[Exemption<SamplingCase>] = &[];

/// Part of the total probability within which a draw may miss a
/// threshold, where exponentials round differently.
const MARGIN: f64 = 1e-5;
/// Error of a log-probability: excluded tails, and f32 rounding of
/// large ones.
const LOG_ERROR: [f64; 2] = [1e-4, 1e-6];

/// Runs `case` on poisoned memory and judges tokens, statuses and
/// log-probabilities. A second run must match, unless the device
/// is emulated.
pub fn run(ctx: &Context, case: &SamplingCase) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, EXEMPTIONS);
    outcome
}

/// Memory layout of a case's operands. All but the logits are
/// words; the type only gives the width.
struct Stored {
    logits: Operand,
    parameters: Operand,
    earlier: Operand,
    lengths: Operand,
    rows: Operand,
    listed: Operand,
    status: Operand,
}

impl Stored {
    fn new(case: &SamplingCase) -> Self {
        let matrix = |columns, gap| Operand::new(DType::F32, case.rows, columns, gap, case.offset);
        Self {
            logits: matrix(case.vocabulary, case.gap),
            parameters: matrix(10, 0),
            earlier: matrix(case.earlier.unwrap_or(0), case.gap),
            lengths: matrix(1, 0),
            rows: matrix(1, 0),
            listed: matrix(case.log_probabilities.unwrap_or(0), 0),
            status: matrix(4, 0),
        }
    }
}

/// Buffers that a run writes; empty if not written.
#[derive(PartialEq)]
struct Written {
    ids: Vec<u8>,
    own: Vec<u8>,
    alternative_ids: Vec<u8>,
    alternatives: Vec<u8>,
    status: Vec<u8>,
    faults: Vec<Option<SamplingFault>>,
}

fn judge(ctx: &Context, case: &SamplingCase, outcome: &mut Outcome) -> Result<(), Failure> {
    let stored = Stored::new(case);
    let plan = ctx.plan_sampling(&sampling(case, &stored)).map_err(Failure::of_plan)?;
    outcome.kernel = Some(plan.kernel_name().to_owned());
    outcome.kernel_id = plan.kernel_id();
    Failure::check_launched(plan.sequence(), plan.kernel_id())?;
    let run = || run_on(ctx, &plan, case, &stored).map_err(Failure::of_run);
    let written = run()?;
    check(ctx, case, &stored, &written)?;
    // Emulated threads run in one order: a second run is the same.
    if ctx.info().id.kind != DeviceKind::Emu {
        Failure::check_same(&written.ids, &run()?.ids)?;
    }
    Ok(())
}

fn sampling(case: &SamplingCase, stored: &Stored) -> Sampling {
    let mut sampling = Sampling::new(case.rows, case.vocabulary).row_stride(stored.logits.row_stride() as u64);
    if let Some(capacity) = case.earlier {
        sampling = sampling.penalized(capacity).earlier_row_stride(stored.earlier.row_stride() as u64);
    }
    match case.log_probabilities {
        Some(alternatives) => sampling.log_probabilities(alternatives),
        None => sampling,
    }
}

fn numbers(words: &[u32]) -> Vec<f32> {
    words.iter().map(|&word| f32::from_bits(word)).collect()
}

fn run_on(ctx: &Context, plan: &SamplingPlan, case: &SamplingCase, stored: &Stored) -> Result<Written, Error> {
    let words: Vec<u32> = case.parameters().iter().flat_map(|parameters| parameters.words()).collect();
    let (earlier, lengths) = case.earlier();
    let logits = ctx.upload(&stored.logits.encode(&case.logits()))?;
    let parameters = ctx.upload(&stored.parameters.encode(&numbers(&words)))?;
    let earlier = ctx.upload(&stored.earlier.encode(&numbers(&earlier)))?;
    let lengths = ctx.upload(&stored.lengths.encode(&numbers(&lengths)))?;
    let poisoned = |operand: &Operand| ctx.upload(&operand.poison());
    let (mut ids, mut own, mut status) = (poisoned(&stored.rows)?, poisoned(&stored.rows)?, poisoned(&stored.status)?);
    let (mut alternative_ids, mut alternatives) = (poisoned(&stored.listed)?, poisoned(&stored.listed)?);
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;

    let mut args = SamplingArgs::new(
        logits.slice(stored.logits.range())?,
        parameters.slice(stored.parameters.range())?,
        ids.slice_mut(stored.rows.range())?,
        status.slice_mut(stored.status.range())?,
    );
    if case.earlier.is_some() {
        args = args.earlier(earlier.slice(stored.earlier.range())?, lengths.slice(stored.lengths.range())?);
    }
    if let Some(count) = case.log_probabilities {
        args = args.log_probabilities(own.slice_mut(stored.rows.range())?);
        if count > 0 {
            let range = stored.listed.range();
            args = args.alternatives(alternative_ids.slice_mut(range.clone())?, alternatives.slice_mut(range)?);
        }
    }
    plan.run(&ctx.default_stream(), args.workspace(&mut workspace))?;
    let faults = plan.faults(ctx, status.slice(stored.status.range())?)?;
    let bytes = |buffer: &Buffer| -> Result<Vec<u8>, Error> {
        let bytes = ctx.download(buffer)?;
        buffer.raw().check_guards()?;
        Ok(bytes)
    };
    Ok(Written {
        ids: bytes(&ids)?,
        own: bytes(&own)?,
        alternative_ids: bytes(&alternative_ids)?,
        alternatives: bytes(&alternatives)?,
        status: bytes(&status)?,
        faults,
    })
}

/// Judges every row.
fn check(ctx: &Context, case: &SamplingCase, stored: &Stored, written: &Written) -> Result<(), Failure> {
    let is_exact = ctx.info().id.kind != DeviceKind::Wgpu;
    let words =
        |operand: &Operand, bytes: &[u8]| -> Vec<u32> { operand.decode(bytes).into_iter().map(f32::to_bits).collect() };
    let (ids, own) = (words(&stored.rows, &written.ids), words(&stored.rows, &written.own));
    let alternative_ids = words(&stored.listed, &written.alternative_ids);
    let alternatives = words(&stored.listed, &written.alternatives);
    let (logits, parameters, (earlier, lengths)) = (case.logits(), case.parameters(), case.earlier());
    for row in 0..case.rows {
        let of_row = |count: usize| row * count..(row + 1) * count;
        let earlier = case.earlier.map(|capacity| &earlier[of_row(capacity)][..capacity.min(lengths[row] as usize)]);
        let inputs = Row { logits: &logits[of_row(case.vocabulary)], parameters: parameters[row], earlier };
        let expected = inputs.token();
        let id = ids[row];
        check_token(row, &inputs, &expected, id, written.faults[row], is_exact)?;
        if let Some(count) = case.log_probabilities {
            let pairs = alternative_ids[of_row(count)].iter().zip(&alternatives[of_row(count)]);
            let alternatives = pairs.map(|(&id, &bits)| (id, f32::from_bits(bits))).collect();
            let got = LogProbabilities { own: f32::from_bits(own[row]), alternatives };
            check_log_probabilities(row, &inputs, expected.ok().map(|_| id), &got, is_exact)?;
        }
    }
    let outside = [
        (&stored.rows, &written.ids),
        (&stored.rows, &written.own),
        (&stored.listed, &written.alternative_ids),
        (&stored.listed, &written.alternatives),
        (&stored.status, &written.status),
    ];
    let outside = outside.into_iter().find_map(|(operand, bytes)| operand.first_written_outside(bytes));
    outside.map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))
}

fn check_token(
    row: usize,
    inputs: &Row<'_>,
    expected: &Result<u32, SamplingFault>,
    id: u32,
    fault: Option<SamplingFault>,
    is_exact: bool,
) -> Result<(), Failure> {
    let wrong = |why: String| Err(Failure::WrongToken(format!("row {row}: {why}")));
    // NaN differs from itself, so faults are compared as texts.
    let (says, should) = (format!("{fault:?}"), format!("{:?}", expected.err()));
    match *expected {
        _ if says != should => wrong(format!("the status is {says}, expected {should}")),
        Err(_) if id != u32::MAX => wrong(format!("token {id} of a row without one")),
        Ok(token) if is_exact && id != token => wrong(format!("token {id}, expected {token}")),
        Ok(_) if !inputs.allows(id, MARGIN) => wrong(format!("token {id}, which f64 does not allow")),
        _ => Ok(()),
    }
}

fn check_log_probabilities(
    row: usize,
    inputs: &Row<'_>,
    id: Option<u32>,
    got: &LogProbabilities,
    is_exact: bool,
) -> Result<(), Failure> {
    let expected = inputs.log_probabilities(id, got.alternatives.len());
    let tokens = |of: &LogProbabilities| of.alternatives.iter().map(|(id, _)| *id).collect::<Vec<_>>();
    let is_near = |id: u32, got: f32| {
        let exact = inputs.exact_log_probability(id);
        (f64::from(got) - exact).abs() <= LOG_ERROR[0] + LOG_ERROR[1] * exact.abs() || got == exact as f32
    };
    let all = || id.map(|id| (id, got.own)).into_iter().chain(got.alternatives.iter().copied());
    let are_near = all().all(|(id, got)| (id as usize) >= inputs.logits.len() || is_near(id, got));
    let is_right = if is_exact { *got == expected } else { tokens(got) == tokens(&expected) };
    match is_right && are_near {
        true => Ok(()),
        false => Err(Failure::WrongToken(format!("row {row}: log-probabilities {got:?}, expected {expected:?}"))),
    }
}
