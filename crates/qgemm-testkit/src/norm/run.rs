//! Runs one norm on a device and judges the result.

use qgemm_api::{Buffer, Context, DeviceKind, Error, Norm, NormArgs, NormKind, NormPlan, Quantization};
use qgemm_formats::{DType, XFactor, XFormat, XParts};

use super::case::{NormAliasing, NormCase, NormGateCase};
use super::oracle::expected;
use super::quantized;
use crate::compare::compare;
use crate::limits::rounded_to;
use crate::operand::Operand;
use crate::outcome::{Exemption, Failure, Outcome, Verdict, WrongBits};
use crate::planes::{PLANES, Plane, planes_of};

/// Exemptions. An exemption fails if the case can be planned.
const EXEMPTIONS: &[Exemption<NormCase>] = &[];
/// Error limit of a norm before its output is rounded.
const LIMIT: f64 = 1e-9;

/// Runs `case` on poisoned memory. It compares the result with
/// the oracle, and the sum bit for bit. It runs twice where a
/// second run may differ.
pub fn run(ctx: &Context, case: &NormCase) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, EXEMPTIONS);
    outcome
}

/// Memory layout of a case's operands.
struct Stored {
    x: Operand,
    residual: Operand,
    sum: Operand,
    d: Operand,
    gamma: Operand,
    beta: Operand,
    /// z of the gate.
    z: Operand,
    /// Planes, written instead of D.
    planes: Option<[Plane; PLANES]>,
}

impl Stored {
    fn new(case: &NormCase) -> Self {
        let (layout, [residual, sum]) = (case.layout, case.added.unwrap_or([DType::F32; 2]));
        let matrix = |dtype, gap, offset| Operand::new(dtype, case.rows, case.columns, gap, offset);
        let of_columns =
            |dtype: Option<DType>| Operand::new(dtype.unwrap_or(DType::F32), 1, case.columns, 0, layout.gamma_offset);
        let x = matrix(case.x, layout.x_gap, layout.x_offset);
        let residual = matrix(residual, layout.residual_gap, layout.d_offset);
        Self {
            x,
            residual,
            sum: match case.place {
                NormAliasing::SumInX => x,
                place if place.sum_in_residual() => residual,
                _ => matrix(sum, layout.sum_gap, layout.x_offset),
            },
            d: match case.place.d_in_x() {
                true => x,
                false => Operand::new(case.d, case.rows, case.columns + case.padding, layout.d_gap, layout.d_offset),
            },
            z: matrix(case.x, layout.residual_gap, layout.d_offset),
            gamma: of_columns(case.function.gamma),
            beta: of_columns(case.function.beta),
            planes: case
                .parts()
                .map(|parts| planes_of(&parts, [case.rows, case.columns], layout.d_gap, layout.d_offset)),
        }
    }
}

/// Inputs of a run.
struct Inputs {
    x: Vec<f32>,
    residual: Vec<f32>,
    gamma: Vec<f32>,
    beta: Vec<f32>,
    z: Vec<f32>,
}

/// Contents of the buffers around D and the sum after a run.
struct Written {
    d: Vec<u8>,
    planes: Vec<Vec<u8>>,
    sum: Vec<u8>,
}

fn judge(ctx: &Context, case: &NormCase, outcome: &mut Outcome) -> Result<(), Failure> {
    let stored = Stored::new(case);
    let plan = ctx.plan_norm(&norm(case, &stored)).map_err(Failure::of_plan)?;
    outcome.kernel = Some(plan.kernel_name().to_owned());
    outcome.kernel_id = plan.kernel_id();
    Failure::check_launched(plan.sequence(), plan.kernel_id())?;

    let [gamma, beta] = case.of_columns();
    let (residual, z) = (case.residual_values(), case.gate_values());
    let inputs = Inputs { x: case.x_values(), residual, gamma, beta, z };
    let first = run_on(ctx, &plan, case, &stored, &inputs).map_err(Failure::of_run)?;
    let normalized = match case.added {
        None => inputs.x.clone(),
        Some([_, sum]) => {
            let added: Vec<f32> = inputs.x.iter().zip(&inputs.residual).map(|(x, residual)| x + residual).collect();
            let expected = sum.decode(&sum.encode(&added));
            check_sum(sum, &stored.sum, &first.sum, &expected)?;
            expected
        }
    };
    let oracle = expected(case, &normalized, &inputs.z, &inputs.gamma, &inputs.beta);
    if let (Some(parts), Some(planes)) = (case.parts(), &stored.planes) {
        let given = given_factor(&parts);
        let is_centered = case.function.kind == NormKind::Layer;
        outcome.rounding_loss = quantized::check(&oracle, is_centered, &parts, given, planes, &first.planes)?;
        if ctx.info().id.kind != DeviceKind::Emu {
            let second = run_on(ctx, &plan, case, &stored, &inputs).map_err(Failure::of_run)?;
            for (first, second) in first.planes.iter().zip(&second.planes) {
                Failure::check_same(first, second)?;
            }
            Failure::check_same(&first.sum, &second.sum)?;
        }
        return Ok(());
    }
    let tolerance = rounded_to(case.d, LIMIT);
    let got = without_padding(case, &stored.d.decode(&first.d))?;
    let comparison = compare(&got, &oracle, tolerance);
    (outcome.comparison, outcome.limit) = (Some(comparison), Some(tolerance.nmse));
    if !comparison.within(tolerance) {
        return Err(Failure::Inaccurate(comparison));
    }
    stored.d.first_written_outside(&first.d).map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))?;
    // Emulated threads run in one order, and norms have no
    // workspace: a second run is the same.
    if ctx.info().id.kind != DeviceKind::Emu {
        let second = run_on(ctx, &plan, case, &stored, &inputs).map_err(Failure::of_run)?;
        Failure::check_same(&first.d, &second.d)?;
        Failure::check_same(&first.sum, &second.sum)?;
    }
    Ok(())
}

fn norm(case: &NormCase, stored: &Stored) -> Norm {
    let mut norm = Norm::new(case.rows, case.columns, case.x, case.function)
        .x_row_stride(stored.x.row_stride() as u64)
        .x_alignment(stored.x.alignment())
        .groups(case.groups);
    if let Some(NormGateCase { function, before }) = case.gate {
        norm = if before { norm.gate_before(function) } else { norm.gate(function) };
        norm = norm.gate_row_stride(stored.z.row_stride() as u64).gate_alignment(stored.z.alignment());
    }
    norm = match case.place.d_in_x() {
        true => norm.d_in_place(),
        false => {
            let norm = match (case.to, case.parts(), &stored.planes) {
                (Some(to), Some(parts), Some(planes)) => {
                    return with_residual(norm.d_quantization(&quantization(case, to, &parts, planes)), case, stored);
                }
                _ => norm.d_dtype(case.d),
            };
            let norm = norm.d_columns(case.columns + case.padding);
            norm.d_row_stride(stored.d.row_stride() as u64).d_alignment(stored.d.alignment())
        }
    };
    with_residual(norm, case, stored)
}

/// The given factor of a quantized result, if any.
fn given_factor(parts: &XParts) -> Option<f32> {
    (parts.factor == XFactor::Given).then_some(if parts.scale.is_some() { 0.002 } else { 0.03125 })
}

fn quantization(case: &NormCase, to: XFormat, parts: &XParts, planes: &[Plane; PLANES]) -> Quantization {
    let [codes, scales, _, sums] = planes.each_ref().map(|plane| plane.row_stride as u64);
    let mut all = Quantization::new(case.rows, case.columns, case.x, to).codes_row_stride(codes);
    if parts.scale.is_some() {
        all = all.scales_row_stride(scales);
    }
    if let Some(span) = parts.sum_span {
        all = all.sums_of(span).sums_row_stride(sums);
    }
    if parts.factor == XFactor::Given && parts.scale.is_some() {
        all = all.given_factor();
    }
    all
}

fn with_residual(norm: Norm, case: &NormCase, stored: &Stored) -> Norm {
    let Some([residual, sum]) = case.added else { return norm };
    let norm = norm
        .residual(residual)
        .residual_row_stride(stored.residual.row_stride() as u64)
        .residual_alignment(stored.residual.alignment());
    match case.place {
        NormAliasing::SumInX => norm.sum_in_place_of_x(),
        place if place.sum_in_residual() => norm.sum_in_place(),
        _ => {
            let norm = norm.sum_dtype(sum).sum_row_stride(stored.sum.row_stride() as u64);
            norm.sum_alignment(stored.sum.alignment())
        }
    }
}

fn run_on(ctx: &Context, plan: &NormPlan, case: &NormCase, stored: &Stored, inputs: &Inputs) -> Result<Written, Error> {
    let upload = |operand: &Operand, values: &[f32]| ctx.upload(&operand.encode(values));
    let x = upload(&stored.x, &inputs.x)?;
    let residual = upload(&stored.residual, &inputs.residual)?;
    let (gamma, beta) = (upload(&stored.gamma, &inputs.gamma)?, upload(&stored.beta, &inputs.beta)?);
    let z = upload(&stored.z, &inputs.z)?;
    // An output that shares memory holds the input before.
    let mut d = match case.place.d_in_x() {
        true => upload(&stored.x, &inputs.x)?,
        false => ctx.upload(&stored.d.poison())?,
    };
    let mut sum = match case.place {
        NormAliasing::SumInX => upload(&stored.x, &inputs.x)?,
        place if place.sum_in_residual() => upload(&stored.residual, &inputs.residual)?,
        _ => ctx.upload(&stored.sum.poison())?,
    };
    let planes = stored.planes.as_ref().map(|planes| planes.as_slice()).unwrap_or_default();
    let upload = |plane: &Plane| ctx.upload(&plane.poison());
    let mut buffers: Vec<Buffer> = planes.iter().map(upload).collect::<Result<_, _>>()?;
    let given = case.parts().and_then(|parts| given_factor(&parts)).map(|factor| ctx.upload(&[factor])).transpose()?;
    let mut args = match &mut buffers[..] {
        [codes, scales, factors, sums] => {
            let mut args = NormArgs::in_place(codes.slice_mut(planes[0].range())?);
            args.factor = given.as_ref().map(Into::into);
            if planes[1].row_bytes > 0 {
                args.scales = Some(scales.slice_mut(planes[1].range())?);
            }
            if planes[2].row_bytes > 0 {
                args.token_factors = Some(factors.slice_mut(planes[2].range())?);
            }
            if planes[3].row_bytes > 0 {
                args.sums = Some(sums.slice_mut(planes[3].range())?);
            }
            args
        }
        _ => NormArgs::in_place(d.slice_mut(stored.d.range())?),
    };
    if !case.place.d_in_x() && case.place != NormAliasing::SumInX {
        args.x = Some(x.slice(stored.x.range())?);
    }
    if case.function.gamma.is_some() {
        args = args.gamma(gamma.slice(stored.gamma.range())?);
    }
    if case.function.beta.is_some() {
        args = args.beta(beta.slice(stored.beta.range())?);
    }
    if case.gate.is_some() {
        args = args.gate(z.slice(stored.z.range())?);
    }
    if case.added.is_some() {
        args = args.sum(sum.slice_mut(stored.sum.range())?);
        if !case.place.sum_in_residual() {
            args = args.residual(residual.slice(stored.residual.range())?);
        }
    }
    plan.run(&ctx.default_stream(), args)?;
    let mut planes = Vec::new();
    for buffer in &buffers {
        planes.push(ctx.download(buffer)?);
        buffer.raw().check_guards()?;
    }
    let written = Written { d: ctx.download(&d)?, planes, sum: ctx.download(&sum)? };
    d.raw().check_guards()?;
    sum.raw().check_guards()?;
    Ok(written)
}

/// D without padding columns. The padding must be 0.
fn without_padding(case: &NormCase, d: &[f32]) -> Result<Vec<f32>, Failure> {
    let mut values = Vec::with_capacity(case.rows * case.columns);
    for (row, of_row) in d.chunks_exact(case.columns + case.padding).enumerate() {
        let (own, padding) = of_row.split_at(case.columns);
        values.extend_from_slice(own);
        if let Some(at) = padding.iter().position(|value| value.to_bits() != 0) {
            let (column, got) = (case.columns + at, padding[at].to_bits());
            return Err(Failure::WrongBits(WrongBits { operand: "D", row, column, expected: 0, got }));
        }
    }
    Ok(values)
}

/// Compares the sum bit for bit, with any NaN equal to any other,
/// and checks its surroundings.
fn check_sum(dtype: DType, stored: &Operand, buffer: &[u8], expected: &[f32]) -> Result<(), Failure> {
    let bits = |value: f32| {
        let bytes = dtype.encode(&[value]);
        bytes.iter().rev().fold(0u32, |bits, &byte| bits << 8 | u32::from(byte))
    };
    let got = stored.decode(buffer);
    let wrong = |(&got, &expected): (&f32, &f32)| bits(got) != bits(expected) && !(got.is_nan() && expected.is_nan());
    if let Some(at) = got.iter().zip(expected).position(wrong) {
        let (row, column) = (at / stored.columns(), at % stored.columns());
        let (expected, got) = (bits(expected[at]), bits(got[at]));
        return Err(Failure::WrongBits(WrongBits { operand: "the sum", row, column, expected, got }));
    }
    stored.first_written_outside(buffer).map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))
}
