//! Runs one quantization on a device and judges the result.

use qgemm_api::{Buffer, Context, DeviceKind, Quantization, QuantizationArgs, QuantizationPlan};
use qgemm_formats::XRow;

use super::case::QuantizeCase;
use crate::operand::Operand;
use crate::outcome::{Exemption, Failure, Outcome, Verdict};
use crate::planes::{PLANES, Plane, planes_of};

/// Exemptions. An exemption fails if the case can be planned.
const EXEMPTIONS: &[Exemption<QuantizeCase>] = &[];

/// Runs `case` on poisoned memory and compares every bit with the
/// host's reference. It runs twice where a second run may differ.
pub fn run(ctx: &Context, case: &QuantizeCase) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, EXEMPTIONS);
    outcome
}

/// Correct contents of the buffers.
fn reference(case: &QuantizeCase, planes: &[Plane; PLANES], x: &[f32]) -> [Vec<u8>; PLANES] {
    let parts = case.parts();
    let mut buffers = planes.each_ref().map(Plane::poison);
    for (row, values) in x.chunks_exact(case.columns).enumerate() {
        let [codes, scales, factors, sums] = &mut buffers;
        let at = planes.each_ref().map(|plane| plane.row(row));
        let [codes_at, scales_at, factors_at, sums_at] = at;
        let planes = XRow { codes: &mut codes[codes_at], scales: &mut scales[scales_at], sums: &mut sums[sums_at] };
        if let Some(factor) = parts.quantize_row(values, case.factor, planes) {
            factors[factors_at].copy_from_slice(&factor.to_le_bytes());
        }
    }
    buffers
}

/// Quantization error: its energy relative to X; `None` if it is
/// not finite.
fn loss(case: &QuantizeCase, planes: &[Plane; PLANES], buffers: &[Vec<u8>; PLANES], x: &[f32]) -> Option<f64> {
    let parts = case.parts();
    let [codes, scales, factors, _] = buffers;
    let (mut error, mut energy) = (0.0, 0.0);
    for (row, values) in x.chunks_exact(case.columns).enumerate() {
        let [codes_at, scales_at, factors_at, _] = planes.each_ref().map(|plane| plane.row(row));
        let of_token = factors[factors_at].first_chunk().map(|word| f32::from_le_bytes(*word));
        let back = parts.dequantize_row(&codes[codes_at], &scales[scales_at], of_token.or(case.factor), case.columns);
        for (&value, back) in values.iter().zip(back) {
            error += (f64::from(value) - f64::from(back)).powi(2);
            energy += f64::from(value).powi(2);
        }
    }
    Some(error / energy).filter(|loss| loss.is_finite())
}

fn judge(ctx: &Context, case: &QuantizeCase, outcome: &mut Outcome) -> Result<(), Failure> {
    let layout = case.layout;
    let stored = match layout.x_transposed {
        false => Operand::new(case.from, case.rows, case.columns, layout.x_gap, layout.x_offset),
        true => Operand::new(case.from, case.columns, case.rows, layout.x_gap, layout.x_offset).transposed(),
    };
    let planes = planes_of(&case.parts(), [case.rows, case.columns], case.layout.gap, case.layout.offset);
    let plan = ctx.plan_quantization(&quantization(case, &stored, &planes)).map_err(Failure::of_plan)?;
    outcome.kernel = Some(plan.kernel_name().to_owned());
    outcome.kernel_id = plan.kernel_id();
    Failure::check_launched(plan.sequence(), plan.kernel_id())?;

    let x = case.x();
    let expected = reference(case, &planes, &x);
    outcome.rounding_loss = loss(case, &planes, &expected, &x);
    let first = run_on(ctx, &plan, case, &stored, &planes, &x).map_err(Failure::of_run)?;
    for ((plane, buffer), expected) in planes.iter().zip(&first).zip(&expected) {
        plane.check(buffer, expected)?;
    }
    // Emulated threads run in one order, without a workspace: a
    // second run is the same.
    if ctx.info().id.kind != DeviceKind::Emu {
        let second = run_on(ctx, &plan, case, &stored, &planes, &x).map_err(Failure::of_run)?;
        for (first, second) in first.iter().zip(&second) {
            Failure::check_same(first, second)?;
        }
    }
    Ok(())
}

fn quantization(case: &QuantizeCase, stored: &Operand, planes: &[Plane; PLANES]) -> Quantization {
    let [codes, scales, _, sums] = planes.each_ref().map(|plane| plane.row_stride as u64);
    let parts = case.parts();
    let mut quantization = Quantization::new(case.rows, case.columns, case.from, case.to)
        .x_row_stride(stored.row_stride() as u64)
        .x_alignment(stored.alignment())
        .codes_row_stride(codes);
    if case.layout.x_transposed {
        quantization = quantization.x_transposed();
    }
    if parts.scale.is_some() {
        quantization = quantization.scales_row_stride(scales);
    }
    if parts.sum_span.is_some() {
        quantization = quantization.sums_row_stride(sums);
    }
    if case.factor.is_some() {
        quantization = quantization.given_factor();
    }
    case.sum_span.into_iter().fold(quantization, Quantization::sums_of)
}

fn run_on(
    ctx: &Context,
    plan: &QuantizationPlan,
    case: &QuantizeCase,
    stored: &Operand,
    planes: &[Plane; PLANES],
    x: &[f32],
) -> Result<[Vec<u8>; PLANES], qgemm_api::Error> {
    let x_buffer = ctx.upload(&stored.encode(x))?;
    let factor = case.factor.map(|factor| ctx.upload(&factor.to_le_bytes())).transpose()?;
    let upload = |plane: &Plane| ctx.upload(&plane.poison());
    let mut buffers: Vec<Buffer> = planes.iter().map(upload).collect::<Result<_, _>>()?;
    {
        let [codes, scales, factors, sums] = &mut buffers[..] else { unreachable!("as many as planes") };
        let [codes_at, scales_at, factors_at, sums_at] = planes;
        let mut args = QuantizationArgs::new(x_buffer.slice(stored.range())?, codes.slice_mut(codes_at.range())?);
        args.factor = factor.as_ref().map(Into::into);
        if scales_at.row_bytes > 0 {
            args.scales = Some(scales.slice_mut(scales_at.range())?);
        }
        if factors_at.row_bytes > 0 {
            args.token_factors = Some(factors.slice_mut(factors_at.range())?);
        }
        if sums_at.row_bytes > 0 {
            args.sums = Some(sums.slice_mut(sums_at.range())?);
        }
        plan.run(&ctx.default_stream(), args)?;
    }
    let mut written = [const { Vec::new() }; PLANES];
    for (written, buffer) in written.iter_mut().zip(&buffers) {
        *written = ctx.download(buffer)?;
        buffer.raw().check_guards()?;
    }
    Ok(written)
}
