//! Runs one optimizer step on a device and checks parameters,
//! moments and the copy.

use qgemm_api::{Buffer, Context, DeviceKind, Error, OptimizerArgs, OptimizerPlan, UpdateRule};
use qgemm_formats::DType;

use super::case::OptimizerCase;
use crate::compare::compare;
use crate::expected::Expected;
use crate::limits::rounded_to;
use crate::operand::Operand;
use crate::outcome::{Exemption, Failure, Outcome, Verdict, WrongBits};

/// Exemptions. An exemption fails if the case can be planned.
const EXEMPTIONS: &[Exemption<OptimizerCase>] = &[];
/// Error limit of parameters and moments.
const LIMIT: f64 = 1e-11;

/// Runs `case` and compares with the oracle in f64. It runs twice
/// where a second run may differ.
pub fn run(ctx: &Context, case: &OptimizerCase) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, EXEMPTIONS);
    outcome
}

/// Outputs of a run: parameters, first and second moments in f32,
/// and the copy.
struct Stored {
    in_f32: Operand,
    gradient: Operand,
    copy: Operand,
}

impl Stored {
    fn new(case: &OptimizerCase) -> Self {
        let row = |dtype| Operand::new(dtype, 1, case.len, 0, case.offset);
        Self { in_f32: row(DType::F32), gradient: row(case.gradient), copy: row(case.copy.unwrap_or(DType::BF16)) }
    }
}

fn judge(ctx: &Context, case: &OptimizerCase, outcome: &mut Outcome) -> Result<(), Failure> {
    let plan = ctx.plan_optimizer(&case.optimizer()).map_err(Failure::of_plan)?;
    outcome.kernel = Some(plan.kernel_name().to_owned());
    outcome.kernel_id = plan.kernel_id();
    Failure::check_launched(plan.sequence(), plan.kernel_id())?;
    let (stored, inputs) = (Stored::new(case), case.inputs());
    let first = run_on(ctx, &plan, case, &stored, &inputs).map_err(Failure::of_run)?;
    let tolerance = rounded_to(DType::F32, LIMIT);
    outcome.limit = Some(tolerance.nmse);
    let moments = case.rule.kind().moments();
    // Parameters, and the moments of the rule.
    for (buffer, expected) in first.iter().zip(oracle(case, &inputs)).take(1 + moments) {
        let got = stored.in_f32.decode(buffer);
        let comparison = compare(&got, &expected, tolerance);
        if outcome.comparison.is_none_or(|known| comparison.nmse > known.nmse) {
            outcome.comparison = Some(comparison);
        }
        if !comparison.within(tolerance) {
            return Err(Failure::Inaccurate(comparison));
        }
        stored.in_f32.first_written_outside(buffer).map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))?;
    }
    if let Some(dtype) = case.copy {
        check_copy(dtype, &stored.in_f32.decode(&first[0]), &stored.copy.decode(&first[3]))?;
        stored.copy.first_written_outside(&first[3]).map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))?;
    }
    // Emulated threads run in one order, and steps have no
    // workspace: a second run is the same.
    if ctx.info().id.kind != DeviceKind::Emu {
        let second = run_on(ctx, &plan, case, &stored, &inputs).map_err(Failure::of_run)?;
        for (first, second) in first.iter().zip(&second) {
            Failure::check_same(first, second)?;
        }
    }
    Ok(())
}

/// Checks that the copy is the written parameters, rounded.
fn check_copy(dtype: DType, weights: &[f32], copy: &[f32]) -> Result<(), Failure> {
    for (column, (weight, &got)) in weights.iter().zip(copy).enumerate() {
        let expected = dtype.decode(&dtype.encode(&[*weight]))[0];
        if got.to_bits() != expected.to_bits() && !(got.is_nan() && expected.is_nan()) {
            let (expected, got) = (expected.to_bits(), got.to_bits());
            return Err(Failure::WrongBits(WrongBits { operand: "the copy", row: 0, column, expected, got }));
        }
    }
    Ok(())
}

/// Runs the plan on new buffers, and returns parameters, moments
/// and the copy.
fn run_on(
    ctx: &Context,
    plan: &OptimizerPlan,
    case: &OptimizerCase,
    stored: &Stored,
    [weights, gradient, moment1, moment2]: &[Vec<f32>; 4],
) -> Result<[Vec<u8>; 4], Error> {
    let upload = |values: &[f32]| ctx.upload(&stored.in_f32.encode(values));
    let [mut weights, mut moment1, mut moment2] = [upload(weights)?, upload(moment1)?, upload(moment2)?];
    let gradient = ctx.upload(&stored.gradient.encode(gradient))?;
    let step = ctx.upload(&plan.step(&case.step)?)?;
    let mut copy = ctx.upload(&stored.copy.poison())?;
    let range = stored.in_f32.range();
    let mut args =
        OptimizerArgs::new(weights.slice_mut(range.clone())?, gradient.slice(stored.gradient.range())?, &step);
    let moments = case.rule.kind().moments();
    if moments > 0 {
        args = args.moment1(moment1.slice_mut(range.clone())?);
    }
    if moments > 1 {
        args = args.moment2(moment2.slice_mut(range)?);
    }
    if case.copy.is_some() {
        args = args.copy(copy.slice_mut(stored.copy.range())?);
    }
    plan.run(&ctx.default_stream(), args)?;
    let download = |buffer: &Buffer| -> Result<Vec<u8>, Error> {
        let bytes = ctx.download(buffer)?;
        buffer.raw().check_guards()?;
        Ok(bytes)
    };
    Ok([download(&weights)?, download(&moment1)?, download(&moment2)?, download(&copy)?])
}

/// Parameters, first and second moments after the step, in f64.
fn oracle(case: &OptimizerCase, [weights, gradient, moment1, moment2]: &[Vec<f32>; 4]) -> [Expected; 3] {
    let (step, t) = (&case.step, case.step.number as f64);
    let rate = f64::from(step.rate);
    let mut all = [(); 3].map(|()| Expected {
        m: 1,
        n: case.len,
        values: Vec::new(),
        energy: Vec::new(),
        floor: vec![0.0; case.len],
    });
    for i in 0..case.len {
        let [w, g, m, v] = [weights, gradient, moment1, moment2].map(|values| f64::from(values[i]));
        let g = g * f64::from(step.gradient_scale);
        // Summands of each moment, and the parameter's update.
        let ([m_parts, v_parts], update) = match case.rule {
            UpdateRule::AdamW { beta1, beta2, eps } => {
                let [beta1, beta2] = [beta1, beta2].map(f64::from);
                let (m_parts, v_parts) = ([beta1 * m, (1.0 - beta1) * g], [beta2 * v, (1.0 - beta2) * g * g]);
                let (m, v) = (m_parts[0] + m_parts[1], v_parts[0] + v_parts[1]);
                let (m, v) = (m / (1.0 - beta1.powf(t)), v / (1.0 - beta2.powf(t)));
                ([m_parts, v_parts], rate * m / (v.sqrt() + f64::from(eps)))
            }
            UpdateRule::Sgd { momentum } => {
                let m_parts = [f64::from(momentum) * m, g];
                ([m_parts, [v, 0.0]], rate * (m_parts[0] + m_parts[1]))
            }
            _ => unreachable!("the suite has no other rule"),
        };
        let decay = -rate * f64::from(step.weight_decay) * w;
        let parts = [[w + decay, -update], m_parts, v_parts];
        // Summands of the update may cancel.
        let scale = if update.is_finite() && m_parts[0] + m_parts[1] != 0.0 {
            let share = (m_parts[0].abs() + m_parts[1].abs()) / (m_parts[0] + m_parts[1]).abs();
            [share * update.abs(), 0.0, 0.0]
        } else {
            [0.0; 3]
        };
        for ((expected, parts), scale) in all.iter_mut().zip(parts).zip(scale) {
            expected.values.push(parts[0] + parts[1]);
            let energy = parts[0] * parts[0] + parts[1] * parts[1] + scale * scale;
            expected.energy.push(if energy.is_finite() { energy } else { 0.0 });
        }
    }
    all
}
