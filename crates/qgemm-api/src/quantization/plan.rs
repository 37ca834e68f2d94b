//! [`QuantizationPlan`]: ready kernel of one quantization.

use qgemm_formats::{DType, ElementType, XFactor, XFormat, XParts};
use qgemm_hal::{BufferMut, BufferRef, CheckedQuantize, QuantizeOperand, Stream};
use qgemm_sched::Preferences;

use super::description::Quantization;
use crate::context::Context;
use crate::error::Error;
use crate::operand::{Extent, WIDE_ACCESS};
use crate::planned::{Bound, Planned, Wanted, chosen_by_traffic, explain};
use crate::record::{PlanRecord, Recorded};
use crate::setters::setters;

/// Ready kernels of one [`Quantization`], from
/// [`Context::plan_quantization`]. Its text lists the launches of
/// a run.
pub type QuantizationPlan = Planned<CheckedQuantize>;

/// Required bytes of the planes of an X.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlaneExtents {
    pub codes: Extent,
    pub scales: Option<Extent>,
    pub token_factors: Option<Extent>,
    pub sums: Option<Extent>,
}

impl PlaneExtents {
    pub fn of(op: &CheckedQuantize) -> Self {
        let (parts, k) = (&op.parts, op.columns);
        let plane = |element: ElementType, row_stride: u64, row: usize, alignment: usize| {
            // The check of the operation has verified that it fits the
            // address space.
            let bytes = if op.rows == 0 || row == 0 { 0 } else { (op.rows - 1) * row_stride as usize + row };
            Extent::new(element, bytes, alignment)
        };
        Self {
            codes: plane(parts.code.element(), op.codes_row, parts.code_bytes(k), WIDE_ACCESS),
            scales: parts.scale.map(|scale| plane(scale.element(), op.scales_row, parts.scale_bytes(k), 4)),
            token_factors: (parts.factor == XFactor::PerToken).then(|| Extent::of_values(DType::F32, op.rows)),
            sums: parts.sum_span.map(|_| plane(DType::F32.into(), op.sums_row, parts.sums(k) * 4, 4)),
        }
    }
}

/// Operands of one run of a [`QuantizationPlan`], from
/// [`QuantizedX::args`](crate::QuantizedX::args).
#[derive(Debug)]
#[non_exhaustive]
pub struct QuantizationArgs<'a> {
    /// Input matrix.
    pub x: BufferRef<'a>,
    /// Factor of X, an f32, where the format takes one
    /// ([`XFactor::Given`]).
    pub factor: Option<BufferRef<'a>>,
    /// Codes, an output. Its address is a multiple of 16.
    pub codes: BufferMut<'a>,
    /// Scales, an output, where the format has them. Its address is a
    /// multiple of 4.
    pub scales: Option<BufferMut<'a>>,
    /// Token factors, an f32 output per token, where the format has
    /// them.
    pub token_factors: Option<BufferMut<'a>>,
    /// Sums, an output, where the format has them.
    pub sums: Option<BufferMut<'a>>,
}

impl<'a> QuantizationArgs<'a> {
    /// Operands of every run. Methods add the other operands.
    pub fn new(x: impl Into<BufferRef<'a>>, codes: impl Into<BufferMut<'a>>) -> Self {
        Self { x: x.into(), factor: None, codes: codes.into(), scales: None, token_factors: None, sums: None }
    }

    setters! {
        /// With the factor of X: see [`Quantization::given_factor`].
        factor: BufferRef,
        /// With the scales.
        scales: BufferMut,
        /// With the factors of tokens.
        token_factors: BufferMut,
        /// With the sums.
        sums: BufferMut,
    }
}

impl Context {
    /// Chooses a kernel for `quantization` and makes it ready. A
    /// known problem costs a lookup, as with [`Context::plan`].
    ///
    /// # Errors
    /// When the quantization is invalid or no family serves it, or
    /// when the kernel cannot be prepared.
    pub fn plan_quantization(&self, quantization: &Quantization) -> Result<QuantizationPlan, Error> {
        Planned::new(self, quantization.check()?, Preferences::default())
    }

    /// Record of the choice of [`Context::plan_quantization`]: see
    /// [`Context::explain`].
    ///
    /// # Errors
    /// When the quantization is invalid.
    pub fn explain_quantization(&self, quantization: &Quantization) -> Result<PlanRecord, Error> {
        explain(self, &quantization.check()?, &Preferences::default())
    }
}

chosen_by_traffic!(CheckedQuantize);

impl Recorded for CheckedQuantize {}

impl Bound for CheckedQuantize {
    fn wanted(&self, operand: QuantizeOperand, _: bool) -> Wanted {
        use QuantizeOperand as O;
        let planes = PlaneExtents::of(self);
        let why = "the format has such a plane";
        match operand {
            O::X => Wanted::always("X", Extent::of(&self.x, self.rows, self.columns)),
            O::Factor => {
                let extent = (self.parts.factor == XFactor::Given).then(|| Extent::of_values(DType::F32, 1));
                Wanted::optional("factor", extent, "it is given for all of X")
            }
            O::Codes => Wanted::always("codes", planes.codes),
            O::Scales => Wanted::optional("scales", planes.scales, why),
            O::TokenFactors => Wanted::optional("token factors", planes.token_factors, why),
            O::Sums => Wanted::optional("sums", planes.sums, why),
        }
    }
}

impl QuantizationPlan {
    /// The format of the result.
    pub fn format(&self) -> XFormat {
        self.op().format
    }

    /// The planes of the result.
    pub fn parts(&self) -> &XParts {
        &self.op().parts
    }

    /// Submits the quantization to `stream`. A run allocates nothing,
    /// waits for nothing and takes no lock. A CUDA graph may capture
    /// it.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, unexpected
    /// or on another device; or on a device error. Nothing is written
    /// then.
    pub fn run(&self, stream: &Stream, args: QuantizationArgs<'_>) -> Result<(), Error> {
        use QuantizeOperand as O;
        let QuantizationArgs { x, factor, codes, scales, token_factors, sums } = args;
        let mut run = self.start(stream)?;
        run.read(O::X, x)?;
        run.read(O::Factor, factor)?;
        run.write(O::Codes, codes)?;
        run.write(O::Scales, scales)?;
        run.write(O::TokenFactors, token_factors)?;
        run.write(O::Sums, sums)?;
        run.launch(stream)
    }
}
