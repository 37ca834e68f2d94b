//! Plan of a fused weight on a device, on poisoned memory. Each
//! segment has an output.

use qgemm_api::{Buffer, Context, DeviceKind, FusedArgs, FusedProblem, FusedWeight};
use qgemm_formats::DType;

use super::case::Case;
use super::host::HostOperands;
use super::launch::{Runs, stated, stored_x};
use crate::operand::Operand;
use crate::outcome::Failure;

/// Output layout of segment `i` with `n` features. Every second
/// one is f32, and gaps differ.
fn stored_segment(case: &Case, i: usize, n: usize) -> Operand {
    let dtype = if i % 2 == 1 { DType::F32 } else { case.d_dtype };
    Operand::new(dtype, case.m, n, case.layout.d_gap * (i + 1), case.layout.offset)
}

/// Runs the case. D of the result has the outputs of all segments
/// side by side, rounded to the case's type.
pub(super) fn multiply_fused(
    ctx: &Context,
    weight: &FusedWeight,
    case: &Case,
    host: &HostOperands,
) -> Result<Runs, Failure> {
    let (x, layout) = (stored_x(case), case.layout);
    let like_d = |dtype, gap, values: &[f32]| {
        let operand = Operand::new(dtype, case.m, case.n, gap, layout.offset);
        (operand, operand.encode(values))
    };
    let row = |dtype, columns, values: &[f32]| {
        let operand = Operand::new(dtype, 1, columns, 0, 0);
        (operand, operand.encode(values))
    };
    let (epilogue, function) = (case.epilogue, case.norm_function());
    let gamma = function.and_then(|function| function.gamma).map(|dtype| row(dtype, case.k, &host.gamma));
    let beta = function.and_then(|function| function.beta).map(|dtype| row(dtype, case.k, &host.beta));
    let c = epilogue.c.map(|(_, dtype)| like_d(dtype, layout.c_gap, &host.c));
    let residual = epilogue.residual.map(|dtype| like_d(dtype, layout.residual_gap, &host.residual));
    let bias = epilogue.bias.map(|dtype| row(dtype, case.n, &host.bias));
    let token_scale = epilogue.token_scale.then(|| row(DType::F32, case.m, &host.token_scale));

    let sizes = case.segment_sizes();
    let outputs: Vec<Operand> = sizes.iter().enumerate().map(|(i, &n)| stored_segment(case, i, n)).collect();
    let all = Operand::new(case.d_dtype, case.m, case.n, 0, 0);
    let of_case = |problem| stated(problem, case, &x, &all);
    let mut problem = FusedProblem::new(weight, case.m, case.x_dtype).each(of_case);
    for (i, output) in outputs.iter().enumerate() {
        let dtype = if i % 2 == 1 { DType::F32 } else { case.d_dtype };
        problem = problem
            .output_dtype(i, dtype)
            .output_row_stride(i, output.row_stride() as u64)
            .output_alignment(i, output.alignment());
    }
    let plan = ctx.plan_fused(&problem).map_err(Failure::of_plan)?;
    plan.products().try_for_each(|product| Failure::check_launched(product.sequence(), product.kernel_id()))?;

    let device = Failure::of_run;
    let stream = ctx.default_stream();
    let x_buffer = ctx.upload(&x.encode(&host.x)).map_err(device)?;
    let upload = |operand: Option<(Operand, Vec<u8>)>| {
        operand.map(|(operand, bytes)| Ok((operand, ctx.upload(&bytes)?))).transpose().map_err(device)
    };
    let (gamma, beta, bias) = (upload(gamma)?, upload(beta)?, upload(bias)?);
    let (c, residual, token_scale) = (upload(c)?, upload(residual)?, upload(token_scale)?);
    let allocate = |output: &Operand| ctx.allocate(output.buffer_bytes());
    let mut buffers = outputs.iter().map(allocate).collect::<Result<Vec<Buffer>, _>>().map_err(device)?;
    let mut workspace = ctx.workspace(plan.workspace_bytes()).map_err(device)?;
    let repeats = ctx.info().id.kind != DeviceKind::Emu || plan.workspace_bytes() > 0;
    let mut once = || -> Result<Vec<Vec<u8>>, qgemm_api::Error> {
        for (output, buffer) in outputs.iter().zip(&mut buffers) {
            ctx.upload_into(&output.poison(), buffer)?;
        }
        let views = outputs.iter().zip(&mut buffers).map(|(output, buffer)| buffer.slice_mut(output.range()));
        let mut views = views.collect::<Result<Vec<_>, _>>()?;
        let mut args = FusedArgs::new(x_buffer.slice(x.range())?, weight, &mut views, &mut workspace);
        args.c = c.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?;
        args.bias = bias.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?;
        args.token_scale = token_scale.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?;
        args.residual = residual.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?;
        args.gamma = gamma.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?;
        args.beta = beta.as_ref().map(|(operand, buffer)| buffer.slice(operand.range())).transpose()?;
        plan.run(&stream, args)?;
        buffers.iter().map(|buffer| ctx.download(buffer)).collect()
    };
    let first = once().map_err(device)?;
    let second = repeats.then(once).transpose().map_err(device)?;
    for (output, bytes) in outputs.iter().zip(&first) {
        if let Some(byte) = output.first_written_outside(bytes) {
            return Err(Failure::WroteOutside(byte));
        }
    }
    let side_by_side = |buffers: &Vec<Vec<u8>>| {
        let parts: Vec<Vec<f32>> = outputs.iter().zip(buffers).map(|(output, bytes)| output.decode(bytes)).collect();
        let of_row = |row: usize| parts.iter().zip(&sizes).flat_map(move |(part, n)| part[row * n..][..*n].to_vec());
        all.encode(&(0..case.m).flat_map(of_row).collect::<Vec<_>>())
    };
    Ok(Runs {
        kernel: plan.products().map(|product| product.kernel_name()).collect::<Vec<_>>().join(", "),
        kernel_id: plan.products().find_map(|product| product.kernel_id()),
        config: plan.products().find_map(|product| product.launch()).map(|launch| launch.config),
        d: all,
        first: side_by_side(&first),
        second: second.as_ref().map(side_by_side),
    })
}
