//! Runs one MoE GEMM on a device and judges the result.

use qgemm_api::{
    Buffer, BufferRef, Context, DeviceKind, ExpertArgs, ExpertPlan, ExpertProblem, Experts, HostExperts, Workspace,
};
use qgemm_formats::DType;

use super::case::{ExpertCase, FormCase};
use super::index::Index;
use super::oracle::multiply;
use crate::activations::{ActivationKind, activations};
use crate::compare::{compare, first_difference};
use crate::gemm::host::{HostOperands, HostWeights};
use crate::gemm::launch::stated;
use crate::gemm::quantized_x::HostX;
use crate::gemm::run::tolerance;
use crate::gemm::{Case, Rounding, rounded};
use crate::limits::path;
use crate::operand::Operand;
use crate::outcome::{Exemption, Failure, Outcome, Verdict};

/// Exemptions. An exemption fails if the case can be planned.
const EXEMPTIONS: &[Exemption<ExpertCase>] = &[];

/// Runs `case` on poisoned memory and compares with the oracle.
/// It runs twice where a second run may differ.
pub(super) fn run(ctx: &Context, case: &ExpertCase) -> Outcome {
    let mut outcome = Outcome::new(case);
    let result = judge(ctx, case, &mut outcome);
    outcome.verdict = Verdict::of(result, ctx, case, EXEMPTIONS);
    outcome
}

/// A case in host memory.
struct Host {
    weights: Vec<HostWeights>,
    operands: HostOperands,
    /// Quantized X, if X is given quantized; `operands` then hold the
    /// dequantized values.
    x: Option<HostX>,
    /// Biases of each expert.
    biases: Vec<Vec<f32>>,
    index: Index,
}

impl Host {
    fn new(case: &ExpertCase) -> Result<Self, Failure> {
        let each = &case.each;
        let own = |expert: usize| if case.shared { 0 } else { expert as u64 };
        let of_expert = |expert: usize| Case { seed: each.seed.wrapping_add(own(expert) * 0x9e37), ..*each };
        let weights = (0..case.experts).map(|expert| HostWeights::new(&of_expert(expert)));
        let kind = if each.sums_are_exact() { ActivationKind::SmallIntegers } else { ActivationKind::Normal };
        let bias = |expert: usize| match each.epilogue.bias {
            Some(dtype) => activations(kind, each.bias_rows(), each.n, dtype, each.seed ^ 0xb1a5 ^ own(expert) << 20),
            None => Vec::new(),
        };
        let mut operands = HostOperands::new(each);
        operands.x.truncate(case.x_rows() * each.k);
        let x = HostX::new(each, &operands.x);
        if let Some(given) = &x {
            operands.x = given.values.iter().map(|&value| value as f32).collect();
        }
        Ok(Self {
            weights: weights.collect::<Result<_, _>>().map_err(|e| Failure::Weight(e.to_string()))?,
            operands,
            x,
            biases: (0..case.experts).map(bias).collect(),
            index: Index::new(case),
        })
    }

    fn load(&self, ctx: &Context, case: &ExpertCase) -> Result<Experts, Failure> {
        if case.shared {
            let weight = self.weights[0].load(ctx, false).and_then(|weight| weight.shared_by(case.experts));
            return weight.map_err(|e| Failure::Weight(e.to_string()));
        }
        let mut plain = Vec::new();
        let mut pairs = Vec::new();
        for weight in &self.weights {
            match weight {
                HostWeights::One(weight) | HostWeights::Fused { whole: weight, .. } => plain.push(weight.clone()),
                HostWeights::Pair([gate, up]) => pairs.push((gate.clone(), up.clone())),
            }
        }
        let host = if pairs.is_empty() { HostExperts::new(&plain) } else { HostExperts::gated(&pairs) };
        let host = host.map_err(|e| Failure::Weight(e.to_string()))?;
        ctx.load_experts(&host).map_err(|e| Failure::Weight(e.to_string()))
    }
}

fn judge(ctx: &Context, case: &ExpertCase, outcome: &mut Outcome) -> Result<(), Failure> {
    let host = Host::new(case)?;
    let experts = host.load(ctx, case)?;
    if !case.each.every_configuration {
        return judge_launch(&Launch::new(ctx, case, &experts)?, &host, outcome);
    }
    // The table shows the config nearest to its limit.
    let mut nearest: Option<Outcome> = None;
    for launch in Launch::all_candidates(ctx, case, &experts)? {
        let plan = launch.plan.to_string();
        judge_launch(&launch, &host, outcome).map_err(|failure| Failure::Of(plan, Box::new(failure)))?;
        if nearest.as_ref().is_none_or(|nearest| outcome.share_of_limit() > nearest.share_of_limit()) {
            nearest = Some(outcome.clone());
        }
    }
    *outcome = nearest.ok_or_else(|| Failure::NotPlanned("there is no configuration".into()))?;
    Ok(())
}

fn judge_launch(launch: &Launch<'_>, host: &Host, outcome: &mut Outcome) -> Result<(), Failure> {
    let case = launch.case;
    outcome.kernel = Some(launch.plan.kernel_name().to_owned());
    outcome.kernel_id = launch.plan.kernel_id();

    let first = launch.run(host, &host.index)?;
    let config = launch.plan.launch().map(|plan| plan.config.tile);
    let math = config.map_or(qgemm_hal::Math::FmaF32, |config| config.math);
    let path = path(math).ok_or_else(|| Failure::NoModel(format!("the arithmetic `{}`", math.name())))?;
    // Blocks of 8-bit X consist of columns in an expert's stored
    // order.
    let rounding = |expert: usize| match &config {
        None => Some(Rounding::None),
        // A given quantized X is not rounded again.
        Some(_) if host.x.is_some() => Some(Rounding::None),
        Some(config) => Rounding::of(config, case.each.multiplied_dtype(), host.weights[expert].k_order()),
    };
    let of_first = rounding(0).ok_or_else(|| Failure::NoModel(format!("X as {config:?} reads it")))?;
    let weights = config.and_then(|config| config.rounded_weights);
    let quantized = matches!(of_first, Rounding::Q8 { .. });
    let codes = config.is_some_and(|config| config.x_format.plain().is_none());
    let holds = |dtype| host.weights.iter().all(|weight| weight.is_exact_in(dtype));
    let exact = case.each.sums_are_exact() && !quantized && weights.is_none_or(holds);
    let (tolerance, resolution) = tolerance(&case.each, path, weights, codes, exact);
    outcome.limit = Some(tolerance.nmse);

    let round = |expert: usize, own: &HostOperands| {
        rounded(&own.multiplied(&case.each), case.each.k, rounding(expert).unwrap_or(of_first))
    };
    let expected = multiply(case, &host.weights, &host.operands, &host.biases, &host.index, resolution, round);
    let all = launch.d.decode(&first.d);
    let n = case.each.n;
    let got: Vec<f32> = expected.rows.iter().flat_map(|&row| all[row * n..][..n].to_vec()).collect();
    let comparison = compare(&got, &expected.values, tolerance);
    outcome.comparison = Some(comparison);
    if let Some(byte) = launch.d.first_written_outside(&first.d) {
        return Err(Failure::WroteOutside(byte));
    }
    launch.check_untouched(&first.d, &expected.rows)?;
    if !comparison.within(tolerance) {
        return Err(Failure::Inaccurate(comparison));
    }
    if case.each.is_exact() && exact {
        let round = |value| case.each.d_dtype.decode(&case.each.d_dtype.encode(&[value]))[0];
        // A sum over slots that is rounded on the way may differ from
        // the exact sum rounded once.
        let sums = expected.values.values.iter().zip(&expected.rounded).zip(&got);
        let judged: Vec<f32> =
            sums.map(|((&sum, &is_rounded), &got)| if is_rounded { round(sum as f32) } else { got }).collect();
        if let Some(mismatch) = first_difference(&judged, &expected.values, round) {
            return Err(Failure::NotExact(mismatch));
        }
    }
    check_status(&first.status, &host.index)?;
    // Emulated threads run in one order, and each run has a
    // workspace of its own: a second run is the same.
    if launch.ctx.info().id.kind != DeviceKind::Emu {
        Failure::check_same(&first.d, &launch.run(host, &host.index)?.d)?;
    }
    if case.each.batch_invariant { check_alone(launch, host, &all) } else { Ok(()) }
}

/// Checks that the run reported the fault of the index, and no
/// other.
fn check_status(got: &Result<(), String>, index: &Index) -> Result<(), Failure> {
    let expected = index.fault.map_or("nothing".to_owned(), |(fault, place)| format!("{fault:?} at {place}"));
    let got = match got {
        Ok(()) => "nothing".to_owned(),
        Err(text) => text.clone(),
    };
    if got == expected { Ok(()) } else { Err(Failure::WrongStatus { expected, got }) }
}

/// Runs the first and the last row that have an expert, each
/// alone, and compares bits with the batch.
fn check_alone(launch: &Launch<'_>, host: &Host, batch: &[f32]) -> Result<(), Failure> {
    let (case, n) = (launch.case, launch.case.each.n);
    let owned = || (0..case.each.m).filter(|&row| host.index.owner[row].is_some());
    for row in owned().next().into_iter().chain(owned().next_back()) {
        let alone = launch.run(host, &host.index.alone(case, row))?;
        let got = launch.d.decode(&alone.d);
        let row = row / case.summed();
        let same = got[row * n..][..n].iter().zip(&batch[row * n..]).all(|(a, b)| a.to_bits() == b.to_bits());
        if !same {
            return Err(Failure::DependsOnBatch(row));
        }
    }
    Ok(())
}

/// The slice of an operand that a run reads, if any.
fn slice(operand: &Option<(Operand, Buffer)>) -> Result<Option<BufferRef<'_>>, qgemm_api::Error> {
    Ok(operand.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?)
}

/// A plan with its operands.
struct Launch<'a> {
    ctx: &'a Context,
    case: &'a ExpertCase,
    experts: &'a Experts,
    plan: ExpertPlan,
    x: Operand,
    d: Operand,
}

/// Result of a run.
struct Run {
    /// The whole buffer around D.
    d: Vec<u8>,
    /// The reported fault of the index.
    status: Result<(), String>,
}

impl<'a> Launch<'a> {
    fn new(ctx: &'a Context, case: &'a ExpertCase, experts: &'a Experts) -> Result<Self, Failure> {
        let (problem, x, d) = Self::problem(case, experts);
        let plan = ctx.plan_experts(&problem).map_err(Failure::of_plan)?;
        Failure::check_launched(plan.sequence(), plan.kernel_id())?;
        Ok(Self { ctx, case, experts, plan, x, d })
    }

    /// Every candidate of the case.
    fn all_candidates(ctx: &'a Context, case: &'a ExpertCase, experts: &'a Experts) -> Result<Vec<Self>, Failure> {
        let (problem, x, d) = Self::problem(case, experts);
        let plans = ctx.plan_experts_candidates(&problem).map_err(Failure::of_plan)?;
        Ok(plans.into_iter().map(|plan| Self { ctx, case, experts, plan, x, d }).collect())
    }

    fn problem(case: &ExpertCase, experts: &Experts) -> (ExpertProblem, Operand, Operand) {
        let (each, layout) = (&case.each, case.each.layout);
        let x = Operand::new(each.x_dtype, case.x_rows(), each.k, layout.x_gap, layout.offset);
        let d = Operand::new(each.d_dtype, each.m / case.summed(), each.n, layout.d_gap, layout.offset);
        let problem = match case.form {
            FormCase::Contiguous => ExpertProblem::contiguous(experts, each.m),
            FormCase::Masked { capacity } => ExpertProblem::masked(experts, capacity),
            FormCase::Indexed { top_k, x_per_slot, combined } => {
                let mut problem = ExpertProblem::indexed(experts, each.m / top_k, top_k);
                if x_per_slot {
                    problem = problem.x_per_slot();
                }
                if case.listed {
                    problem = problem.listed();
                }
                if combined { problem.combined() } else { problem }
            }
        };
        let problem = if case.ready { problem.index_ready() } else { problem };
        (problem.each(|problem| stated(problem, each, &x, &d)), x, d)
    }

    fn run(&self, host: &Host, index: &Index) -> Result<Run, Failure> {
        self.try_run(host, index).map_err(Failure::of_run)
    }

    fn try_run(&self, host: &Host, index: &Index) -> Result<Run, qgemm_api::Error> {
        let Self { ctx, case, experts, plan, x, d } = self;
        let (each, layout) = (&case.each, case.each.layout);
        let upload = |operand: Operand, values: &[f32]| {
            Ok::<_, qgemm_api::Error>((operand, ctx.upload(&operand.encode(values))?))
        };
        let given =
            |wanted: bool, operand: Operand, values: &[f32]| wanted.then(|| upload(operand, values)).transpose();
        let (n, m) = (each.n, each.m);
        let x_buffer = upload(*x, &host.operands.x)?;
        let quantized = host.x.as_ref().map(|x| x.upload(ctx)).transpose()?;
        let c = match each.epilogue.c {
            Some((beta, dtype)) => {
                let operand = Operand::new(dtype, m, n, layout.c_gap, layout.offset);
                let bytes = if beta == 0.0 { operand.poison() } else { operand.encode(&host.operands.c) };
                Some((operand, ctx.upload(&bytes)?)).filter(|_| beta != 0.0)
            }
            None => None,
        };
        let bias = match each.epilogue.bias {
            Some(dtype) => {
                let biases = if case.shared { &host.biases[..1] } else { &host.biases };
                let operand = Operand::new(dtype, 1, biases.len() * each.bias_rows() * n, 0, 0);
                Some(upload(operand, &biases.concat())?)
            }
            None => None,
        };
        let token_scale = Operand::new(DType::F32, 1, m, 0, 0);
        let token_scale = given(each.epilogue.token_scale, token_scale, &host.operands.token_scale)?;
        let residual = match each.epilogue.residual {
            Some(dtype) => {
                let rows = m / case.summed();
                let operand = Operand::new(dtype, rows, n, layout.residual_gap, layout.offset);
                Some(upload(operand, &host.operands.residual[..rows * n])?)
            }
            None => None,
        };
        let function = each.norm_function();
        let of_columns = |dtype: Option<DType>, values: &[f32]| {
            dtype.map(|dtype| upload(Operand::new(dtype, 1, each.k, 0, 0), values)).transpose()
        };
        let gamma = of_columns(function.and_then(|function| function.gamma), &host.operands.gamma)?;
        let beta = of_columns(function.and_then(|function| function.beta), &host.operands.beta)?;
        let router_weights = Operand::new(DType::F32, 1, m, 0, 0);
        let router_weights = given(!index.router_weights.is_empty(), router_weights, &index.router_weights)?;
        let words: Vec<u8> = index.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let index_buffer = ctx.upload(&words)?;
        let lists = case.listed.then(|| ctx.upload(&index.lists(case.experts))).transpose()?;
        let mut d_buffer = ctx.upload(&d.poison())?;
        let mut status = ctx.upload(&[0xffu8; 8])?;
        let mut workspace: Option<Workspace> = match plan.workspace_bytes() {
            0 => None,
            bytes => Some(ctx.workspace(bytes)?),
        };
        let d_view = d_buffer.slice_mut(d.range())?;
        let mut args = match &quantized {
            Some(given) => ExpertArgs::new(&given.x, experts, &index_buffer, d_view),
            None => ExpertArgs::new(x_buffer.1.slice(x_buffer.0.range())?, experts, &index_buffer, d_view),
        }
        .status(&mut status);
        args.x_factor = quantized.as_ref().and_then(|given| given.factor.as_ref()).map(Into::into);
        args.c = slice(&c)?;
        args.bias = slice(&bias)?;
        args.token_scale = slice(&token_scale)?;
        args.residual = slice(&residual)?;
        args.gamma = slice(&gamma)?;
        args.beta = slice(&beta)?;
        args.router_weights = slice(&router_weights)?;
        args.lists = lists.as_ref().map(Into::into);
        args.workspace = workspace.as_mut();
        plan.run(&ctx.default_stream(), args)?;
        let bytes = ctx.download(&d_buffer)?;
        d_buffer.raw().check_guards()?;
        let status = match plan.check_status(ctx, &status) {
            Ok(()) => Ok(()),
            Err(qgemm_api::Error::BadExpertIndex { fault, place, .. }) => Err(format!("{fault:?} at {place}")),
            Err(other) => return Err(other),
        };
        Ok(Run { d: bytes, status })
    }

    /// Checks that rows without an expert are still poison.
    fn check_untouched(&self, buffer: &[u8], written: &[usize]) -> Result<(), Failure> {
        let (d, start) = (&self.d, self.d.range().start);
        let width = self.case.each.d_dtype.bytes();
        let rows = self.case.each.m / self.case.summed();
        let row = |row: usize| &buffer[start + row * d.row_stride() * width..][..d.columns() * width];
        let mut written = written.iter().copied().peekable();
        for at in 0..rows {
            if written.next_if_eq(&at).is_none() && row(at).iter().any(|&byte| byte != 0xff) {
                return Err(Failure::WroteRow(at));
            }
        }
        Ok(())
    }
}
