//! `qgemm bench` of products.

use qgemm_api::{Args as RunArgs, Buffer, Context, DType, Plan, Weight};

use super::subject::Subject;
use super::timing::{Pace, Timing, time_launches};
use super::{Args, BenchRow, copies};
use crate::choice::Shape;

/// Times what a plan takes for a subject.
///
/// # Errors
/// When no kernel serves it, or the device fails.
pub fn measure(ctx: &Context, args: &Args, subject: &Subject, bandwidth: f64) -> anyhow::Result<BenchRow> {
    let m = subject.shape.m;
    let bench = Bench::new(ctx, args.x_dtype, subject, m)?;
    let plan = ctx.plan(&args.problem(&bench.weights[0], m))?;
    let Timing { median, noise, graph } = bench.time(&plan, Pace::Thorough)?;
    let bytes_per_second = plan.bytes() as f64 / median;
    Ok(BenchRow {
        device: ctx.info().name.clone(),
        shape: subject.shape.to_string(),
        format: subject.format().to_string(),
        x_dtype: args.x_dtype.to_string(),
        kernel: plan.kernel_name().to_owned(),
        kernel_id: plan.kernel_id().map(|id| id.to_string()),
        microseconds: median * 1e6,
        noise,
        bytes_per_second,
        flops: 2.0 * plan.macs() as f64 / median,
        bandwidth_share: bytes_per_second / bandwidth,
        copies: bench.weights.len(),
        graph,
        slower: None,
        regressed: false,
    })
}

/// A weight on the device, in copies, with activations and outputs.
pub struct Bench<'a> {
    pub ctx: &'a Context,
    pub weights: Vec<Weight>,
    x: Buffer,
    d_bytes: usize,
}

impl<'a> Bench<'a> {
    /// For up to `most` tokens.
    ///
    /// # Errors
    /// When memory runs out, or the weight cannot be made.
    pub fn new(ctx: &'a Context, x_dtype: DType, subject: &Subject, most: usize) -> anyhow::Result<Self> {
        let Shape { n, k, .. } = subject.shape;
        let host = subject.weight()?;
        let first = ctx.load(&host)?;
        let count = copies(ctx, first.bytes());
        let mut weights = vec![first];
        while weights.len() < count {
            weights.push(ctx.load(&host)?);
        }
        let x = ctx.upload(&x_dtype.encode(&vec![0.5; most * k]))?;
        Ok(Self { ctx, weights, x, d_bytes: most * n * x_dtype.bytes() })
    }

    /// Times launches of a plan, with the copies in turn.
    ///
    /// # Errors
    /// Those of the device.
    pub fn time(&self, plan: &Plan, pace: Pace) -> anyhow::Result<Timing> {
        let mut d = self.ctx.allocate(self.d_bytes)?;
        let mut workspace = self.ctx.workspace(plan.workspace_bytes())?;
        let stream = self.ctx.new_stream()?;
        let launch = |weight: &Weight| {
            let args = RunArgs::new(&self.x, weight, &mut d).workspace(&mut workspace);
            plan.run(&stream, args)
        };
        Ok(time_launches(self.ctx, &stream, &self.weights, pace, launch)?)
    }
}
