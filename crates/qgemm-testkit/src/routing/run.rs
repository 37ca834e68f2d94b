//! Runs one routing on a device and judges the result.

use qgemm_api::{Context, DeviceKind, Error, Routing, RoutingArgs, RoutingLists, RoutingPlan, Workspace};
use qgemm_formats::DType;
use qgemm_hal::op::routing::ELSEWHERE;
use rayon::prelude::*;

use super::case::{RoutingCase, RoutingFrom};
use super::oracle::{ExpectedLists, Token, lists};
use crate::compare::compare;
use crate::expected::Expected;
use crate::limits::Tolerance;
use crate::operand::Operand;
use crate::outcome::{Exemption, Failure, Outcome, Verdict, WrongBits};

/// Exemptions. An exemption fails if the case can be planned.
const EXEMPTIONS: &[Exemption<RoutingCase>] = &[];
/// Limit for display; each weight has a separate limit.
const SHOWN: Tolerance = Tolerance::relative(1e-12);
/// Limit for a weight of 0.
const SMALLEST: f64 = 1e-30;

/// Runs `case` on poisoned memory and judges choice and lists. It
/// runs twice where a second run may differ.
pub fn run(ctx: &Context, case: &RoutingCase) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, EXEMPTIONS);
    outcome
}

/// Memory layout of a case's operands. All but the logits are
/// words; the type only gives the width.
struct Stored {
    logits: Operand,
    bias: Operand,
    slots: Operand,
    offsets: Operand,
    counts: Operand,
    status: Operand,
}

impl Stored {
    fn new(case: &RoutingCase) -> Self {
        let words = |count: usize| Operand::new(DType::F32, 1, count, 0, case.offset);
        Self {
            logits: Operand::new(case.dtype(), case.tokens, case.experts, case.gap, case.offset),
            bias: words(case.experts),
            slots: words(case.slots()),
            offsets: words(case.local_experts().len() + 1),
            counts: words(case.local_experts().len()),
            status: words(4),
        }
    }
}

/// Contents of the operands' buffers after a run; empty if not
/// written.
#[derive(PartialEq, Default)]
struct Written {
    ids: Vec<u8>,
    weights: Vec<u8>,
    offsets: Vec<u8>,
    counts: Vec<u8>,
    rows: Vec<u8>,
    status: Vec<u8>,
}

/// The inputs of a run.
struct Inputs {
    logits: Vec<f32>,
    bias: Vec<f32>,
    ids: Vec<i32>,
}

fn judge(ctx: &Context, case: &RoutingCase, outcome: &mut Outcome) -> Result<(), Failure> {
    let stored = Stored::new(case);
    let plan = ctx.plan_routing(&routing(case, &stored)).map_err(Failure::of_plan)?;
    outcome.kernel = Some(plan.kernel_name().to_owned());
    outcome.kernel_id = plan.kernel_id();
    Failure::check_launched(plan.sequence(), plan.kernel_id())?;

    let from_logits = case.from != RoutingFrom::Ids;
    let inputs = Inputs {
        logits: if from_logits { case.logits() } else { Vec::new() },
        bias: case.biases(),
        ids: if from_logits { Vec::new() } else { case.ids() },
    };
    let mut workspace = ctx.workspace(plan.workspace_bytes()).map_err(Failure::of_run)?;
    let (first, status) = run_on(ctx, &plan, case, &stored, &inputs, &mut workspace).map_err(Failure::of_run)?;
    let ids = match case.from {
        RoutingFrom::Logits(_) => {
            let whole = match case.local {
                None => &first,
                Some(_) => &run_whole(ctx, case, &inputs)?,
            };
            let ids: Vec<i32> = words(&stored.slots, &whole.ids).into_iter().map(u32::cast_signed).collect();
            let weights = stored.slots.decode(&whole.weights);
            check_choice(case, &inputs, &ids, &weights, outcome)?;
            let (ids, weights) = local_part(case, ids, &weights);
            let bits = |words: &[f32]| words.iter().map(|weight| weight.to_bits()).collect::<Vec<_>>();
            let written: Vec<u32> = ids.iter().map(|id| id.cast_unsigned()).collect();
            check_words("ids", &stored.slots, &first.ids, &written)?;
            check_words("weights", &stored.slots, &first.weights, &bits(&weights))?;
            ids
        }
        RoutingFrom::Ids => inputs.ids.clone(),
    };
    check_status(case, &ids, &words(&stored.status, &first.status), status)?;
    if case.lists {
        let ExpectedLists { offsets, counts, rows } = lists(&ids, case.local_experts().len());
        check_words("offsets", &stored.offsets, &first.offsets, &offsets)?;
        check_words("counts", &stored.counts, &first.counts, &counts)?;
        check_words("rows", &stored.slots, &first.rows, &rows)?;
    }
    let outside = [
        (&stored.slots, &first.ids),
        (&stored.slots, &first.weights),
        (&stored.offsets, &first.offsets),
        (&stored.counts, &first.counts),
        (&stored.slots, &first.rows),
        (&stored.status, &first.status),
    ];
    for (operand, buffer) in outside.into_iter().filter(|(_, buffer)| !buffer.is_empty()) {
        operand.first_written_outside(buffer).map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))?;
    }
    // Emulated threads run in one order, but the workspace that the
    // first run leaves must not change the second.
    if ctx.info().id.kind != DeviceKind::Emu || plan.workspace_bytes() > 0 {
        let (second, _) = run_on(ctx, &plan, case, &stored, &inputs, &mut workspace).map_err(Failure::of_run)?;
        let pairs = [
            (&first.ids, &second.ids),
            (&first.weights, &second.weights),
            (&first.offsets, &second.offsets),
            (&first.counts, &second.counts),
            (&first.rows, &second.rows),
            (&first.status, &second.status),
        ];
        pairs.into_iter().try_for_each(|(first, second)| Failure::check_same(first, second))?;
    }
    Ok(())
}

/// The run of all experts, in which a choice is judged.
fn run_whole(ctx: &Context, case: &RoutingCase, inputs: &Inputs) -> Result<Written, Failure> {
    let whole = RoutingCase { local: None, ..*case };
    let stored = Stored::new(&whole);
    let plan = ctx.plan_routing(&routing(&whole, &stored)).map_err(Failure::of_plan)?;
    let mut workspace = ctx.workspace(plan.workspace_bytes()).map_err(Failure::of_run)?;
    run_on(ctx, &plan, &whole, &stored, inputs, &mut workspace).map(|(written, _)| written).map_err(Failure::of_run)
}

/// Ids and weights as the device of local experts has them.
fn local_part(case: &RoutingCase, ids: Vec<i32>, weights: &[f32]) -> (Vec<i32>, Vec<f32>) {
    let local = case.local_experts();
    let part = |(id, &weight): (i32, &f32)| match usize::try_from(id) {
        Ok(expert) if local.contains(&expert) => ((expert - local.start) as i32, weight),
        Ok(_) => (ELSEWHERE, 0.0),
        Err(_) => (id, weight),
    };
    ids.into_iter().zip(weights).map(part).unzip()
}

fn routing(case: &RoutingCase, stored: &Stored) -> Routing {
    let dtype = match case.from {
        RoutingFrom::Ids => return Routing::from_ids(case.tokens, case.experts, case.top_k),
        RoutingFrom::Logits(dtype) => dtype,
    };
    let mut routing = Routing::from_logits(case.tokens, case.experts, case.top_k, dtype)
        .row_stride(stored.logits.row_stride() as u64)
        .alignment(stored.logits.alignment())
        .scoring(case.scoring)
        .scale(case.scale);
    if case.renormalize {
        routing = routing.renormalized();
    }
    if case.shared {
        routing = routing.shared();
    }
    if case.bias {
        routing = routing.biased();
    }
    if let Some([first, end]) = case.local {
        routing = routing.local(first..end);
    }
    if let Some(groups) = case.groups {
        routing = routing.groups(groups.groups, groups.chosen);
    }
    if case.lists { routing.lists() } else { routing }
}

/// A run, with the API's reading of its status.
fn run_on(
    ctx: &Context,
    plan: &RoutingPlan,
    case: &RoutingCase,
    stored: &Stored,
    inputs: &Inputs,
    workspace: &mut Workspace,
) -> Result<(Written, Result<(), Error>), Error> {
    let from_logits = case.from != RoutingFrom::Ids;
    let Stored { slots, .. } = stored;
    let mut given = slots.poison();
    if from_logits {
        given = stored.logits.encode(&inputs.logits);
    } else {
        given[slots.range()].copy_from_slice(&inputs.ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>());
    }
    let given = ctx.upload(&given)?;
    let given_range = if from_logits { stored.logits.range() } else { slots.range() };
    let bias = ctx.upload(&stored.bias.encode(&inputs.bias))?;
    let poisoned = |operand: &Operand| ctx.upload(&operand.poison());
    let (mut ids, mut weights, mut rows) = (poisoned(slots)?, poisoned(slots)?, poisoned(slots)?);
    let (mut offsets, mut counts) = (poisoned(&stored.offsets)?, poisoned(&stored.counts)?);
    let mut status = poisoned(&stored.status)?;
    let of_lists = RoutingLists {
        offsets: offsets.slice_mut(stored.offsets.range())?,
        counts: counts.slice_mut(stored.counts.range())?,
        rows: rows.slice_mut(slots.range())?,
    };
    let given = given.slice(given_range)?;
    let of_status = status.slice_mut(stored.status.range())?;
    let mut args = match from_logits {
        false => RoutingArgs::of_ids(given, of_lists, of_status),
        true => {
            let (ids, weights) = (ids.slice_mut(slots.range())?, weights.slice_mut(slots.range())?);
            let mut args = RoutingArgs::of_logits(given, ids, weights, of_status);
            args.lists = case.lists.then_some(of_lists);
            args
        }
    };
    args.bias = if case.bias { Some(bias.slice(stored.bias.range())?) } else { None };
    args.workspace = Some(workspace);
    plan.run(&ctx.default_stream(), args)?;
    let said = plan.check_status(ctx, status.slice(stored.status.range())?);
    let mut written = Written { status: ctx.download(&status)?, ..Written::default() };
    if from_logits {
        (written.ids, written.weights) = (ctx.download(&ids)?, ctx.download(&weights)?);
    }
    if case.lists {
        written.offsets = ctx.download(&offsets)?;
        (written.counts, written.rows) = (ctx.download(&counts)?, ctx.download(&rows)?);
    }
    for buffer in [&ids, &weights, &offsets, &counts, &rows, &status] {
        buffer.raw().check_guards()?;
    }
    Ok((written, said))
}

/// Checks every token's experts and weights.
fn check_choice(
    case: &RoutingCase,
    inputs: &Inputs,
    ids: &[i32],
    weights: &[f32],
    outcome: &mut Outcome,
) -> Result<(), Failure> {
    let of_token = |token: usize| -> Result<Vec<f64>, Failure> {
        let slots = case.slots_of_token();
        let (ids, of_all) = ids[token * slots..][..slots].split_at(case.top_k);
        let (weights, weight_of_all) = weights[token * slots..][..slots].split_at(case.top_k);
        let wrong = |why: String| Failure::Misrouted(format!("token {token}: {why}"));
        if of_all.iter().any(|&id| id as usize != case.experts) || weight_of_all.iter().any(|&weight| weight != 1.0) {
            return Err(wrong(format!("every token's expert is {of_all:?} with weights {weight_of_all:?}")));
        }
        let oracle = Token::new(case, &inputs.logits[token * case.experts..][..case.experts], &inputs.bias);
        oracle.check_ids(ids).map_err(wrong)?;
        let expected = oracle.weights(ids);
        for (slot, (&got, &(expected, error))) in weights.iter().zip(&expected).enumerate() {
            let off = (f64::from(got) - expected).abs();
            // An infinite score makes weights infinite or NaN.
            let both_overflow = !expected.is_finite() && !got.is_finite();
            if !both_overflow && (off.is_nan() || off > error) {
                return Err(wrong(format!("weight {slot} is {got:e}, expected {expected:e} within {error:e}")));
            }
        }
        Ok(expected.into_iter().map(|(weight, _)| weight).chain(weight_of_all.iter().map(|&w| f64::from(w))).collect())
    };
    let values = (0..case.tokens).into_par_iter().map(of_token).collect::<Result<Vec<_>, _>>()?.concat();
    let floor = vec![0.0; values.len()];
    let energy = values.iter().map(|value| (value * value).max(SMALLEST)).collect();
    let comparison =
        compare(weights, &Expected { m: case.tokens, n: case.slots_of_token(), values, energy, floor }, SHOWN);
    outcome.comparison = Some(comparison);
    Ok(())
}

/// Checks that the status names the first slot without an expert,
/// and that the API agrees.
fn check_status(case: &RoutingCase, ids: &[i32], status: &[u32], said: Result<(), Error>) -> Result<(), Failure> {
    let experts = case.local_experts().len() as i32;
    let bad = ids.iter().position(|id| *id != ELSEWHERE && !(0..experts).contains(id));
    let expected = match (bad, case.from) {
        (None, _) => [0; 4],
        (Some(slot), from) => {
            let code = if from == RoutingFrom::Ids { 1 } else { 2 };
            [
                code,
                (slot / case.slots_of_token()) as u32,
                (slot % case.slots_of_token()) as u32,
                ids[slot].cast_unsigned(),
            ]
        }
    };
    if status != expected {
        return Err(Failure::Misrouted(format!("the status is {status:?}, expected {expected:?}")));
    }
    let [code, at_token, at_slot, id] = expected;
    let is_right = match said {
        Ok(()) => code == 0,
        Err(Error::UnknownExpert { token, slot, id: got, .. }) => {
            (code, token as u32, slot as u32, got.cast_unsigned()) == (1, at_token, at_slot, id)
        }
        Err(Error::TooFewExperts { token, got, .. }) => (code, token as u32, got as u32) == (2, at_token, at_slot),
        Err(_) => false,
    };
    if is_right { Ok(()) } else { Err(Failure::Misrouted(format!("the API says {said:?} of the status {status:?}"))) }
}

/// The words of an operand.
fn words(operand: &Operand, buffer: &[u8]) -> Vec<u32> {
    buffer[operand.range()].as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect()
}

fn check_words(name: &'static str, operand: &Operand, buffer: &[u8], expected: &[u32]) -> Result<(), Failure> {
    let got = words(operand, buffer);
    match got.iter().zip(expected).position(|(got, expected)| got != expected) {
        None => Ok(()),
        Some(column) => {
            let (expected, got) = (expected[column], got[column]);
            Err(Failure::WrongBits(WrongBits { operand: name, row: 0, column, expected, got }))
        }
    }
}
