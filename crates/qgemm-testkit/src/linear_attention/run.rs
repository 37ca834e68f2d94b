//! Runs one linear attention on a device and judges the result.

use qgemm_api::{
    Context, Decay, DeviceKind, Error, LinearAttention, LinearAttentionArgs, LinearAttentionPlan, Queries,
};
use qgemm_formats::DType;
use qgemm_hal::op::linear_attention::{BetaSource, DecayPer, DecaySource};

use super::case::LinearAttentionCase;
use super::oracle::{Attended, EPSILON, Inputs, SCALE, attend};
use crate::compare::compare;
use crate::expected::Expected;
use crate::limits::{Tolerance, rounded_to};
use crate::operand::Operand;
use crate::outcome::{Exemption, Failure, Outcome, Verdict};

/// Exemptions. An exemption fails if the case can
/// be planned.
const EXEMPTIONS: &[Exemption<LinearAttentionCase>] = &[];
/// Error limit of D before it is rounded, and of states.
const LIMIT: f64 = 1e-10;
/// Limit of kernels that process chunks of tokens: an operand of a
/// product has 16 bits, and a chunk has a chain of such products.
const CHUNK_LIMIT: f64 = 1e-9;

/// Runs `case` on poisoned memory and judges the result. A second run
/// must match, unless the device is emulated.
pub fn run(ctx: &Context, case: &LinearAttentionCase) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, EXEMPTIONS);
    outcome
}

/// Memory layout of a case's operands.
struct Stored {
    q: Operand,
    k: Operand,
    v: Operand,
    decay: Operand,
    beta: Operand,
    states: Operand,
    d: Operand,
}

impl Stored {
    fn new(case: &LinearAttentionCase) -> Self {
        let ((heads, key_heads), (qk_dim, v_dim), tokens) = (case.heads, case.dims, case.tokens());
        let rows = |heads, columns, gap| Operand::new(case.dtype, tokens * heads, columns, gap, case.offset);
        let decay = match case.decay {
            Some((_, DecaySource::Softplus(dtype))) => dtype,
            _ => DType::F32,
        };
        Self {
            q: rows(key_heads, qk_dim, case.gap),
            k: rows(key_heads, qk_dim, case.gap),
            v: rows(heads, v_dim, case.gap),
            decay: Operand::new(decay, tokens, heads * case.head_decays(), case.gap, 0),
            beta: Operand::new(DType::F32, tokens, heads, case.gap, 0),
            states: Operand::new(DType::F32, case.slots.0, heads * qk_dim * v_dim, 4 * case.gap, 0),
            d: rows(heads, v_dim, case.d_gap),
        }
    }
}

/// Written memory: D and the states.
type Written = (Vec<u8>, Vec<u8>);

fn judge(ctx: &Context, case: &LinearAttentionCase, outcome: &mut Outcome) -> Result<(), Failure> {
    let stored = Stored::new(case);
    let plan = ctx.plan_linear_attention(&problem(case, &stored)).map_err(Failure::of_plan)?;
    outcome.kernel = Some(plan.kernel_name().to_owned());
    outcome.kernel_id = plan.kernel_id();
    Failure::check_launched(plan.sequence(), plan.kernel_id())?;

    let inputs = Inputs::of(case);
    let run = || run_on(ctx, &plan, case, &stored, &inputs).map_err(Failure::of_run);
    let written = run()?;
    let limit = if plan.step_tokens() > 1 { CHUNK_LIMIT } else { LIMIT };
    check(case, &stored, &attend(case, &inputs), &written, limit, outcome)?;
    // Emulated threads run in one order: a second run is the same.
    if ctx.info().id.kind != DeviceKind::Emu {
        let second = run()?;
        Failure::check_same(&written.0, &second.0)?;
        Failure::check_same(&written.1, &second.1)?;
    }
    Ok(())
}

/// A setter of the builder.
type Setter = fn(LinearAttention) -> LinearAttention;

fn problem(case: &LinearAttentionCase, stored: &Stored) -> LinearAttention {
    let ((heads, key_heads), (qk_dim, v_dim)) = (case.heads, case.dims);
    let most = case.lengths.iter().copied().max().unwrap_or(0);
    let queries = match case.ragged {
        true => Queries::offsets(case.lengths.len(), case.tokens(), most),
        false => Queries::each(case.lengths.len(), most),
    };
    let strides = |operand: &Operand, heads: usize| {
        let row = operand.row_stride() as u64;
        (heads as u64 * row, row)
    };
    let (q, k) = (strides(&stored.q, key_heads), strides(&stored.k, key_heads));
    let (v, d) = (strides(&stored.v, heads), strides(&stored.d, heads));
    let mut attention = LinearAttention::new(case.dtype, heads, qk_dim, queries, case.slots.0)
        .key_heads(key_heads)
        .v_dim(v_dim)
        .q_strides(q.0, q.1)
        .k_strides(k.0, k.1)
        .v_strides(v.0, v.1)
        .d_strides(d.0, d.1)
        .alignment(stored.q.alignment())
        .slot_stride(stored.states.row_stride() as u64)
        .scale(SCALE);
    if let Some((per, source)) = case.decay {
        let decay = match per {
            DecayPer::Head => Decay::per_head(),
            DecayPer::Feature => Decay::per_feature(),
        };
        let decay = match source {
            DecaySource::Log => decay,
            DecaySource::Softplus(dtype) => decay.softplus(dtype),
        };
        attention = attention.decay(decay).decay_stride(stored.decay.row_stride() as u64);
    }
    if case.beta.is_some() {
        attention = attention.beta().beta_stride(stored.beta.row_stride() as u64);
    }
    if let Some(bytes) = case.max_workspace {
        attention = attention.max_workspace(bytes);
    }
    let choices: [(bool, Setter); 11] = [
        (case.beta == Some(BetaSource::Sigmoid), LinearAttention::beta_logits),
        (case.beta == Some(BetaSource::TimeStep), LinearAttention::time_step_beta),
        (case.tiled, LinearAttention::tiled_key_heads),
        (!case.delta, LinearAttention::without_delta),
        (case.skip, LinearAttention::skip),
        (case.norm, |attention| attention.normalized(EPSILON)),
        (case.slots.1, LinearAttention::slot_indices),
        (case.from_zero, LinearAttention::from_zero),
        (case.advance, LinearAttention::advance),
        (case.pending, LinearAttention::pending),
        (case.batch_invariant, LinearAttention::batch_invariant),
    ];
    choices.into_iter().filter(|(is_set, _)| *is_set).fold(attention, |attention, (_, set)| set(attention))
}

/// Contents of the buffers around D and the states after a run.
fn run_on(
    ctx: &Context,
    plan: &LinearAttentionPlan,
    case: &LinearAttentionCase,
    stored: &Stored,
    inputs: &Inputs,
) -> Result<Written, Error> {
    let upload = |operand: &Operand, values: &[f32]| ctx.upload(&operand.encode(values));
    let (q, k, v) = (upload(&stored.q, &inputs.q)?, upload(&stored.k, &inputs.k)?, upload(&stored.v, &inputs.v)?);
    let decay = upload(&stored.decay, &inputs.decays)?;
    let [a_log, dt_bias] = [&inputs.decay_parameters[0], &inputs.decay_parameters[1]];
    let (a_log, dt_bias) = (ctx.upload(a_log)?, ctx.upload(dt_bias)?);
    let (beta, skip) = (upload(&stored.beta, &inputs.betas)?, ctx.upload(&inputs.skips)?);
    let (offsets, slots) = (ctx.upload(&case.offsets())?, ctx.upload(&case.slot_of_each())?);
    let (advances, pendings) = (ctx.upload(&case.advances())?, ctx.upload(&case.pendings())?);
    let mut states = upload(&stored.states, &inputs.states)?;
    let mut d = ctx.upload(&stored.d.poison())?;
    let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    let mut args = LinearAttentionArgs::new(
        q.slice(stored.q.range())?,
        k.slice(stored.k.range())?,
        v.slice(stored.v.range())?,
        states.slice_mut(stored.states.range())?,
        d.slice_mut(stored.d.range())?,
    );
    match case.decay {
        None => {}
        Some((_, DecaySource::Log)) => args = args.decay(decay.slice(stored.decay.range())?),
        Some((_, DecaySource::Softplus(_))) => {
            args = args.made_decay(decay.slice(stored.decay.range())?, &a_log, &dt_bias);
        }
    }
    args.beta = if plan.op().reads_beta() { Some(beta.slice(stored.beta.range())?) } else { None };
    args.skip = case.skip.then(|| (&skip).into());
    args.q_offsets = case.ragged.then(|| (&offsets).into());
    args.slots = case.slots.1.then(|| (&slots).into());
    args.advance = case.advance.then(|| (&advances).into());
    args.pending = case.pending.then(|| (&pendings).into());
    plan.run(&ctx.default_stream(), args.workspace(&mut workspace))?;
    let written = (ctx.download(&d)?, ctx.download(&states)?);
    d.raw().check_guards()?;
    states.raw().check_guards()?;
    Ok(written)
}

/// Checks results and states, and that nothing else was written.
fn check(
    case: &LinearAttentionCase,
    stored: &Stored,
    expected: &Attended,
    (d, states): &Written,
    limit: f64,
    outcome: &mut Outcome,
) -> Result<(), Failure> {
    let outside = [(&stored.d, d), (&stored.states, states)];
    let outside = outside.into_iter().find_map(|(operand, bytes)| operand.first_written_outside(bytes));
    outside.map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))?;

    let mut got = stored.d.decode(d);
    let columns = case.dims.1;
    for (row, _) in expected.is_written.iter().enumerate().filter(|(_, is_written)| !**is_written) {
        let values = &mut got[row * columns..][..columns];
        // Poison is NaN in every type.
        if values.iter().any(|value| !value.is_nan()) {
            return Err(Failure::WroteRow(row));
        }
        values.fill(0.0);
    }
    compared(&got, &expected.d, rounded_to(case.dtype, limit), outcome)?;
    let got = stored.states.decode(states);
    compared(&got, &expected.states, Tolerance::relative(limit), outcome)
}

fn compared(got: &[f32], expected: &Expected, tolerance: Tolerance, outcome: &mut Outcome) -> Result<(), Failure> {
    let comparison = compare(got, expected, tolerance);
    // The worst of both is shown.
    if outcome.comparison.is_none_or(|other| other.nmse <= comparison.nmse) {
        (outcome.comparison, outcome.limit) = (Some(comparison), Some(tolerance.nmse));
    }
    if comparison.within(tolerance) { Ok(()) } else { Err(Failure::Inaccurate(comparison)) }
}
