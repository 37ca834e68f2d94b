//! A case's plan on a device, run on poisoned memory.

use qgemm_api::tuning::{Candidate, KernelId};
use qgemm_api::{Args, Context, DeviceKind, Problem, Weight, Workspace};
use qgemm_formats::DType;
use qgemm_hal::TileConfig;

use super::case::Case;
use super::host::HostOperands;
use super::normed;
use super::quantized_x::{HostX, quantization};
use crate::operand::Operand;
use crate::outcome::Failure;

/// Runs of a plan. There are two, unless a second must give
/// the same bits.
pub(super) struct Runs {
    pub kernel: String,
    pub kernel_id: Option<KernelId>,
    /// The config that ran, unless the output is empty.
    pub config: Option<TileConfig>,
    pub d: Operand,
    /// The whole buffer around D after the first run.
    pub first: Vec<u8>,
    pub second: Option<Vec<u8>>,
}

pub(super) fn stored_x(case: &Case) -> Operand {
    let layout = case.layout;
    match layout.x_transposed {
        false => Operand::new(case.x_dtype, case.m, case.k, layout.x_gap, layout.offset),
        true => Operand::new(case.x_dtype, case.k, case.m, layout.x_gap, layout.offset).transposed(),
    }
}

pub(super) fn stored_d(case: &Case) -> Operand {
    Operand::new(case.d_dtype, case.m, case.n, case.layout.d_gap, case.layout.offset)
}

pub(super) fn multiply_on(
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

    let function = case.norm_function();
    let of_columns = |dtype: Option<DType>, values: &[f32]| {
        dtype.map(|dtype| {
            let operand = Operand::new(dtype, 1, case.k, 0, 0);
            (operand, operand.encode(values))
        })
    };
    let gamma = of_columns(function.and_then(|function| function.gamma), &host.gamma);
    let beta = of_columns(function.and_then(|function| function.beta), &host.beta);

    let plan = match candidate {
        Some(candidate) => ctx.plan_candidate(candidate),
        None => ctx.plan(&problem(weight, case, &stored_x, &d)),
    };
    let plan = plan.map_err(Failure::of_plan)?;
    Failure::check_launched(plan.sequence(), plan.kernel_id())?;
    let device = Failure::of_run;
    let stream = ctx.default_stream();
    let x_buffer = ctx.upload(&stored_x.encode(&host.x)).map_err(device)?;
    let quantized = HostX::new(case, &host.x).map(|x| x.upload(ctx)).transpose().map_err(device)?;
    let normed_factor = normed::factor(case).map(|factor| ctx.upload(&[factor])).transpose().map_err(device)?;
    let upload = |operand: Option<(Operand, Vec<u8>)>| {
        operand.map(|(operand, bytes)| Ok((operand, ctx.upload(&bytes)?))).transpose().map_err(device)
    };
    let (gamma, beta) = (upload(gamma)?, upload(beta)?);
    let (c, bias, token_scale, residual) = (upload(c)?, upload(bias)?, upload(token_scale)?, upload(residual)?);
    let mut d_buffer = ctx.allocate(d.buffer_bytes()).map_err(device)?;
    let mut workspace: Option<Workspace> = match plan.workspace_bytes() {
        0 => None,
        bytes => Some(ctx.workspace(bytes).map_err(device)?),
    };
    // Emulated threads run in one order: only the workspace
    // that the first run leaves may change the second.
    let repeats = ctx.info().id.kind != DeviceKind::Emu || workspace.is_some();
    let mut once = || -> Result<Vec<u8>, qgemm_api::Error> {
        ctx.upload_into(&d.poison(), &mut d_buffer)?;
        let d_view = d_buffer.slice_mut(d.range())?;
        let mut args = match &quantized {
            Some(given) => Args::new(&given.x, weight, d_view),
            None => Args::new(x_buffer.slice(stored_x.range())?, weight, d_view),
        };
        let given = quantized.as_ref().and_then(|given| given.factor.as_ref());
        args.x_factor = given.or(normed_factor.as_ref()).map(Into::into);
        args.c = c.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?;
        args.bias = bias.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?;
        args.token_scale = token_scale.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?;
        args.residual = residual.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?;
        args.gamma = gamma.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?;
        args.beta = beta.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?;
        args.workspace = workspace.as_mut();
        plan.run(&stream, args)?;
        let bytes = ctx.download(&d_buffer)?;
        d_buffer.raw().check_guards()?;
        Ok(bytes)
    };
    let first = once().map_err(device)?;
    let second = repeats.then(once).transpose().map_err(device)?;
    let config = plan.launch().map(|launch| launch.config);
    Ok(Runs { kernel: plan.kernel_name().to_owned(), kernel_id: plan.kernel_id(), config, d, first, second })
}

pub(super) fn problem(weight: &Weight, case: &Case, x: &Operand, d: &Operand) -> Problem {
    stated(Problem::new(weight, case.m), case, x, d)
}

/// `problem` with all fields of a case but weight and tokens.
pub(crate) fn stated(problem: Problem, case: &Case, x: &Operand, d: &Operand) -> Problem {
    let Case { layout, epilogue, .. } = case;
    let mut problem = problem
        .x_precision(case.x_precision)
        .d_dtype(case.d_dtype)
        .d_row_stride(d.row_stride() as u64)
        .d_alignment(d.alignment())
        .alpha(epilogue.alpha)
        .activation(epilogue.activation)
        .batch_invariant(case.batch_invariant);
    problem = match quantization(case) {
        Some(quantization) => problem.x_quantization(&quantization),
        None => problem.x_dtype(case.x_dtype).x_row_stride(x.row_stride() as u64).x_alignment(x.alignment()),
    };
    if layout.x_transposed {
        problem = problem.x_transposed();
    }
    if let Some(function) = case.norm_function() {
        problem = problem.norm(function);
    }
    if let Some(dtype) = case.normed_dtype {
        problem = problem.normed_dtype(dtype);
    }
    if let Some(format) = case.normed_format {
        problem = problem.normed_format(format);
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
