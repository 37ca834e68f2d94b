//! Runs one case on a device and judges the result.

use std::fmt;

use qgemm_api::{Args, Candidate, Context, DeviceKind, Problem, Weight, WeightOrder, Workspace};
use qgemm_formats::{DType, Encoding, HostWeight};
use qgemm_hal::{Activation, DeviceInfo, LaunchPlan, Math, TileConfig};

use crate::activations::{ActivationKind, activations};
use crate::case::Case;
use crate::compare::{Comparison, Mismatch, compare, first_difference};
use crate::limits::{ACTIVATION_FLUSHES, EXACT_SUMS, PathLimit, Tolerance, path, rounded_to};
use crate::operand::Operand;
use crate::oracle::{Added, Expected, multiply, multiply_gated};
use crate::rounding::{Rounding, rounded};
use crate::weights::{TestWeightError, gated_weights, weight, with_channel_scale};

/// A kind of case that a backend does not serve yet, and why: the only way not to run one.
#[derive(Clone, Copy, Debug)]
pub struct Exemption {
    /// The backend.
    pub device: DeviceKind,
    /// Which cases, on which of its devices.
    pub applies: fn(&Case, &DeviceInfo) -> bool,
    /// Why, as a sentence for the table.
    pub reason: &'static str,
}

/// Every exemption. One that no longer holds, because the case can be planned, fails.
pub fn exemptions() -> &'static [Exemption] {
    const fn of(device: DeviceKind, applies: fn(&Case, &DeviceInfo) -> bool, reason: &'static str) -> Exemption {
        Exemption { device, applies, reason }
    }
    const TENSOR: fn(&Case, &DeviceInfo) -> bool = |case, _| case.math == Some(Math::TensorF16);
    const NO_TENSOR: fn(&Case, &DeviceInfo) -> bool =
        |case, info| TENSOR(case, info) && info.rate(Math::TensorF16).is_none();
    const EXEMPTIONS: &[Exemption] = &[
        of(DeviceKind::Cpu, TENSOR, "it has no matrix instructions and reads activations as they are"),
        of(DeviceKind::Wgpu, NO_TENSOR, "it has no matrix instructions and reads activations as they are"),
    ];
    EXEMPTIONS
}

/// What became of a case.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Everything was as it should be.
    Pass,
    /// It was not run, for this reason.
    Skip(&'static str),
    /// Something was wrong.
    Fail(Failure),
}

/// What was wrong with a case.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Failure {
    /// The weight could not be made or loaded.
    Weight(String),
    /// No kernel was found for it, and no exemption says why.
    NotPlanned(String),
    /// An exemption covers it, and yet a kernel was found.
    StaleExemption(&'static str),
    /// The device reported an error.
    Device(String),
    /// The kernel computes in a way that the oracle does not model.
    NoModel(Math),
    /// The result is further off than the limit.
    Inaccurate(Comparison),
    /// Sums are exact and the result is not.
    NotExact(Mismatch),
    /// This byte outside of D's rows, counted from the start of the buffer, was written.
    WroteOutside(usize),
    /// A second run gave other bits, first in this byte.
    NotRepeatable(usize),
    /// This row has other bits when it is multiplied alone.
    DependsOnBatch(usize),
    /// Something was wrong with this of all configurations.
    Of(String, Box<Failure>),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Weight(why) => write!(f, "no weight: {why}"),
            Failure::NotPlanned(why) => write!(f, "no kernel: {why}"),
            Failure::StaleExemption(reason) => write!(f, "can be planned, though exempt ({reason})"),
            Failure::Device(why) => write!(f, "device: {why}"),
            Failure::NoModel(math) => write!(f, "the oracle has no model of {math:?}"),
            Failure::Inaccurate(Comparison { nmse, worst_tile, worst_tile_at, worst_row, worst_row_at, first_bad }) => {
                let (row, column) = worst_tile_at;
                write!(f, "inaccurate: {nmse:.1e} overall, {worst_tile:.1e} in the tile at [{row}, {column}], ")?;
                write!(f, "{worst_row:.1e} in row {worst_row_at}")?;
                first_bad.map_or(Ok(()), |bad| write!(f, "; {bad}"))
            }
            Failure::NotExact(bad) => write!(f, "not exact: {bad}"),
            Failure::WroteOutside(byte) => write!(f, "wrote byte {byte} outside of D's rows"),
            Failure::NotRepeatable(byte) => write!(f, "a second run differs, first in byte {byte}"),
            Failure::DependsOnBatch(row) => write!(f, "row {row} has other bits when multiplied alone"),
            Failure::Of(configuration, failure) => write!(f, "{configuration}: {failure}"),
        }
    }
}

/// A row of the result table.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What was multiplied.
    pub case: Case,
    /// The kernel that did it, where one was chosen.
    pub kernel: Option<String>,
    /// Distance from the oracle, where there is a result.
    pub comparison: Option<Comparison>,
    /// The largest error allowed.
    pub limit: Option<f64>,
    /// What rounding activations before the multiplication cost, where the plan does that.
    pub rounding_loss: Option<f64>,
    /// What became of it.
    pub verdict: Verdict,
}

impl Outcome {
    /// How near the result came to the limit.
    fn share_of_limit(&self) -> f64 {
        self.comparison.map_or(0.0, |c| c.nmse.max(c.worst_tile)) / self.limit.unwrap_or(f64::INFINITY)
    }
}

/// Runs `case`: plans it, runs it on poisoned memory, again where that may show something else, and compares with the oracle.
pub fn run(ctx: &Context, case: &Case) -> Outcome {
    let mut outcome = Outcome {
        case: *case,
        kernel: None,
        comparison: None,
        limit: None,
        rounding_loss: None,
        verdict: Verdict::Pass,
    };
    let exemption = exemptions().iter().find(|e| e.device == ctx.info().id.kind && (e.applies)(case, ctx.info()));
    outcome.verdict = match (judge(ctx, case, &mut outcome), exemption) {
        (Err(Failure::NotPlanned(_)), Some(exemption)) => Verdict::Skip(exemption.reason),
        (_, Some(exemption)) => Verdict::Fail(Failure::StaleExemption(exemption.reason)),
        (Ok(()), None) => Verdict::Pass,
        (Err(failure), None) => Verdict::Fail(failure),
    };
    outcome
}

fn judge(ctx: &Context, case: &Case, outcome: &mut Outcome) -> Result<(), Failure> {
    let host = HostWeights::new(case).map_err(|e| Failure::Weight(e.to_string()))?;
    let loaded = host.load(ctx, case.layout.w_transposed).map_err(|e| Failure::Weight(e.to_string()))?;
    let operands = HostOperands::new(case);
    if case.every_configuration {
        // The table shows the one that comes nearest to its limit.
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

/// Every configuration for the case: the first cut that leaves its tiles whole, and the first that does not.
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

/// Runs one plan, of `candidate` or as it is chosen, and judges what came of it, which is returned.
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
    outcome.kernel = Some(result.kernel.clone());
    let (math, weights) = result.config.map_or((Math::FmaF32, None), |config| (config.math, config.rounded_weights));
    let path = path(math).ok_or(Failure::NoModel(math))?;
    let of_config = |config: &TileConfig| Rounding::of(config, case.format, host.k_order());
    let rounding = result.config.as_ref().map_or(Rounding::None, of_config);
    // Quantized activations are no small integers any more.
    let quantized = matches!(rounding, Rounding::Int8 { .. });
    // Nor are rounded weights, where a code and the scale of its sub-block take more bits together than the type has.
    let exact = case.sums_are_exact() && !quantized && weights.is_none_or(|dtype| host.is_exact_in(dtype));
    let tolerance = tolerance(case, path, weights, exact);
    outcome.limit = Some(tolerance.nmse);

    let got = result.d.decode(&result.first);
    let rounded = rounded(&operands.x, case.k, rounding);
    let expected = host.multiply(&rounded, &operands.added(case));
    let comparison = compare(&got, &expected, tolerance);
    outcome.comparison = Some(comparison);
    if rounding.loses(case.x_dtype) {
        let unrounded = host.multiply(&operands.x, &operands.added(case));
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
    if let Some(second) = &result.second
        && let Some(byte) = result.first.iter().zip(second).position(|(a, b)| a != b)
    {
        return Err(Failure::NotRepeatable(byte));
    }
    Ok(got)
}

/// Multiplies the first and the last row alone and compares bits with the whole batch.
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

/// What the result may be off.
fn tolerance(case: &Case, path: &PathLimit, rounded_weights: Option<DType>, exact_sums: bool) -> Tolerance {
    let tolerance = match exact_sums {
        true => rounded_to(case.d_dtype, EXACT_SUMS),
        false => path.tolerance(rounded_weights, case.d_dtype),
    };
    match case.epilogue.activation {
        Activation::Identity => tolerance,
        _ => Tolerance { absolute: tolerance.absolute.max(ACTIVATION_FLUSHES), ..tolerance },
    }
}

/// The weight of a case, or both of its gated pair.
enum HostWeights {
    One(HostWeight),
    Pair([HostWeight; 2]),
}

impl HostWeights {
    fn new(case: &Case) -> Result<Self, TestWeightError> {
        let Case { weights, format, n, k, act_order, seed, .. } = *case;
        let scaled = |weight, seed| match case.epilogue.channel_scale {
            true => with_channel_scale(weight, seed),
            false => Ok(weight),
        };
        Ok(match case.gated {
            false => HostWeights::One(scaled(weight(weights, format, n, k, act_order, seed)?, seed)?),
            true => {
                let [gate, up] = gated_weights(weights, format, n, k, act_order, seed)?;
                HostWeights::Pair([scaled(gate, seed)?, scaled(up, !seed)?])
            }
        })
    }

    /// Permuted columns; both weights of a pair have the same.
    fn k_order(&self) -> Option<&[u32]> {
        match self {
            HostWeights::One(weight) | HostWeights::Pair([weight, _]) => weight.k_order(),
        }
    }

    /// Whether `dtype` holds every value.
    fn is_exact_in(&self, dtype: DType) -> bool {
        let weights = match self {
            HostWeights::One(weight) => std::slice::from_ref(weight),
            HostWeights::Pair(pair) => pair,
        };
        let holds = |row: Vec<f32>| dtype.decode(&dtype.encode(&row)) == row;
        weights.iter().all(|weight| (0..weight.n()).all(|n| holds(weight.dequantize_row(n))))
    }

    fn load(&self, ctx: &Context, transposed: bool) -> Result<Weight, qgemm_api::Error> {
        match self {
            HostWeights::One(weight) => load(ctx, weight, transposed),
            HostWeights::Pair([gate, up]) => ctx.load_gated(gate, up),
        }
    }

    fn multiply<X: Copy + Into<f64>>(&self, x: &[X], added: &Added<'_>) -> Expected {
        match self {
            HostWeights::One(weight) => multiply(weight, x, added),
            HostWeights::Pair([gate, up]) => multiply_gated([gate, up], x, added),
        }
    }
}

fn load(ctx: &Context, host: &HostWeight, transposed: bool) -> Result<Weight, qgemm_api::Error> {
    let Encoding::Plain(dtype) = host.format().encoding else { return ctx.load(host) };
    if !transposed {
        return ctx.load(host);
    }
    let (n, k) = (host.n(), host.k());
    let rows: Vec<Vec<f32>> = (0..n).map(|row| host.dequantize_row(row)).collect();
    let columns: Vec<f32> = (0..k).flat_map(|column| rows.iter().map(move |row| row[column])).collect();
    ctx.load_dense(&dtype.encode(&columns), dtype, n, k, WeightOrder::KN)
}

/// The operands of a case in host memory, without gaps.
struct HostOperands {
    x: Vec<f32>,
    c: Vec<f32>,
    bias: Vec<f32>,
    token_scale: Vec<f32>,
    residual: Vec<f32>,
}

impl HostOperands {
    fn new(case: &Case) -> Self {
        // Exact cases keep what is added exact, too.
        let kind = if case.sums_are_exact() { ActivationKind::SmallIntegers } else { ActivationKind::Normal };
        let added = |rows, dtype: Option<DType>, salt| match dtype {
            Some(dtype) => activations(kind, rows, case.n, dtype, case.seed ^ salt),
            None => Vec::new(),
        };
        // Powers of two, of all magnitudes at which activations bend.
        let token_scale = |token: usize| [1.0, 0.25, 2.0, 0.0625, 0.5][(token + case.seed as usize) % 5];
        Self {
            x: activations(case.activations, case.m, case.k, case.x_dtype, case.seed),
            c: added(case.m, case.epilogue.c.map(|(_, dtype)| dtype), 0xc),
            bias: added(case.bias_rows(), case.epilogue.bias, 0xb1a5),
            token_scale: match case.epilogue.token_scale {
                true => (0..case.m).map(token_scale).collect(),
                false => Vec::new(),
            },
            residual: added(case.m, case.epilogue.residual, 0x4e5),
        }
    }

    /// The operands of one row.
    fn row(&self, case: &Case, row: usize) -> Self {
        let part = |all: &[f32], width| match all {
            [] => Vec::new(),
            all => all[row * width..][..width].to_vec(),
        };
        Self {
            x: part(&self.x, case.k),
            c: part(&self.c, case.n),
            bias: self.bias.clone(),
            token_scale: part(&self.token_scale, 1),
            residual: part(&self.residual, case.n),
        }
    }

    fn added(&self, case: &Case) -> Added<'_> {
        Added {
            alpha: case.epilogue.alpha,
            c: case.epilogue.c.filter(|(beta, _)| *beta != 0.0).map(|(beta, _)| (beta, &*self.c)),
            bias: case.epilogue.bias.map(|_| &*self.bias),
            token_scale: case.epilogue.token_scale.then_some(&*self.token_scale),
            activation: case.epilogue.activation,
            residual: case.epilogue.residual.map(|_| &*self.residual),
        }
    }
}

/// One plan, run twice unless that is sure to give the same.
struct Runs {
    kernel: String,
    /// What ran, unless there was nothing to do.
    config: Option<TileConfig>,
    d: Operand,
    /// The whole buffer around D after the first run.
    first: Vec<u8>,
    second: Option<Vec<u8>>,
}

fn stored_x(case: &Case) -> Operand {
    let layout = case.layout;
    match layout.x_transposed {
        false => Operand::new(case.x_dtype, case.m, case.k, layout.x_gap, layout.offset),
        true => Operand::new(case.x_dtype, case.k, case.m, layout.x_gap, layout.offset).transposed(),
    }
}

fn stored_d(case: &Case) -> Operand {
    Operand::new(case.d_dtype, case.m, case.n, case.layout.d_gap, case.layout.offset)
}

fn multiply_on(
    ctx: &Context,
    weight: &Weight,
    case: &Case,
    host: &HostOperands,
    candidate: Option<&Candidate>,
) -> Result<Runs, Failure> {
    let layout = case.layout;
    let (stored_x, d) = (stored_x(case), stored_d(case));
    let c = case.epilogue.c.map(|(beta, dtype)| {
        let operand = Operand::new(dtype, case.m, case.n, layout.c_gap, layout.offset);
        (operand, if beta == 0.0 { operand.poison() } else { operand.encode(&host.c) })
    });
    let bias = case.epilogue.bias.map(|dtype| {
        let operand = Operand::new(dtype, 1, case.bias_rows() * case.n, 0, 0);
        (operand, operand.encode(&host.bias))
    });
    let token_scale = case.epilogue.token_scale.then(|| {
        let operand = Operand::new(DType::F32, 1, case.m, 0, 0);
        (operand, operand.encode(&host.token_scale))
    });
    let residual = case.epilogue.residual.map(|dtype| {
        let operand = Operand::new(dtype, case.m, case.n, layout.residual_gap, layout.offset);
        (operand, operand.encode(&host.residual))
    });

    let plan = match candidate {
        Some(candidate) => ctx.plan_candidate(candidate),
        None => ctx.plan(&problem(weight, case, &stored_x, &d)),
    };
    let plan = plan.map_err(|e| match e {
        // Chosen, and then not made ready: it may not compile.
        qgemm_api::Error::Hal(e) => Failure::Device(e.to_string()),
        e => Failure::NotPlanned(e.to_string()),
    })?;
    let device = |e: qgemm_api::Error| Failure::Device(e.to_string());
    let stream = ctx.default_stream();
    let x_buffer = ctx.upload(&stored_x.encode(&host.x)).map_err(device)?;
    let upload = |operand: Option<(Operand, Vec<u8>)>| {
        operand.map(|(operand, bytes)| Ok((operand, ctx.upload(&bytes)?))).transpose().map_err(device)
    };
    let (c, bias, token_scale, residual) = (upload(c)?, upload(bias)?, upload(token_scale)?, upload(residual)?);
    let mut d_buffer = ctx.allocate(d.buffer_bytes()).map_err(device)?;
    let mut workspace: Option<Workspace> = match plan.workspace_bytes() {
        0 => None,
        bytes => Some(ctx.workspace(bytes).map_err(device)?),
    };
    // An emulated GPU runs its threads in one order: only what the first run leaves in the workspace may change the second.
    let repeats = ctx.info().id.kind != DeviceKind::Emu || workspace.is_some();
    let mut once = || -> Result<Vec<u8>, qgemm_api::Error> {
        ctx.upload_into(&d.poison(), (&mut d_buffer).into())?;
        let args = Args {
            x: x_buffer.slice(stored_x.range())?,
            w: weight,
            d: d_buffer.slice_mut(d.range())?,
            c: c.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?,
            bias: bias.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?,
            token_scale: token_scale.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?,
            residual: residual.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?,
            workspace: workspace.as_mut(),
        };
        plan.run(&stream, args)?;
        let bytes = ctx.download(&d_buffer)?;
        d_buffer.raw().check_guards()?;
        Ok(bytes)
    };
    let first = once().map_err(device)?;
    let second = repeats.then(once).transpose().map_err(device)?;
    let config = plan.launch().map(|launch| launch.config);
    Ok(Runs { kernel: plan.kernel_name().to_owned(), config, d, first, second })
}

fn problem(weight: &Weight, case: &Case, x: &Operand, d: &Operand) -> Problem {
    let Case { layout, epilogue, .. } = case;
    let mut problem = Problem::new(weight, case.m)
        .x_dtype(case.x_dtype)
        .x_rounding(case.x_rounding)
        .x_row_stride(x.row_stride() as u64)
        .x_alignment(x.alignment())
        .d_dtype(case.d_dtype)
        .d_row_stride(d.row_stride() as u64)
        .d_alignment(d.alignment())
        .alpha(epilogue.alpha)
        .activation(epilogue.activation)
        .batch_invariant(case.batch_invariant);
    if layout.x_transposed {
        problem = problem.x_transposed();
    }
    if let Some((beta, dtype)) = epilogue.c {
        let c = Operand::new(dtype, case.m, case.n, layout.c_gap, layout.offset);
        problem = problem.c(beta, dtype).c_row_stride(c.row_stride() as u64).c_alignment(c.alignment());
    }
    if let Some(dtype) = epilogue.bias {
        problem = problem.bias(dtype);
    }
    if epilogue.token_scale {
        problem = problem.token_scale();
    }
    if let Some(dtype) = epilogue.residual {
        let residual = Operand::new(dtype, case.m, case.n, layout.residual_gap, layout.offset);
        problem = problem
            .residual(dtype)
            .residual_row_stride(residual.row_stride() as u64)
            .residual_alignment(residual.alignment());
    }
    if let Some(math) = case.math {
        problem = problem.math(math);
    }
    match case.family {
        Some(family) => problem.family(family),
        None => problem,
    }
}
