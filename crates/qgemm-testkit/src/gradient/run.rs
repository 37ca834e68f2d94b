//! Runs one gradient on a device and judges the result.

use std::ops::Range;
use std::sync::Arc;

use qgemm_api::{
    Context, DeviceKind, Error, Experts, Gradient, GradientArgs, GradientPlan, GradientWeight, HostExperts, Weight,
    Workspace,
};
use qgemm_formats::{DType, Format, HostWeight, SharedBytes};
use qgemm_hal::{Math, Spec};

use super::case::GradientCase;
use crate::activations::{ActivationKind, activations};
use crate::compare::{compare, first_difference};
use crate::expected::Expected;
use crate::gemm::host::HostWeights;
use crate::gemm::{Added, Case, Resolution, multiply};
use crate::limits::{EXACT_SUMS, path, rounded_to};
use crate::operand::Operand;
use crate::outcome::{Exemption, Failure, Outcome, Verdict};

/// Exemptions. An exemption fails if the case can be planned.
const EXEMPTIONS: &[Exemption<GradientCase>] = &[];

/// Runs `case` on poisoned memory and compares with the oracle.
/// It runs twice where a second run may differ.
pub fn run(ctx: &Context, case: &GradientCase) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, EXEMPTIONS);
    outcome
}

/// dY and the old dX, with their layouts.
struct Operands {
    dy: Vec<f32>,
    held: Vec<f32>,
    stored_dy: Operand,
    stored_dx: Operand,
}

impl Operands {
    fn new(case: &GradientCase) -> Self {
        let Case { m, n, k, x_dtype, d_dtype, layout, seed, .. } = case.layer;
        let outputs = case.layer.bias_rows() * n;
        let kind = if case.layer.sums_are_exact() { ActivationKind::SmallIntegers } else { ActivationKind::Normal };
        Self {
            dy: activations(case.layer.activations, m, outputs, x_dtype, seed),
            held: activations(kind, m, k, d_dtype, !seed),
            stored_dy: Operand::new(x_dtype, m, outputs, layout.x_gap, layout.offset),
            stored_dx: Operand::new(d_dtype, m, k, layout.d_gap, layout.offset),
        }
    }
}

/// The weight of a case or its experts, on the device and
/// on the host.
struct Weights {
    loaded: Loaded,
    host: Vec<HostWeights>,
}

enum Loaded {
    One(Weight),
    Experts(Experts),
}

impl Weights {
    fn new(ctx: &Context, case: &GradientCase) -> Result<Self, Failure> {
        let failed = |e: &dyn std::fmt::Display| Failure::Weight(e.to_string());
        let count = case.experts.map_or(1, |experts| experts.count);
        let host = (0..count).map(|expert| HostWeights::new(&case.layer_of(expert)).map_err(|e| failed(&e)));
        let host = host.collect::<Result<Vec<_>, _>>()?;
        let loaded = match case.experts {
            None => host[0].load(ctx, false).map(Loaded::One),
            Some(experts) if experts.shared => {
                host[0].load(ctx, false).and_then(|weight| weight.shared_by(count)).map(Loaded::Experts)
            }
            Some(_) => {
                let (mut plain, mut pairs) = (Vec::new(), Vec::new());
                for weight in &host {
                    match weight {
                        HostWeights::One(weight) | HostWeights::Fused { whole: weight, .. } => {
                            plain.push(weight.clone())
                        }
                        HostWeights::Pair([gate, up]) => pairs.push((gate.clone(), up.clone())),
                    }
                }
                let stack = if pairs.is_empty() { HostExperts::new(&plain) } else { HostExperts::gated(&pairs) };
                ctx.load_experts(&stack.map_err(|e| failed(&e))?).map(Loaded::Experts)
            }
        };
        Ok(Self { loaded: loaded.map_err(|e| failed(&e))?, host })
    }

    fn on_device(&self) -> GradientWeight<'_> {
        match &self.loaded {
            Loaded::One(weight) => weight.into(),
            Loaded::Experts(experts) => experts.into(),
        }
    }

    fn of_host(&self, expert: usize) -> Vec<&HostWeight> {
        match &self.host[expert] {
            HostWeights::One(weight) | HostWeights::Fused { whole: weight, .. } => vec![weight],
            HostWeights::Pair(pair) => pair.iter().collect(),
        }
    }
}

fn judge(ctx: &Context, case: &GradientCase, outcome: &mut Outcome) -> Result<(), Failure> {
    let weights = Weights::new(ctx, case)?;
    let operands = Operands::new(case);
    let plan = ctx.plan_gradient(weights.on_device(), &gradient(case, &operands)).map_err(Failure::of_plan)?;
    outcome.kernel = Some(plan.kernel_name().to_owned());
    outcome.kernel_id = plan.kernel_id();
    let math = plan.matmul().map_or(Math::FmaF32, |launch| launch.config.math);
    let path = path(math).ok_or_else(|| Failure::NoModel(format!("the arithmetic `{}`", math.name())))?;
    let decoded = match plan.kernel_id().map(|id| id.spec) {
        Some(Spec::Matmul(spec)) => spec.b.plain().unwrap_or(DType::F32),
        _ => DType::F32,
    };
    let rounded = (!weights.host.iter().all(|weight| weight.is_exact_in(decoded))).then_some(decoded);
    let exact = case.layer.sums_are_exact() && rounded.is_none();
    let nmse = if exact { EXACT_SUMS } else { path.of_sums(rounded) };
    let tolerance = rounded_to(case.layer.d_dtype, nmse);
    outcome.limit = Some(tolerance.nmse);

    let mut workspace = ctx.workspace(plan.workspace_bytes()).map_err(Failure::of_run)?;
    let first = run_on(ctx, &plan, weights.on_device(), case, &operands, &mut workspace).map_err(Failure::of_run)?;
    let got = operands.stored_dx.decode(&first);
    let (k, resolution) = (case.layer.k, Resolution { nmse, ..Resolution::default() });
    let rows_of_all = case.rows();
    for (expert, rows) in rows_of_all.iter().enumerate().filter(|(_, rows)| !rows.is_empty()) {
        let got = &got[rows.start * k..rows.end * k];
        let expected = expected(case, &weights.of_host(expert), rounded, &operands, rows.clone(), resolution);
        let comparison = compare(got, &expected, tolerance);
        let known = outcome.comparison.map_or(0.0, |c| c.nmse.max(c.worst_tile));
        if outcome.comparison.is_none() || comparison.nmse.max(comparison.worst_tile) > known {
            outcome.comparison = Some(comparison);
        }
        if !comparison.within(tolerance) {
            return Err(Failure::Inaccurate(comparison));
        }
        if exact && case.layer.is_exact() {
            let round = |value| case.layer.d_dtype.decode(&case.layer.d_dtype.encode(&[value]))[0];
            if let Some(mismatch) = first_difference(got, &expected, round) {
                return Err(Failure::NotExact(mismatch));
            }
        }
    }
    let before = operands.stored_dx.decode(&held(case, &operands));
    let is_same = |row: usize| {
        let [left, right] = [&got, &before].map(|all| &all[row * k..(row + 1) * k]);
        left.iter().zip(right).all(|(left, right)| left.to_bits() == right.to_bits())
    };
    let owned = |row: usize| rows_of_all.iter().any(|rows| rows.contains(&row));
    if let Some(row) = (0..case.layer.m).find(|&row| !owned(row) && !is_same(row)) {
        return Err(Failure::WroteOutside(row));
    }
    if let Some(byte) = operands.stored_dx.first_written_outside(&first) {
        return Err(Failure::WroteOutside(byte));
    }
    // Emulated threads run in one order: a second run is the same.
    if ctx.info().id.kind != DeviceKind::Emu {
        let second =
            run_on(ctx, &plan, weights.on_device(), case, &operands, &mut workspace).map_err(Failure::of_run)?;
        Failure::check_same(&first, &second)?;
    }
    Ok(())
}

fn gradient(case: &GradientCase, operands: &Operands) -> Gradient {
    let (dy, dx) = (&operands.stored_dy, &operands.stored_dx);
    let gradient = Gradient::new(case.layer.m, case.layer.x_dtype, case.layer.d_dtype)
        .dy_row_stride(dy.row_stride() as u64)
        .dx_row_stride(dx.row_stride() as u64)
        .alignment(dy.alignment(), dx.alignment())
        .alpha(case.layer.epilogue.alpha)
        .max_scratch(case.max_scratch);
    case.accumulate.iter().fold(gradient, |gradient, &beta| gradient.accumulate(beta))
}

/// Runs the plan on new buffers, and returns the buffer
/// around dX.
fn run_on(
    ctx: &Context,
    plan: &GradientPlan,
    weight: GradientWeight<'_>,
    case: &GradientCase,
    operands: &Operands,
    workspace: &mut Workspace,
) -> Result<Vec<u8>, Error> {
    let Operands { dy, stored_dy, stored_dx, .. } = operands;
    let dy = ctx.upload(&stored_dy.encode(dy))?;
    let mut dx = ctx.upload(&held(case, operands))?;
    let offsets = case.offsets().map(|offsets| ctx.upload(&offsets)).transpose()?;
    let mut args = GradientArgs::new(dy.slice(stored_dy.range())?, weight, dx.slice_mut(stored_dx.range())?);
    args.offsets = offsets.as_ref().map(Into::into);
    plan.run(&ctx.default_stream(), args.workspace(workspace))?;
    let written = ctx.download(&dx)?;
    dx.raw().check_guards()?;
    Ok(written)
}

/// Contents of dX and its surroundings before a run. With a
/// factor of 0 they are poison, and must not be read.
fn held(case: &GradientCase, operands: &Operands) -> Vec<u8> {
    match case.accumulate {
        None | Some(0.0) => operands.stored_dx.poison(),
        Some(_) => operands.stored_dx.encode(&operands.held),
    }
}

/// The oracle's dX: the product of dY and the layer's
/// transposed weight (for a pair, both weights stacked).
/// The weight is rounded to the type that it is decoded to.
/// This rounding is not the kernel's error: for equal
/// weights it has one direction, and sums would exceed a
/// limit on random errors.
/// With experts, the dX of one expert's rows.
fn expected(
    case: &GradientCase,
    weights: &[&HostWeight],
    rounded: Option<DType>,
    operands: &Operands,
    of_expert: Range<usize>,
    resolution: Resolution,
) -> Expected {
    let k = case.layer.k;
    let decode = |row: Vec<f32>| match rounded {
        Some(dtype) => dtype.decode(&dtype.encode(&row)),
        None => row,
    };
    let of_weight =
        |weight: &&HostWeight| (0..weight.n()).map(|row| decode(weight.dequantize_row(row))).collect::<Vec<_>>();
    let rows: Vec<Vec<f32>> = weights.iter().flat_map(of_weight).collect();
    let transposed: Vec<f32> = (0..k).flat_map(|column| rows.iter().map(move |row| row[column])).collect();
    let plain: Format = "f32".parse().unwrap_or_else(|_| unreachable!("f32 is a format"));
    let bytes = SharedBytes::new(Arc::new(DType::F32.encode(&transposed)));
    let weight = HostWeight::new(plain, k, rows.len(), bytes).unwrap_or_else(|e| unreachable!("it is a weight: {e}"));
    let c = case
        .accumulate
        .filter(|beta| *beta != 0.0)
        .map(|beta| (beta, &operands.held[of_expert.start * k..of_expert.end * k]));
    let dy = &operands.dy[of_expert.start * rows.len()..of_expert.end * rows.len()];
    multiply(&weight, dy, &Added { alpha: case.layer.epilogue.alpha, c, resolution, ..Added::default() })
}
