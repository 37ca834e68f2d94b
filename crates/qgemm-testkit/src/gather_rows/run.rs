//! Runs one row gather on a device and judges the
//! result.

use qgemm_api::{Context, DeviceKind, Error, GatherRows, GatherRowsArgs, GatherRowsPlan, Weight};
use qgemm_formats::{DType, Encoding, HostWeight};

use super::case::GatherRowsCase;
use crate::operand::Operand;
use crate::outcome::{Exemption, Failure, Outcome, Verdict, WrongBits};
use crate::weights::weight;

/// Exemptions. An exemption fails if the case can be
/// planned.
const EXEMPTIONS: &[Exemption<GatherRowsCase>] = &[];

/// Error of f32 arithmetic, relative to a row's
/// maximum. Scale, minimum and row scale are one
/// product each.
const ARITHMETIC: f64 = 4.0 * f32::EPSILON as f64;

/// Runs `case` on poisoned memory and compares with
/// the host's dequantization. A second run must
/// match, unless the device is emulated.
pub fn run(ctx: &Context, case: &GatherRowsCase) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, EXEMPTIONS);
    outcome
}

fn judge(ctx: &Context, case: &GatherRowsCase, outcome: &mut Outcome) -> Result<(), Failure> {
    let no_weight = |error: &dyn std::fmt::Display| Failure::Weight(error.to_string());
    let host = weight(case.weights, case.format, case.table_rows, case.k, case.act_order, case.seed);
    let host = host.map_err(|error| no_weight(&error))?;
    let weight = ctx.load(&host).map_err(|error| no_weight(&error))?;
    let stored = Operand::new(case.d_dtype, case.rows, case.k, case.d_gap, case.d_offset);
    let gather = GatherRows::new(&weight, case.rows)
        .d_dtype(case.d_dtype)
        .d_row_stride(stored.row_stride() as u64)
        .d_alignment(stored.alignment())
        .scale(case.scale);
    let plan = ctx.plan_gather_rows(&gather).map_err(Failure::of_plan)?;
    outcome.kernel = Some(plan.kernel_name().to_owned());
    outcome.kernel_id = plan.kernel_id();
    Failure::check_launched(plan.sequence(), plan.kernel_id())?;

    let ids = case.ids();
    let first = run_on(ctx, &plan, case, &weight, &stored, &ids)?;
    check_values(case, &host, &ids, &stored.decode(&first))?;
    stored.first_written_outside(&first).map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))?;
    // Emulated threads run in one order: a second run is
    // the same.
    if ctx.info().id.kind != DeviceKind::Emu {
        Failure::check_same(&first, &run_on(ctx, &plan, case, &weight, &stored, &ids)?)?;
    }
    Ok(())
}

/// Runs the plan and checks its status; returns D's
/// buffer.
fn run_on(
    ctx: &Context,
    plan: &GatherRowsPlan,
    case: &GatherRowsCase,
    weight: &Weight,
    stored: &Operand,
    ids: &[u32],
) -> Result<Vec<u8>, Failure> {
    let launch = || -> Result<_, Error> {
        let ids = ctx.upload(ids)?;
        let mut d = ctx.upload(&stored.poison())?;
        let mut status = ctx.upload(&[u32::MAX; 4])?;
        let args = GatherRowsArgs::new(weight, &ids, d.slice_mut(stored.range())?, &mut status);
        plan.run(&ctx.default_stream(), args)?;
        let bytes = ctx.download(&d)?;
        d.raw().check_guards()?;
        Ok((bytes, plan.check_status(ctx, &status)))
    };
    let (bytes, said) = launch().map_err(Failure::of_run)?;
    let fault = ids.iter().position(|&id| id as usize >= case.table_rows);
    let expected = fault.map(|row| (row, ids[row]));
    let got = match said {
        Ok(()) => None,
        Err(Error::UnknownRow { row, id, .. }) => Some((row, id)),
        Err(error) => return Err(Failure::of_run(error)),
    };
    match got == expected {
        true => Ok(bytes),
        false => Err(Failure::WrongStatus { expected: format!("{expected:?}"), got: format!("{got:?}") }),
    }
}

/// Compares D with the host's rows. Plain weights and
/// bad ids match by bits. Other rows may have the
/// error of f32 arithmetic and of one rounding.
fn check_values(case: &GatherRowsCase, host: &HostWeight, ids: &[u32], got: &[f32]) -> Result<(), Failure> {
    let rounding = match case.d_dtype {
        DType::F32 => 0.0,
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
    };
    for (row, &id) in ids.iter().enumerate() {
        let expected = match (id as usize) < case.table_rows {
            true => host.dequantize_row(id as usize).into_iter().map(|value| value * case.scale).collect(),
            false => vec![0.0; case.k],
        };
        let is_exact = matches!(case.format.encoding, Encoding::Plain(_)) || expected.iter().all(|&value| value == 0.0);
        let largest = expected.iter().map(|value| f64::from(value.abs())).fold(0.0, f64::max);
        for (column, &value) in expected.iter().enumerate() {
            let rounded = case.d_dtype.decode(&case.d_dtype.encode(&[value]))[0];
            let got = got[row * case.k + column];
            let error = (f64::from(got) - f64::from(value)).abs();
            // The smallest step covers subnormal values
            // of f16.
            let allowed = ARITHMETIC * largest + rounding * f64::from(value.abs()) + 2f64.powi(-25);
            let is_right = got.to_bits() == rounded.to_bits()
                || (got.is_nan() && rounded.is_nan())
                || (!is_exact && error <= allowed)
                || (!is_exact && rounded.is_infinite() && got.abs() >= 65504.0);
            if !is_right {
                let (expected, got) = (rounded.to_bits(), got.to_bits());
                return Err(Failure::WrongBits(WrongBits { operand: "D", row, column, expected, got }));
            }
        }
    }
    Ok(())
}
