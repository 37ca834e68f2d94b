//! [`NormPlan`]: a kernel made ready for one norm.

use std::fmt;
use std::sync::Arc;

use qgemm_formats::{DType, XFactor};
use qgemm_hal::{
    BufferMut, BufferRef, CheckedNorm, CheckedQuantize, Device, DeviceId, KernelId, LaunchSequence, NormLaunch,
    NormOperand, Operands, Operation, Stream, XPlace,
};
use qgemm_sched::memory_bound::choose;

use super::description::Norm;
use crate::error::Error;
use crate::operand::{Checks, Extent};
use crate::plan_cache::{PlanCaches, Ready};
use crate::quantization::{PlaneExtents, QuantizedX, QuantizedXParts};

/// A kernel chosen and made ready for one [`Norm`]; made by [`Context::plan_norm`](crate::Context::plan_norm). Its text says what
/// a run launches.
#[derive(Debug)]
pub struct NormPlan {
    op: CheckedNorm,
    device: DeviceId,
    /// `None` where something takes its place.
    x: Option<Extent>,
    /// D, or the codes.
    d: Extent,
    /// What the result is quantized to, and the planes beside its codes.
    quantization: Option<(CheckedQuantize, PlaneExtents)>,
    gamma: Option<Extent>,
    beta: Option<Extent>,
    /// `None` where there is none, and where the sum takes its place.
    residual: Option<Extent>,
    sum: Option<Extent>,
    /// `None` where there is nothing to write.
    ready: Option<Arc<Ready<CheckedNorm>>>,
}

/// What one run of a [`NormPlan`] reads and writes. Gamma and beta must not be what work before it on the stream still writes: kernels
/// read them as they read weights, before that work is done.
///
/// ```
/// use qgemm_api::{Context, DType, Norm, NormArgs, NormFunction};
///
/// let ctx = Context::open("cpu")?;
/// // What a transformer's layer begins with: the sum takes the place of the residual, and is normalized.
/// let function = NormFunction::rms(0.0).gamma(DType::F32);
/// let plan = ctx.plan_norm(&Norm::new(1, 2, DType::F32, function).residual(DType::F32).sum_in_place())?;
/// let x = ctx.upload(&DType::F32.encode(&[1.0, 2.0]))?;
/// let gamma = ctx.upload(&DType::F32.encode(&[1.0, 10.0]))?;
/// let mut residual = ctx.upload(&DType::F32.encode(&[6.0, -1.0]))?;
/// let mut d = ctx.allocate(2 * 4)?;
/// plan.run(&ctx.default_stream(), NormArgs::new(&x, &mut d).gamma(&gamma).sum(&mut residual))?;
/// assert_eq!(ctx.download::<f32>(&residual)?, [7.0, 1.0]);
/// // The mean of 49 and 1 is 25.
/// assert_eq!(ctx.download::<f32>(&d)?, [1.4, 2.0]);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct NormArgs<'a> {
    /// The rows, unless something takes their place.
    pub x: Option<BufferRef<'a>>,
    /// The result; of a quantized one its codes.
    pub d: BufferMut<'a>,
    /// An f32 for all of a quantized result, where the format takes one ([`XFactor::Given`]).
    pub factor: Option<BufferRef<'a>>,
    /// Written: the scales of a quantized result, where the format has some.
    pub scales: Option<BufferMut<'a>>,
    /// Written: its factors, an f32 a row, where rows have some.
    pub token_factors: Option<BufferMut<'a>>,
    /// Written: its sums, where the format has some.
    pub sums: Option<BufferMut<'a>>,
    /// A factor for every column, when the norm has a gamma.
    pub gamma: Option<BufferRef<'a>>,
    /// What is added to every column, when the norm has a beta.
    pub beta: Option<BufferRef<'a>>,
    /// The residual, when the norm adds one and the sum does not take its place.
    pub residual: Option<BufferRef<'a>>,
    /// Written: the sum, when the norm adds a residual. It holds X or the residual before, where it takes their place.
    pub sum: Option<BufferMut<'a>>,
}

impl<'a> NormArgs<'a> {
    /// Rows of X become rows of D. Methods add the other operands, and where they are optional to the caller, too, the fields
    /// can be set.
    pub fn new(x: impl Into<BufferRef<'a>>, d: impl Into<BufferMut<'a>>) -> Self {
        Self { x: Some(x.into()), ..Self::in_place(d) }
    }

    /// X is what D takes the place of ([`Norm::d_in_place`]), or the sum ([`Norm::sum_in_place_of_x`]).
    pub fn in_place(d: impl Into<BufferMut<'a>>) -> Self {
        let (x, factor, gamma, beta, residual) = (None, None, None, None, None);
        let (scales, token_factors, sums, sum) = (None, None, None, None);
        Self { x, d: d.into(), factor, scales, token_factors, sums, gamma, beta, residual, sum }
    }

    /// Rows of X become a quantized X, of a norm whose result is one ([`Norm::d_format`]).
    pub fn quantized(x: impl Into<BufferRef<'a>>, to: &'a mut QuantizedX) -> Self {
        let QuantizedXParts { codes, scales, token_factors, sums } = to.planes_mut();
        let mut args = Self::new(x, codes);
        args.scales = scales.as_mut().map(Into::into);
        args.token_factors = token_factors.as_mut().map(Into::into);
        args.sums = sums.as_mut().map(Into::into);
        args
    }

    /// With the factor of all of a quantized result: see [`NormArgs::factor`].
    pub fn factor(mut self, factor: impl Into<BufferRef<'a>>) -> Self {
        self.factor = Some(factor.into());
        self
    }

    /// With the gamma of the norm's function.
    pub fn gamma(mut self, gamma: impl Into<BufferRef<'a>>) -> Self {
        self.gamma = Some(gamma.into());
        self
    }

    /// With the beta of the norm's function.
    pub fn beta(mut self, beta: impl Into<BufferRef<'a>>) -> Self {
        self.beta = Some(beta.into());
        self
    }

    /// With the residual of [`Norm::residual`].
    pub fn residual(mut self, residual: impl Into<BufferRef<'a>>) -> Self {
        self.residual = Some(residual.into());
        self
    }

    /// With the sum of [`Norm::residual`].
    pub fn sum(mut self, sum: impl Into<BufferMut<'a>>) -> Self {
        self.sum = Some(sum.into());
        self
    }
}

impl NormPlan {
    pub(crate) fn new(device: &dyn Device, caches: &PlanCaches, norm: &Norm) -> Result<Self, Error> {
        let op = norm.check()?;
        let quantization = norm.check_quantization()?.map(|made| (made, PlaneExtents::of(&made)));
        let make = || {
            let CheckedNorm { rows, columns, x, d, .. } = op;
            let _span = tracing::info_span!("plan", rows, columns, from = %x.dtype, to = %d.dtype).entered();
            let (family, plan) = choose(&op, device.info(), device.catalog().norm)?;
            Ok::<_, Error>(Ready { family, plan, sequence: family.prepare(device, &op, &plan)? })
        };
        let matrix = |dense| Extent::of(&dense, op.rows, op.columns);
        let of_columns = |dtype: DType| Extent::of_values(dtype, op.columns);
        Ok(Self {
            device: device.info().id,
            x: (op.x_place == XPlace::Own).then(|| matrix(op.x)),
            d: quantization.map_or(Extent::of(&op.d, op.rows, op.d_columns), |(_, planes)| planes.codes),
            quantization,
            gamma: op.function.gamma.map(of_columns),
            beta: op.function.beta.map(of_columns),
            residual: op.added.filter(|added| !added.in_place).map(|added| matrix(added.residual)),
            sum: op.added.map(|added| matrix(added.sum)),
            ready: if op.is_nothing() { None } else { Some(caches.norm.get_or_make(&op, make)?) },
            op,
        })
    }

    /// Name of the chosen kernel; `none` where there is nothing to write.
    pub fn kernel_name(&self) -> &str {
        self.sequence().map_or("none", LaunchSequence::name)
    }

    /// Identity of the chosen kernel; `None` where there is nothing to write.
    pub fn kernel_id(&self) -> Option<KernelId> {
        self.launch().map(|plan| plan.config.kernel)
    }

    /// The chosen configuration; `None` where there is nothing to write.
    pub fn launch(&self) -> Option<&NormLaunch> {
        self.ready.as_ref().map(|ready| &ready.plan)
    }

    /// The kernels that a run launches, in order; `None` where there is nothing to write.
    pub fn sequence(&self) -> Option<&LaunchSequence> {
        self.ready.as_ref().map(|ready| &ready.sequence)
    }

    /// The validated operation.
    pub fn op(&self) -> &CheckedNorm {
        &self.op
    }

    /// What the result is quantized to.
    pub(crate) fn quantization(&self) -> Option<&CheckedQuantize> {
        self.quantization.as_ref().map(|(made, _)| made)
    }

    /// Bytes that a run must move at least: those it reads and those it writes, once each.
    pub fn bytes(&self) -> f64 {
        self.op.traffic()
    }

    /// The device that the plan is for.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Submits the norm to `stream`. Allocates nothing, waits for nothing and takes no lock, so it may be captured in a CUDA
    /// graph.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, on another device or not part of the norm, or a device error. Nothing has
    /// been written then.
    pub fn run(&self, stream: &Stream, args: NormArgs<'_>) -> Result<(), Error> {
        let NormArgs { x, d, factor, scales, token_factors, sums, gamma, beta, residual, sum } = args;
        let checks = Checks(self.device);
        checks.device("stream", stream.device())?;
        checks.view("D", d.view(), self.d)?;
        let x = checks.optional("X", x, self.x, "nothing takes its place")?;
        let gamma = checks.optional("gamma", gamma, self.gamma, "the norm multiplies columns")?;
        let beta = checks.optional("beta", beta, self.beta, "the norm adds to columns")?;
        let residual = checks.optional("residual", residual, self.residual, "the norm adds one")?;
        let sum = checks.optional("sum", sum, self.sum, "the norm adds a residual and writes the sum")?;
        let planes = self.quantization.map(|(_, planes)| planes);
        let is_given = self.quantization.is_some_and(|(made, _)| made.parts.factor == XFactor::Given);
        let of_factor = is_given.then(|| Extent::of_values(DType::F32, 1));
        let factor = checks.optional("factor", factor, of_factor, "it is given for all of the result")?;
        let why = "the format of the result has such a plane";
        let scales = checks.optional("scales", scales, planes.and_then(|planes| planes.scales), why)?;
        let of_tokens = planes.and_then(|planes| planes.token_factors);
        let token_factors = checks.optional("token factors", token_factors, of_tokens, why)?;
        let sums = checks.optional("sums", sums, planes.and_then(|planes| planes.sums), why)?;
        let Some(ready) = &self.ready else { return Ok(()) };
        let mut operands = Operands::new();
        operands.read_if_any(NormOperand::Factor, factor);
        let of_planes =
            [(NormOperand::Scales, scales), (NormOperand::TokenFactors, token_factors), (NormOperand::Sums, sums)];
        for (operand, plane) in of_planes {
            if let Some(plane) = plane {
                operands.write(operand, plane);
            }
        }
        operands.read_if_any(NormOperand::X, x);
        operands.read_if_any(NormOperand::Residual, residual);
        operands.read_if_any(NormOperand::Gamma, gamma);
        operands.read_if_any(NormOperand::Beta, beta);
        operands.write(self.op.d_operand(), d);
        if let (Some(operand), Some(sum)) = (self.op.sum_operand(), sum) {
            operands.write(operand, sum);
        }
        let _span = tracing::trace_span!("launch", kernel = self.kernel_name()).entered();
        Ok(ready.sequence.run_for(&self.op, stream, operands)?)
    }
}

/// What was chosen, and the launches of a run: each with its kernel, geometry and operands.
impl fmt::Display for NormPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CheckedNorm { rows, columns, x, .. } = self.op;
        let (name, from, to) = (self.kernel_name(), x.dtype, self.op.d_format());
        write!(f, "{name} for {rows} x {columns} from {from} to {to} on {}", self.device)?;
        let Some(Ready { plan, sequence, .. }) = self.ready.as_deref() else { return Ok(()) };
        writeln!(f, ", expected to take {:.1} µs", plan.estimate * 1e6)?;
        sequence.display_with(&self.op.operands()).fmt(f)
    }
}
