//! [`QuantizationPlan`]: a kernel made ready for one quantization.

use std::fmt;
use std::sync::Arc;

use qgemm_formats::{DType, ElementType, XFactor, XFormat, XParts};
use qgemm_hal::{
    BufferMut, BufferRef, CheckedQuantize, Device, DeviceId, KernelId, LaunchSequence, Operands, Operation,
    QuantizeOperand, QuantizePlan, Stream,
};
use qgemm_sched::memory_bound::choose;

use super::description::Quantization;
use crate::error::Error;
use crate::operand::{Checks, Extent, WIDE_ACCESS};
use crate::plan_cache::{PlanCaches, Ready};

/// A kernel chosen and made ready for one [`Quantization`]; made by
/// [`Context::plan_quantization`](crate::Context::plan_quantization). Its text says what a run launches.
#[derive(Debug)]
pub struct QuantizationPlan {
    op: CheckedQuantize,
    device: DeviceId,
    x: Extent,
    planes: PlaneExtents,
    /// `None` where there is nothing to write.
    ready: Option<Arc<Ready<CheckedQuantize>>>,
}

/// What the planes of an X must hold.
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
            // Checked to fit the address space.
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

/// What one run of a [`QuantizationPlan`] reads and writes; [`QuantizedX::args`](crate::QuantizedX::args) makes it.
#[derive(Debug)]
#[non_exhaustive]
pub struct QuantizationArgs<'a> {
    /// The matrix.
    pub x: BufferRef<'a>,
    /// An f32 for all of X, where the format takes one ([`XFactor::Given`]).
    pub factor: Option<BufferRef<'a>>,
    /// Written: the codes. The address is a multiple of 16.
    pub codes: BufferMut<'a>,
    /// Written, where the format has scales. The address is a multiple of 4.
    pub scales: Option<BufferMut<'a>>,
    /// Written, where tokens have factors: an f32 each.
    pub token_factors: Option<BufferMut<'a>>,
    /// Written, where the format has sums.
    pub sums: Option<BufferMut<'a>>,
}

impl<'a> QuantizationArgs<'a> {
    /// What every run has; the other operands are fields to set.
    pub fn new(x: impl Into<BufferRef<'a>>, codes: impl Into<BufferMut<'a>>) -> Self {
        Self { x: x.into(), factor: None, codes: codes.into(), scales: None, token_factors: None, sums: None }
    }

    /// With the factor of all of X: see [`Quantization::given_factor`].
    pub fn factor(mut self, factor: impl Into<BufferRef<'a>>) -> Self {
        self.factor = Some(factor.into());
        self
    }
}

impl QuantizationPlan {
    pub(crate) fn new(device: &dyn Device, caches: &PlanCaches, quantization: &Quantization) -> Result<Self, Error> {
        let op = quantization.check()?;
        let make = || {
            let CheckedQuantize { rows, columns, x, format, .. } = op;
            let _span = tracing::info_span!("plan", rows, columns, from = %x.dtype, to = %format).entered();
            let (family, plan) = choose(&op, device.info(), device.catalog().quantize)?;
            Ok::<_, Error>(Ready { family, plan, sequence: family.prepare(device, &op, &plan)? })
        };
        Ok(Self {
            device: device.info().id,
            x: Extent::of(&op.x, op.rows, op.columns),
            planes: PlaneExtents::of(&op),
            ready: if op.is_nothing() { None } else { Some(caches.quantize.get_or_make(&op, make)?) },
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
    pub fn launch(&self) -> Option<&QuantizePlan> {
        self.ready.as_ref().map(|ready| &ready.plan)
    }

    /// The kernels that a run launches, in order; `None` where there is nothing to write.
    pub fn sequence(&self) -> Option<&LaunchSequence> {
        self.ready.as_ref().map(|ready| &ready.sequence)
    }

    /// The validated operation.
    pub fn op(&self) -> &CheckedQuantize {
        &self.op
    }

    /// The format of the result.
    pub fn format(&self) -> XFormat {
        self.op.format
    }

    /// The planes of the result.
    pub fn parts(&self) -> &XParts {
        &self.op.parts
    }

    /// Bytes that a run must move at least: those it reads and those it writes, once each.
    pub fn bytes(&self) -> u64 {
        self.op.traffic() as u64
    }

    /// The device that the plan is for.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Submits the quantization to `stream`. Allocates nothing, waits for nothing and takes no lock, so it may be captured in a
    /// CUDA graph.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, on another device or not part of the format, or a device error.
    /// Nothing has been written then.
    pub fn run(&self, stream: &Stream, args: QuantizationArgs<'_>) -> Result<(), Error> {
        use QuantizeOperand as O;
        let QuantizationArgs { x, factor, codes, scales, token_factors, sums } = args;
        let checks = Checks(self.device);
        let planes = &self.planes;
        checks.device("stream", stream.device())?;
        checks.view("X", x, self.x)?;
        checks.view("codes", codes.view(), planes.codes)?;
        let of_factor = (self.op.parts.factor == XFactor::Given).then(|| Extent::of_values(DType::F32, 1));
        let factor = checks.optional("factor", factor, of_factor, "it is given for all of X")?;
        let why = "the format has such a plane";
        let scales = checks.optional("scales", scales, planes.scales, why)?;
        let token_factors = checks.optional("token factors", token_factors, planes.token_factors, why)?;
        let sums = checks.optional("sums", sums, planes.sums, why)?;
        let Some(ready) = &self.ready else { return Ok(()) };
        let mut operands = Operands::new();
        operands.read(O::X, x);
        operands.read_if_any(O::Factor, factor);
        operands.write(O::Codes, codes);
        for (operand, plane) in [(O::Scales, scales), (O::TokenFactors, token_factors), (O::Sums, sums)] {
            if let Some(plane) = plane {
                operands.write(operand, plane);
            }
        }
        let _span = tracing::trace_span!("launch", kernel = self.kernel_name()).entered();
        Ok(ready.sequence.run_for(&self.op, stream, operands)?)
    }
}

/// What was chosen, and the launches of a run: each with its kernel, geometry and operands.
impl fmt::Display for QuantizationPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CheckedQuantize { rows, columns, x, format, .. } = self.op;
        let (name, from) = (self.kernel_name(), x.dtype);
        write!(f, "{name} for {rows} x {columns} from {from} to {format} on {}", self.device)?;
        let Some(Ready { plan, sequence, .. }) = self.ready.as_deref() else { return Ok(()) };
        writeln!(f, ", expected to take {:.1} µs", plan.estimate * 1e6)?;
        sequence.display_with(&self.op.operands()).fmt(f)
    }
}
