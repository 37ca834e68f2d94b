//! Runs one case on a device and judges the result.

use qgemm_api::tuning::{Candidate, KernelId};
use qgemm_api::{Context, DeviceKind, Weight};
use qgemm_formats::DType;
use qgemm_hal::{DeviceInfo, LaunchPlan, Math, TileConfig};

use super::case::Case;
use super::fused::multiply_fused;
use super::host::{HostOperands, HostWeights};
use super::launch::{Runs, multiply_on, problem, stored_d, stored_x};
use super::normed;
use super::oracle::Resolution;
use super::quantized_x::HostX;
use super::rounding::{Rounding, rounded};
use crate::compare::{compare, first_difference};
use crate::limits::{EXACT_SUMS, PathLimit, Tolerance, path, rounded_to};
use crate::outcome::{Exemption, Failure, Outcome, Verdict};

/// Largest product of codes of X and W. Kernels multiply sums of
/// such products by both scales.
const LARGEST_PRODUCT_OF_CODES: f64 = 127.0 * 255.0;

/// Exemptions. An exemption fails if the case can be planned.
pub fn exemptions() -> &'static [Exemption<Case>] {
    const fn of(device: DeviceKind, applies: fn(&Case, &DeviceInfo) -> bool, reason: &'static str) -> Exemption<Case> {
        Exemption { device, applies, reason }
    }
    const TENSOR: fn(&Case, &DeviceInfo) -> bool = |case, _| case.math == Some(Math::TensorF16);
    const NO_TENSOR: fn(&Case, &DeviceInfo) -> bool =
        |case, info| TENSOR(case, info) && info.rate(Math::TensorF16).is_none();
    const EXEMPTIONS: &[Exemption<Case>] = &[
        of(DeviceKind::Cpu, TENSOR, "it has no matrix instructions and reads activations as they are"),
        of(DeviceKind::Wgpu, NO_TENSOR, "it has no matrix instructions and reads activations as they are"),
    ];
    EXEMPTIONS
}

/// Plans `case`, runs it on poisoned memory and compares with the
/// oracle. It runs twice where a second run may differ.
pub fn run(ctx: &Context, case: &Case) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, exemptions());
    outcome
}

/// The kernel that the cost model chooses for `case`, if any.
pub(super) fn expected_kernel(ctx: &Context, case: &Case) -> Option<KernelId> {
    let weight = HostWeights::new(case).ok()?.load(ctx, case.layout.w_transposed).ok()?;
    let candidates = ctx.candidates(&problem(&weight, case, &stored_x(case), &stored_d(case))).ok()?;
    candidates.first().map(|candidate| candidate.launch().config.kernel_id(case.format))
}

fn judge(ctx: &Context, case: &Case, outcome: &mut Outcome) -> Result<(), Failure> {
    let host = HostWeights::new(case).map_err(|e| Failure::Weight(e.to_string()))?;
    let loaded = host.load(ctx, case.layout.w_transposed).map_err(|e| Failure::Weight(e.to_string()))?;
    let operands = HostOperands::new(case);
    if let Some(fused) = host.load_fused(ctx) {
        let fused = fused.map_err(|e| Failure::Weight(e.to_string()))?;
        let result = multiply_fused(ctx, &fused, case, &operands)?;
        return assess(ctx, &host, case, &operands, result, outcome).map(drop);
    }
    if case.every_configuration {
        // The table shows the config nearest to its limit.
        let mut nearest: Option<Outcome> = None;
        for candidate in &configurations(ctx, &loaded, case)? {
            check(ctx, &host, &loaded, case, &operands, Some(candidate), outcome)
                .map_err(|failure| Failure::Of(describe(candidate.launch()), Box::new(failure)))?;
            if nearest.as_ref().is_none_or(|nearest| outcome.share_of_limit() > nearest.share_of_limit()) {
                nearest = Some(outcome.clone());
            }
        }
        *outcome = nearest.ok_or_else(|| Failure::NotPlanned("there is no configuration".into()))?;
        return Ok(());
    }
    let got = check(ctx, &host, &loaded, case, &operands, None, outcome)?;
    if case.batch_invariant { check_single_rows(ctx, &loaded, case, &operands, &got) } else { Ok(()) }
}

/// Every config for the case: its first candidate with whole
/// tiles, and its first with split tiles.
fn configurations(ctx: &Context, weight: &Weight, case: &Case) -> Result<Vec<Candidate>, Failure> {
    let [x, d] = [stored_x(case), stored_d(case)];
    let mut all = ctx.candidates(&problem(weight, case, &x, &d)).map_err(|e| Failure::NotPlanned(e.to_string()))?;
    let mut seen = Vec::new();
    all.retain(|candidate| {
        let launch = candidate.launch();
        let is_cut = launch.splits > 1 || launch.stream_k.is_some_and(|cut| cut.cut_tiles > 0);
        let new = !seen.contains(&(launch.config, is_cut));
        if new {
            seen.push((launch.config, is_cut));
        }
        new
    });
    Ok(all)
}

fn describe(launch: &LaunchPlan) -> String {
    let TileConfig { family, tile_n, tile_m, threads, .. } = launch.config;
    format!("{family} {tile_n}x{tile_m}, {threads} threads, grid {:?}", launch.grid)
}

/// Runs the plan of `candidate`, or the chosen one, and judges
/// the result.
fn check(
    ctx: &Context,
    host: &HostWeights,
    loaded: &Weight,
    case: &Case,
    operands: &HostOperands,
    candidate: Option<&Candidate>,
    outcome: &mut Outcome,
) -> Result<Vec<f32>, Failure> {
    let result = multiply_on(ctx, loaded, case, operands, candidate)?;
    assess(ctx, host, case, operands, result, outcome)
}

/// Judges a plan's result.
fn assess(
    ctx: &Context,
    host: &HostWeights,
    case: &Case,
    operands: &HostOperands,
    result: Runs,
    outcome: &mut Outcome,
) -> Result<Vec<f32>, Failure> {
    outcome.kernel = Some(result.kernel.clone());
    outcome.kernel_id = result.kernel_id;
    let (math, weights) = result.config.map_or((Math::FmaF32, None), |config| (config.math, config.rounded_weights));
    let path = path(math).ok_or_else(|| Failure::NoModel(format!("the arithmetic `{}`", math.name())))?;
    let given = match normed::values(ctx, case, operands)? {
        Some(values) => Some(values),
        None => HostX::new(case, &operands.x).map(|x| x.values),
    };
    let of_config = |config: &TileConfig| {
        if given.is_some() {
            return Ok(Rounding::None);
        }
        let rounding = Rounding::of(config, case.multiplied_dtype(), host.k_order());
        rounding.ok_or_else(|| Failure::NoModel(format!("X in {} after {:?}", config.x_format, config.x_prologue)))
    };
    let rounding = result.config.as_ref().map_or(Ok(Rounding::None), of_config)?;
    // Quantized activations are not small integers.
    let quantized = matches!(rounding, Rounding::Q8 { .. } | Rounding::Codes(_));
    let codes = result.config.is_some_and(|config| config.x_format.plain().is_none());
    // Rounded weights are not exact if a code times its sub-block
    // scale has more bits than the type.
    let exact = case.sums_are_exact() && !quantized && weights.is_none_or(|dtype| host.is_exact_in(dtype));
    let (tolerance, resolution) = tolerance(case, path, weights, codes, exact);
    outcome.limit = Some(tolerance.nmse);

    let got = result.d.decode(&result.first);
    let x = operands.multiplied(case);
    let used = given.unwrap_or_else(|| rounded(&x, case.k, rounding));
    let added = operands.added(case, resolution);
    let expected = host.multiply(&used, &added);
    let comparison = compare(&got, &expected, tolerance);
    outcome.comparison = Some(comparison);
    if rounding.loses(case.multiplied_dtype()) || case.x_format.is_some() || case.normed_format.is_some() {
        let unrounded = host.multiply(&x, &added);
        outcome.rounding_loss = Some(compare(&got, &unrounded, tolerance).nmse);
    }

    if let Some(byte) = result.d.first_written_outside(&result.first) {
        return Err(Failure::WroteOutside(byte));
    }
    if !comparison.within(tolerance) {
        return Err(Failure::Inaccurate(comparison));
    }
    if case.is_exact() && exact {
        let round = |value| case.d_dtype.decode(&case.d_dtype.encode(&[value]))[0];
        if let Some(mismatch) = first_difference(&got, &expected, round) {
            return Err(Failure::NotExact(mismatch));
        }
    }
    if let Some(second) = &result.second {
        Failure::check_same(&result.first, second)?;
    }
    Ok(got)
}

/// Multiplies the first and the last row alone and compares bits
/// with the whole batch.
fn check_single_rows(
    ctx: &Context,
    weight: &Weight,
    case: &Case,
    operands: &HostOperands,
    batch: &[f32],
) -> Result<(), Failure> {
    for row in [0, case.m - 1] {
        let alone = Case { m: 1, ..*case };
        let result = multiply_on(ctx, weight, &alone, &operands.row(case, row), None)?;
        let got = result.d.decode(&result.first);
        let same = got.iter().zip(&batch[row * case.n..]).all(|(a, b)| a.to_bits() == b.to_bits());
        if !same {
            return Err(Failure::DependsOnBatch(row));
        }
    }
    Ok(())
}

/// Limit of a product behind a norm. f32 statistics are inexact
/// in the last bits, so a value may round to a neighbor of the
/// oracle's. With 8-bit codes the neighbor is a 50th of the
/// row's magnitude away, which matters in short rows.
fn norm_limit(case: &Case, quantized_x: bool) -> f64 {
    const NEIGHBOUR_CODES: f64 = 2e-5;
    const SHORT_ROW: usize = 100;
    match case.norm {
        _ if case.normed_format.is_some() => 0.0,
        None => 0.0,
        Some(_) if quantized_x => NEIGHBOUR_CODES * (SHORT_ROW as f64 / case.k as f64).max(1.0),
        Some(_) => rounded_to(case.multiplied_dtype(), 0.0).nmse,
    }
}

/// Limits of the result and of its sums.
pub(crate) fn tolerance(
    case: &Case,
    path: &PathLimit,
    rounded_weights: Option<DType>,
    quantized_x: bool,
    exact_sums: bool,
) -> (Tolerance, Resolution) {
    let sums = if exact_sums { EXACT_SUMS } else { path.of_sums(rounded_weights) };
    let nmse = sums + norm_limit(case, quantized_x);
    let largest_code = if quantized_x { LARGEST_PRODUCT_OF_CODES } else { 1.0 };
    (rounded_to(case.d_dtype, nmse), Resolution { nmse, largest_code })
}
