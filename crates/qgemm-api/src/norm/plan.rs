//! [`NormPlan`]: ready kernel of one norm.

use qgemm_formats::{DType, XFactor};
use qgemm_hal::{
    BufferMut, BufferRef, CheckedNorm, CheckedQuantize, NormOperand, QuantizedD, Stream, XOverwrite, XPlanes,
};
use qgemm_sched::Preferences;

use super::description::Norm;
use crate::context::Context;
use crate::error::Error;
use crate::operand::Extent;
use crate::planned::{Bound, Planned, Wanted, chosen_by_traffic, explain};
use crate::quantization::{PlaneExtents, QuantizedX, QuantizedXParts};
use crate::record::{PlanRecord, Recorded};
use crate::setters::setters;

/// Ready kernels of one [`Norm`], from [`Context::plan_norm`].
/// Its text lists the launches of a run.
pub type NormPlan = Planned<CheckedNorm>;

/// Operands of one run of a [`NormPlan`]. Gamma and beta must not
/// be outputs of unfinished work on the stream: kernels read them
/// early, as they read weights.
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
    /// Input rows, unless the norm is in place.
    pub x: Option<BufferRef<'a>>,
    /// Output; the codes of a quantized output.
    pub d: BufferMut<'a>,
    /// Factor of the quantized output, an f32, where the format takes
    /// one ([`XFactor::Given`]).
    pub factor: Option<BufferRef<'a>>,
    /// Scales of the quantized output, where the format has scales.
    pub scales: Option<BufferMut<'a>>,
    /// Row factors of the quantized output, an f32 per row, where the
    /// format has them.
    pub token_factors: Option<BufferMut<'a>>,
    /// Sums of the quantized output, where the format has sums.
    pub sums: Option<BufferMut<'a>>,
    /// Gamma, one per column, when the norm has it.
    pub gamma: Option<BufferRef<'a>>,
    /// Beta, one per column, when the norm has it.
    pub beta: Option<BufferRef<'a>>,
    /// Residual, when the norm adds one and does not overwrite it
    /// with the sum.
    pub residual: Option<BufferRef<'a>>,
    /// Sum output, when the norm adds a residual. In place, it holds
    /// X or the residual before.
    pub sum: Option<BufferMut<'a>>,
    /// z of the gate, when the norm has one ([`Norm::gate`]).
    pub gate: Option<BufferRef<'a>>,
}

impl<'a> NormArgs<'a> {
    /// Operands with output D. Methods add the other operands.
    /// Callers with optional operands can set the fields.
    pub fn new(x: impl Into<BufferRef<'a>>, d: impl Into<BufferMut<'a>>) -> Self {
        Self { x: Some(x.into()), ..Self::in_place(d) }
    }

    /// Operands of a norm in place: D ([`Norm::d_in_place`]) or the
    /// sum ([`Norm::sum_in_place_of_x`]) overwrites X.
    pub fn in_place(d: impl Into<BufferMut<'a>>) -> Self {
        let (x, factor, gamma, beta, residual, gate) = (None, None, None, None, None, None);
        let (scales, token_factors, sums, sum) = (None, None, None, None);
        Self { x, d: d.into(), factor, scales, token_factors, sums, gamma, beta, residual, sum, gate }
    }

    /// Operands with a quantized output ([`Norm::d_format`]).
    pub fn quantized(x: impl Into<BufferRef<'a>>, to: &'a mut QuantizedX) -> Self {
        let QuantizedXParts { codes, scales, token_factors, sums } = to.planes_mut();
        let mut args = Self::new(x, codes);
        args.scales = scales.as_mut().map(Into::into);
        args.token_factors = token_factors.as_mut().map(Into::into);
        args.sums = sums.as_mut().map(Into::into);
        args
    }

    setters! {
        /// With the factor of the quantized output: see
        /// [`NormArgs::factor`].
        factor: BufferRef,
        /// With the gamma of the norm's function.
        gamma: BufferRef,
        /// With the beta of the norm's function.
        beta: BufferRef,
        /// With the residual of [`Norm::residual`].
        residual: BufferRef,
        /// With the sum of [`Norm::residual`].
        sum: BufferMut,
        /// With the z of [`Norm::gate`].
        gate: BufferRef,
        /// With the scales of the quantized output.
        scales: BufferMut,
        /// With the row factors of the quantized output.
        token_factors: BufferMut,
        /// With the sums of the quantized output.
        sums: BufferMut,
    }
}

impl Context {
    /// Chooses a kernel for `norm` and makes it ready. A known
    /// problem costs a lookup, as with [`Context::plan`].
    ///
    /// ```
    /// use qgemm_api::{Context, DType, Norm, NormArgs, NormFunction};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let plan = ctx.plan_norm(&Norm::new(1, 4, DType::F32, NormFunction::layer(0.0)).d_dtype(DType::F16))?;
    /// let x = ctx.upload(&DType::F32.encode(&[11.0, 9.0, 9.0, 11.0]))?;
    /// let mut d = ctx.allocate(4 * DType::F16.bytes())?;
    /// plan.run(&ctx.default_stream(), NormArgs::new(&x, &mut d))?;
    /// assert_eq!(DType::F16.decode(&ctx.download(&d)?), [1.0, -1.0, -1.0, 1.0]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the norm is invalid or no family serves it, or when the
    /// kernel cannot be prepared.
    pub fn plan_norm(&self, norm: &Norm) -> Result<NormPlan, Error> {
        Planned::new(self, norm.check()?, Preferences::default())
    }

    /// Record of the choice of [`Context::plan_norm`]: see
    /// [`Context::explain`].
    ///
    /// # Errors
    /// When the norm is invalid.
    pub fn explain_norm(&self, problem: &Norm) -> Result<PlanRecord, Error> {
        explain(self, &problem.check()?, &Preferences::default())
    }
}

chosen_by_traffic!(CheckedNorm);

impl Recorded for CheckedNorm {}

/// Quantization whose planes the norm writes.
fn quantization(op: &CheckedNorm) -> Option<CheckedQuantize> {
    op.quantized.map(|QuantizedD { format, planes: XPlanes { parts, codes_row, scales_row, sums_row } }| {
        CheckedQuantize { rows: op.rows, columns: op.columns, x: op.x, format, parts, codes_row, scales_row, sums_row }
    })
}

impl Bound for CheckedNorm {
    fn wanted(&self, operand: NormOperand, _: bool) -> Wanted {
        use NormOperand as O;
        let matrix = |dense| Extent::of(&dense, self.rows, self.columns);
        let of_columns = |dtype: DType| Extent::of_values(dtype, self.columns);
        let planes = quantization(self).map(|made| PlaneExtents::of(&made));
        let d = planes.map_or(Extent::of(&self.d, self.rows, self.d_columns), |planes| planes.codes);
        let sum = self.added.map(|added| matrix(added.sum));
        let why = "the format of the result has such a plane";
        match operand {
            O::X => {
                let extent = (self.x_overwrite == XOverwrite::Own).then(|| matrix(self.x));
                Wanted::optional("X", extent, "nothing takes its place")
            }
            O::Residual => {
                let own = self.added.filter(|added| !added.in_place);
                Wanted::optional("residual", own.map(|added| matrix(added.residual)), "the norm adds one")
            }
            O::Gamma => Wanted::optional("gamma", self.function.gamma.map(of_columns), "the norm multiplies columns"),
            O::Beta => Wanted::optional("beta", self.function.beta.map(of_columns), "the norm adds to columns"),
            O::Gate => Wanted::optional("gate", self.gate.map(|gate| matrix(gate.z)), "the norm has one"),
            O::Order => Wanted::optional("column order", None, "products gather columns"),
            O::D | O::XAndD | O::Codes => Wanted::always("D", d),
            O::Sum | O::XAndSum | O::ResidualAndSum => {
                Wanted::optional("sum", sum, "the norm adds a residual and writes the sum")
            }
            O::Factor => {
                let is_given = quantization(self).is_some_and(|made| made.parts.factor == XFactor::Given);
                let extent = is_given.then(|| Extent::of_values(DType::F32, 1));
                Wanted::optional("factor", extent, "it is given for all of the result")
            }
            O::Scales => Wanted::optional("scales", planes.and_then(|planes| planes.scales), why),
            O::TokenFactors => Wanted::optional("token factors", planes.and_then(|planes| planes.token_factors), why),
            O::Sums => Wanted::optional("sums", planes.and_then(|planes| planes.sums), why),
        }
    }
}

impl NormPlan {
    /// Quantization of the result.
    pub(crate) fn quantization(&self) -> Option<CheckedQuantize> {
        quantization(self.op())
    }

    /// Submits the norm to `stream`. A run allocates nothing, waits
    /// for nothing and takes no lock. A CUDA graph may capture it.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, unexpected
    /// or on another device; or on a device error. Nothing is written
    /// then.
    pub fn run(&self, stream: &Stream, args: NormArgs<'_>) -> Result<(), Error> {
        use NormOperand as O;
        let NormArgs { x, d, factor, scales, token_factors, sums, gamma, beta, residual, sum, gate } = args;
        let mut run = self.start(stream)?;
        run.write(self.op().d_operand(), d)?;
        let read = [
            (O::X, x),
            (O::Gamma, gamma),
            (O::Beta, beta),
            (O::Residual, residual),
            (O::Factor, factor),
            (O::Gate, gate),
        ];
        read.into_iter().try_for_each(|(operand, view)| run.read(operand, view))?;
        run.write(self.op().sum_operand().unwrap_or(O::Sum), sum)?;
        for (operand, view) in [(O::Scales, scales), (O::TokenFactors, token_factors), (O::Sums, sums)] {
            run.write(operand, view)?;
        }
        run.launch(stream)
    }
}
