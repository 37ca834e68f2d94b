//! Quantized rows of a product's norm, as the norm alone writes
//! them on the same device.
//! A value between two codes may become either. A difference of
//! one code exceeds the limit of products, so the oracle uses the
//! device's codes.

use qgemm_api::{Buffer, Context, DType, Norm, NormArgs};
use qgemm_formats::XFactor;

use super::case::Case;
use super::host::HostOperands;
use crate::operand::Operand;
use crate::outcome::Failure;

/// The given factor of all normalized rows, if the format takes
/// one.
pub(super) fn factor(case: &Case) -> Option<f32> {
    let parts = case.normed_format?.parts(false, None)?;
    (parts.factor == XFactor::Given).then_some(0.03125)
}

/// Dequantized normalized rows; `None` if the case has no
/// quantizing norm.
pub(super) fn values(ctx: &Context, case: &Case, operands: &HostOperands) -> Result<Option<Vec<f64>>, Failure> {
    let (Some(format), Some(function)) = (case.normed_format, case.norm_function()) else { return Ok(None) };
    let Some(parts) = format.parts(false, None) else { return Ok(None) };
    let plan = ctx.plan_norm(&Norm::new(case.m, case.k, case.x_dtype, function).d_format(format));
    let plan = plan.map_err(Failure::of_plan)?;
    let upload = |dtype: Option<DType>, rows: usize, values: &[f32]| {
        dtype.map(|dtype| ctx.upload(&Operand::new(dtype, rows, case.k, 0, 0).encode(values))).transpose()
    };
    let run = || -> Result<[Vec<u8>; 3], qgemm_api::Error> {
        let x = upload(Some(case.x_dtype), case.m, &operands.x)?;
        let (gamma, beta) = (upload(function.gamma, 1, &operands.gamma)?, upload(function.beta, 1, &operands.beta)?);
        let given = factor(case).map(|factor| ctx.upload(&[factor])).transpose()?;
        let mut to = ctx.allocate_normed_x(&plan)?;
        let x = x.unwrap_or_else(|| unreachable!("X has a type"));
        let range = |dtype: DType, rows: usize| Operand::new(dtype, rows, case.k, 0, 0).range();
        let mut args = NormArgs::quantized(x.slice(range(case.x_dtype, case.m))?, &mut to);
        if let (Some(dtype), Some(gamma)) = (function.gamma, &gamma) {
            args = args.gamma(gamma.slice(range(dtype, 1))?);
        }
        if let (Some(dtype), Some(beta)) = (function.beta, &beta) {
            args = args.beta(beta.slice(range(dtype, 1))?);
        }
        args.factor = given.as_ref().map(Into::into);
        plan.run(&ctx.default_stream(), args)?;
        let optional = |buffer: Option<&Buffer>| buffer.map_or(Ok(Vec::new()), |buffer| ctx.download(buffer));
        Ok([ctx.download(to.codes())?, optional(to.scales())?, optional(to.token_factors())?])
    };
    let [codes, scales, factors] = run().map_err(Failure::of_run)?;
    let mut all = Vec::with_capacity(case.m * case.k);
    for row in 0..case.m {
        let of_row = |plane: &[u8], bytes: usize| plane[row * bytes..(row + 1) * bytes].to_vec();
        let (codes, scales) = (of_row(&codes, parts.code_bytes(case.k)), of_row(&scales, parts.scale_bytes(case.k)));
        let own = factors.as_chunks::<4>().0.get(row).map(|word| f32::from_le_bytes(*word));
        let values = parts.dequantize_row(&codes, &scales, own.or(factor(case)), case.k);
        all.extend(values.into_iter().map(f64::from));
    }
    Ok(Some(all))
}
