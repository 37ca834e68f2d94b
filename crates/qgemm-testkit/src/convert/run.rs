//! Runs one conversion on a device and judges the result.

use qgemm_api::{Context, Conversion, ConversionArgs, ConversionPlan, DeviceKind};
use qgemm_formats::DType;

use super::case::{ConvertCase, ConvertOrder};
use super::oracle::convert;
use crate::operand::Operand;
use crate::outcome::{Exemption, Failure, Outcome, Verdict, WrongBits};

/// Exemptions. An exemption fails if the case can be planned.
const EXEMPTIONS: &[Exemption<ConvertCase>] = &[];

/// Runs `case` on poisoned memory and compares bits with the
/// oracle. It runs twice where a second run may differ.
pub fn run(ctx: &Context, case: &ConvertCase) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, EXEMPTIONS);
    outcome
}

/// Memory layout of a case's operands.
struct Stored {
    x: Operand,
    d: Operand,
    /// The order: a row of `u32`. The type only gives the width.
    order: Operand,
    row_factors: Operand,
}

impl Stored {
    fn new(case: &ConvertCase) -> Self {
        let layout = case.layout;
        let x = match layout.x_transposed {
            false => Operand::new(case.from, case.rows, case.columns, layout.x_gap, layout.x_offset),
            true => Operand::new(case.from, case.columns, case.rows, layout.x_gap, layout.x_offset).transposed(),
        };
        Self {
            x,
            d: Operand::new(case.to, case.rows, case.d_columns, layout.d_gap, layout.d_offset),
            order: Operand::new(DType::F32, 1, case.d_columns, 0, layout.d_offset),
            row_factors: Operand::new(DType::F32, 1, case.rows, 0, layout.x_offset),
        }
    }
}

/// Contents of the buffers around D and the row factors after a
/// run.
#[derive(PartialEq)]
struct Written {
    d: Vec<u8>,
    row_factors: Vec<u8>,
}

fn judge(ctx: &Context, case: &ConvertCase, outcome: &mut Outcome) -> Result<(), Failure> {
    let stored = Stored::new(case);
    let plan = ctx.plan_conversion(&conversion(case, &stored)).map_err(Failure::of_plan)?;
    outcome.kernel = Some(plan.kernel_name().to_owned());
    outcome.kernel_id = plan.kernel_id();
    Failure::check_launched(plan.sequence(), plan.kernel_id())?;

    let (x, order) = (case.x(), case.columns_of_d());
    let first = run_on(ctx, &plan, case, &stored, (&x, &order)).map_err(Failure::of_run)?;
    let (expected_d, expected_factors) = convert(&x, case.columns, &order, case.to, case.row_factors);
    check_bits("D", case.to, &stored.d, &first.d, &expected_d)?;
    if case.row_factors {
        check_bits("row factors", DType::F32, &stored.row_factors, &first.row_factors, &expected_factors)?;
    }
    // Emulated threads run in one order, and conversions have no
    // workspace: a second run is the same.
    if ctx.info().id.kind != DeviceKind::Emu {
        let second = run_on(ctx, &plan, case, &stored, (&x, &order)).map_err(Failure::of_run)?;
        Failure::check_same(&first.d, &second.d)?;
        Failure::check_same(&first.row_factors, &second.row_factors)?;
    }
    Ok(())
}

fn conversion(case: &ConvertCase, stored: &Stored) -> Conversion {
    let mut conversion = Conversion::new(case.rows, case.columns, case.from, case.to)
        .x_row_stride(stored.x.row_stride() as u64)
        .x_alignment(stored.x.alignment())
        .d_columns(case.d_columns)
        .d_row_stride(stored.d.row_stride() as u64)
        .d_alignment(stored.d.alignment());
    if case.layout.x_transposed {
        conversion = conversion.x_transposed();
    }
    if case.order != ConvertOrder::None {
        conversion = conversion.gathered(case.d_columns);
    }
    if case.row_factors { conversion.row_factors() } else { conversion }
}

fn run_on(
    ctx: &Context,
    plan: &ConversionPlan,
    case: &ConvertCase,
    stored: &Stored,
    (x, order): (&[f32], &[u32]),
) -> Result<Written, qgemm_api::Error> {
    let x_buffer = ctx.upload(&stored.x.encode(x))?;
    let mut order_bytes = stored.order.poison();
    order_bytes[stored.order.range()].copy_from_slice(&order.iter().flat_map(|c| c.to_le_bytes()).collect::<Vec<u8>>());
    let order_buffer = ctx.upload(&order_bytes)?;
    let mut d = ctx.upload(&stored.d.poison())?;
    let mut row_factors = ctx.upload(&stored.row_factors.poison())?;
    let mut args = ConversionArgs::new(x_buffer.slice(stored.x.range())?, d.slice_mut(stored.d.range())?);
    if case.order != ConvertOrder::None {
        args.order = Some(order_buffer.slice(stored.order.range())?);
    }
    if case.row_factors {
        args.row_factors = Some(row_factors.slice_mut(stored.row_factors.range())?);
    }
    plan.run(&ctx.default_stream(), args)?;
    let written = Written { d: ctx.download(&d)?, row_factors: ctx.download(&row_factors)? };
    d.raw().check_guards()?;
    row_factors.raw().check_guards()?;
    Ok(written)
}

/// Compares `buffer` bit for bit, with any NaN equal to any
/// other, and checks its surroundings.
fn check_bits(
    operand: &'static str,
    dtype: DType,
    stored: &Operand,
    buffer: &[u8],
    expected: &[f32],
) -> Result<(), Failure> {
    let bits = |value: f32| {
        let bytes = dtype.encode(&[value]);
        bytes.iter().rev().fold(0u32, |bits, &byte| bits << 8 | u32::from(byte))
    };
    let got = stored.decode(buffer);
    let columns = stored.columns();
    let wrong = |(&got, &expected): (&f32, &f32)| bits(got) != bits(expected) && !(got.is_nan() && expected.is_nan());
    if let Some(at) = got.iter().zip(expected).position(wrong) {
        let (row, column) = (at / columns, at % columns);
        let (expected, got) = (bits(expected[at]), bits(got[at]));
        return Err(Failure::WrongBits(WrongBits { operand, row, column, expected, got }));
    }
    stored.first_written_outside(buffer).map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))
}
