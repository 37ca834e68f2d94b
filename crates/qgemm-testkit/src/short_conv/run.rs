//! Runs one convolution on a device and judges the result.

use qgemm_api::{Context, DeviceKind, Error, Queries, ShortConv, ShortConvArgs, ShortConvPlan};
use qgemm_formats::DType;

use super::case::{ShortConvAdvance, ShortConvCase};
use super::oracle::{Convolved, Inputs, convolve};
use crate::compare::compare;
use crate::limits::{EXACT_SUMS, rounded_to};
use crate::operand::Operand;
use crate::outcome::{Exemption, Failure, Outcome, Verdict, WrongBits};

/// Exemptions. An exemption fails if the case can
/// be planned.
const EXEMPTIONS: &[Exemption<ShortConvCase>] = &[];

/// Runs `case` on poisoned memory and judges the
/// result. A second run must match, unless the device
/// is emulated.
pub fn run(ctx: &Context, case: &ShortConvCase) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, EXEMPTIONS);
    outcome
}

/// Memory layout of a case's operands.
struct Stored {
    /// X and the gates.
    rows: Operand,
    weight: Operand,
    bias: Operand,
    /// A row for each slot.
    state: Operand,
    d: Operand,
}

/// Contents of the written buffers after a run.
struct Written {
    d: Vec<u8>,
    state: Vec<u8>,
}

fn judge(ctx: &Context, case: &ShortConvCase, outcome: &mut Outcome) -> Result<(), Failure> {
    let (tokens, channels) = (case.tokens(), case.channels);
    let window = (case.width - 1) * channels;
    let slot_gap = case.state.map_or(0, |state| state.gap);
    let stored = Stored {
        rows: Operand::new(case.dtype, tokens, channels, case.gap, case.offset),
        weight: Operand::new(DType::F32, channels, case.width, 0, case.offset),
        bias: Operand::new(DType::F32, 1, channels, 0, case.offset),
        state: Operand::new(case.dtype, case.slots(), window, slot_gap, case.offset),
        d: Operand::new(case.dtype, tokens, channels, case.d_gap, case.offset),
    };
    let plan = ctx.plan_short_conv(&problem(case, &stored)).map_err(Failure::of_plan)?;
    outcome.kernel = Some(plan.kernel_name().to_owned());
    outcome.kernel_id = plan.kernel_id();
    Failure::check_launched(plan.sequence(), plan.kernel_id())?;

    let inputs = Inputs {
        x: case.numbers(1, tokens * channels, case.dtype),
        weight: case.numbers(2, channels * case.width, DType::F32),
        bias: case.numbers(3, channels, DType::F32),
        input_gate: case.numbers(4, tokens * channels, case.dtype),
        output_gate: case.numbers(5, tokens * channels, case.dtype),
        state: case.numbers(6, case.slots() * window, case.dtype),
    };
    let run = || run_on(ctx, &plan, case, &stored, &inputs).map_err(Failure::of_run);
    let first = run()?;
    check(case, &stored, &convolve(case, &inputs), &first, outcome)?;
    // Emulated threads run in one order: a second run is the same.
    if ctx.info().id.kind != DeviceKind::Emu {
        let second = run()?;
        Failure::check_same(&first.d, &second.d)?;
        Failure::check_same(&first.state, &second.state)?;
    }
    Ok(())
}

/// A setter of the builder.
type Setter = fn(ShortConv) -> ShortConv;

fn problem(case: &ShortConvCase, stored: &Stored) -> ShortConv {
    let queries = match case.ragged {
        true => Queries::offsets(case.lengths.len(), case.tokens(), case.most()),
        false => Queries::each(case.lengths.len(), case.most()),
    };
    let row = stored.rows.row_stride() as u64;
    let mut conv = ShortConv::new(case.dtype, case.channels, case.width, queries)
        .x_row_stride(row)
        .d_row_stride(stored.d.row_stride() as u64)
        .alignment(stored.rows.alignment());
    let optional: [(bool, Setter); 4] = [
        (case.bias, ShortConv::bias),
        (case.silu, ShortConv::silu),
        (case.state.is_some_and(|state| state.from_zeros), ShortConv::from_zeros),
        (case.state.is_some_and(|state| state.advance != ShortConvAdvance::All), ShortConv::advance),
    ];
    for (_, with) in optional.into_iter().filter(|(is_wanted, _)| *is_wanted) {
        conv = with(conv);
    }
    if case.gates[0] {
        conv = conv.input_gate_row_stride(row);
    }
    if case.gates[1] {
        conv = conv.output_gate_row_stride(row);
    }
    match case.state {
        None => conv,
        Some(_) => conv
            .state(case.slots())
            .slot_stride(stored.state.row_stride() as u64)
            .state_alignment(stored.state.alignment()),
    }
}

/// Contents of the buffers around D and the state after a run.
fn run_on(
    ctx: &Context,
    plan: &ShortConvPlan,
    case: &ShortConvCase,
    stored: &Stored,
    inputs: &Inputs,
) -> Result<Written, Error> {
    let of_rows = |values: &[f32]| ctx.upload(&stored.rows.encode(values));
    let (x, input_gate, output_gate) =
        (of_rows(&inputs.x)?, of_rows(&inputs.input_gate)?, of_rows(&inputs.output_gate)?);
    let weight = ctx.upload(&stored.weight.encode(&inputs.weight))?;
    let bias = ctx.upload(&stored.bias.encode(&inputs.bias))?;
    let (offsets, slots) = (ctx.upload(&case.offsets())?, ctx.upload(&case.slot_of_each())?);
    let advance = case.advance().map(|advance| ctx.upload(&advance)).transpose()?;
    let mut state = ctx.upload(&stored.state.encode(&inputs.state))?;
    let mut d = ctx.upload(&stored.d.poison())?;
    let rows = stored.rows.range();
    let (x, weight) = (x.slice(rows.clone())?, weight.slice(stored.weight.range())?);
    let mut args = ShortConvArgs::new(x, weight, d.slice_mut(stored.d.range())?);
    if case.bias {
        args = args.bias(bias.slice(stored.bias.range())?);
    }
    if case.gates[0] {
        args = args.input_gate(input_gate.slice(rows.clone())?);
    }
    if case.gates[1] {
        args = args.output_gate(output_gate.slice(rows)?);
    }
    if case.ragged {
        args = args.q_offsets(&offsets);
    }
    if case.state.is_some() {
        args = args.state(state.slice_mut(stored.state.range())?).slots(&slots);
    }
    if let Some(advance) = &advance {
        args = args.advance(advance);
    }
    plan.run(&ctx.default_stream(), args)?;
    let written = Written { d: ctx.download(&d)?, state: ctx.download(&state)? };
    d.raw().check_guards()?;
    state.raw().check_guards()?;
    Ok(written)
}

/// Checks results and states, and that nothing else was written.
fn check(
    case: &ShortConvCase,
    stored: &Stored,
    expected: &Convolved,
    written: &Written,
    outcome: &mut Outcome,
) -> Result<(), Failure> {
    let (width, start, row) = (case.dtype.bytes(), stored.d.range().start, stored.d.row_stride());
    let of_sequences: Vec<usize> = case.spans().into_iter().flat_map(|(first, count)| first..first + count).collect();
    // What remains is poison.
    let mut outside = written.d.clone();
    for token in &of_sequences {
        outside[start + token * row * width..][..case.channels * width].fill(0xff);
    }
    outside.iter().position(|&byte| byte != 0xff).map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))?;
    stored.state.first_written_outside(&written.state).map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))?;

    let in_memory = stored.d.decode(&written.d);
    let mut got = vec![0.0; in_memory.len()];
    for token in of_sequences {
        let columns = token * case.channels..(token + 1) * case.channels;
        got[columns.clone()].copy_from_slice(&in_memory[columns]);
    }
    let tolerance = rounded_to(case.dtype, EXACT_SUMS);
    let comparison = compare(&got, &expected.d, tolerance);
    (outcome.comparison, outcome.limit) = (Some(comparison), Some(tolerance.nmse));
    if !comparison.within(tolerance) {
        return Err(Failure::Inaccurate(comparison));
    }
    let state = stored.state.decode(&written.state);
    let columns = (case.width - 1) * case.channels;
    match state.iter().zip(&expected.state).position(|(got, expected)| got.to_bits() != expected.to_bits()) {
        None => Ok(()),
        Some(at) => Err(Failure::WrongBits(WrongBits {
            operand: "the state",
            row: at / columns,
            column: at % columns,
            expected: expected.state[at].to_bits(),
            got: state[at].to_bits(),
        })),
    }
}
