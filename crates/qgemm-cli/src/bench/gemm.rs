//! `qgemm bench --op gemm`.

use qgemm_api::{Args as RunArgs, Buffer, Context, Plan, Quantization, QuantizedX, Weight, XFactor};

use super::subject::{Subject, normal_rows};
use super::timing::{Pace, Timing, time_launches};
use super::{Args, BenchRow, copies};
use crate::choice::Shape;

/// Times the planned kernel of a subject.
///
/// # Errors
/// When no kernel supports it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let m = subject.shape.m;
    let bench = Bench::new(ctx, args, subject, m)?;
    let plan = ctx.plan(&args.problem(&bench.weights[0], m))?;
    let Timing { median, noise, graph, profile } = bench.time(&plan, args.pace())?;
    let bytes_per_second = plan.bytes() / median;
    Ok(BenchRow {
        device: ctx.info().name.clone(),
        shape: subject.shape.to_string(),
        format: subject.format().to_string(),
        x_dtype: args.x_name(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        microseconds: median * 1e6,
        noise,
        bytes_per_second,
        flops: 2.0 * plan.macs() / median,
        bandwidth_share: bytes_per_second / bandwidth,
        copies: bench.weights.len(),
        graph,
        profile: Some(profile),
        slower: None,
        regressed: false,
    })
}

/// Quantized `x`, with its given factor if the format takes one.
///
/// # Errors
/// When memory runs out, or the device fails.
pub fn quantized_x(
    ctx: &Context,
    quantization: &Quantization,
    x: &Buffer,
) -> anyhow::Result<(QuantizedX, Option<Buffer>)> {
    let plan = ctx.plan_quantization(quantization)?;
    let mut made = ctx.allocate_x(&plan)?;
    let is_given = plan.parts().factor == XFactor::Given;
    let factor = if is_given { Some(ctx.upload(&[0.01f32])?) } else { None };
    let mut run = made.args(x);
    run.factor = factor.as_ref().map(Into::into);
    plan.run(&ctx.default_stream(), run)?;
    Ok((made, factor))
}

/// Copies of a weight on the device, with activations and
/// outputs.
pub struct Bench<'a> {
    pub ctx: &'a Context,
    pub weights: Vec<Weight>,
    x: Buffer,
    /// Quantized X and its given factor, if X is given quantized.
    quantized: Option<(QuantizedX, Option<Buffer>)>,
    gamma: Buffer,
    d_bytes: usize,
}

impl<'a> Bench<'a> {
    /// Buffers for up to `most` tokens.
    ///
    /// # Errors
    /// When memory runs out, or the weight cannot be made.
    pub fn new(ctx: &'a Context, args: &Args, subject: &Subject, most: usize) -> anyhow::Result<Self> {
        let Shape { n, k, .. } = subject.shape;
        let host = subject.weight()?;
        let first = ctx.load(&host)?;
        let count = copies(ctx, first.bytes());
        let mut weights = vec![first];
        while weights.len() < count {
            weights.push(ctx.load(&host)?);
        }
        let x_dtype = args.x_dtype;
        let x = ctx.upload(&normal_rows(x_dtype, most, k))?;
        let quantized = match args.x_format {
            None => None,
            Some(format) => Some(quantized_x(ctx, &Quantization::new(most, k, x_dtype, format), &x)?),
        };
        let gamma = ctx.upload(&x_dtype.encode(&vec![1.0; k]))?;
        Ok(Self { ctx, weights, x, quantized, gamma, d_bytes: most * n * x_dtype.bytes() })
    }

    /// Times launches of a plan, rotating the copies.
    ///
    /// # Errors
    /// Errors of the device.
    pub fn time(&self, plan: &Plan, pace: Pace) -> anyhow::Result<Timing> {
        let mut d = self.ctx.allocate(self.d_bytes)?;
        let mut workspace = self.ctx.workspace(plan.workspace_bytes())?;
        let stream = self.ctx.new_stream()?;
        let launch = |weight: &Weight| {
            let mut args = match &self.quantized {
                None => RunArgs::new(&self.x, weight, &mut d),
                Some((x, _)) => RunArgs::new(x, weight, &mut d),
            };
            args.x_factor = self.quantized.as_ref().and_then(|(_, factor)| factor.as_ref()).map(Into::into);
            args.gamma = plan.op().norm.map(|_| (&self.gamma).into());
            plan.run(&stream, args.workspace(&mut workspace))
        };
        Ok(time_launches(self.ctx, &stream, &self.weights, pace, launch)?)
    }
}
