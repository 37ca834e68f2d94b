//! [`ConversionPlan`]: a kernel made ready for one conversion.

use std::fmt;
use std::sync::Arc;

use qgemm_formats::{DType, ElementType};
use qgemm_hal::{
    BufferMut, BufferRef, CheckedConvert, ConvertOperand, ConvertPlan, Device, DeviceId, KernelId, LaunchSequence,
    Operands, Operation, Stream,
};
use qgemm_sched::memory_bound::choose;

use super::conversion::Conversion;
use crate::error::Error;
use crate::operand::{Checks, Extent};
use crate::plan_cache::{PlanCaches, Ready};

/// A kernel chosen and made ready for one [`Conversion`]; made by
/// [`Context::plan_conversion`](crate::Context::plan_conversion). Its text says what a run launches.
#[derive(Debug)]
pub struct ConversionPlan {
    op: CheckedConvert,
    device: DeviceId,
    x: Extent,
    d: Extent,
    order: Option<Extent>,
    row_factors: Option<Extent>,
    /// `None` where there is nothing to write.
    ready: Option<Arc<Ready<CheckedConvert>>>,
}

/// What one run of a [`ConversionPlan`] reads and writes.
///
/// ```
/// use qgemm_api::{Context, Conversion, ConversionArgs, DType, NO_COLUMN};
///
/// let ctx = Context::open("cpu")?;
/// // Three columns of X, the last one first, and one of zeros.
/// let plan = ctx.plan_conversion(&Conversion::new(1, 3, DType::F32, DType::F16).gathered(4))?;
/// let x = ctx.upload(&DType::F32.encode(&[0.5, 2.0, -3.0]))?;
/// let order = ctx.upload(&[2, 0, NO_COLUMN, 1].map(u32::to_le_bytes).concat())?;
/// let mut d = ctx.allocate(4 * DType::F16.bytes())?;
/// let args = ConversionArgs::new(&x, &mut d).order(&order);
/// plan.run(&ctx.default_stream(), args)?;
/// assert_eq!(DType::F16.decode(&ctx.download(&d)?), [-3.0, 0.5, 0.0, 2.0]);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct ConversionArgs<'a> {
    /// The matrix.
    pub x: BufferRef<'a>,
    /// The result.
    pub d: BufferMut<'a>,
    /// A `u32` for every column of D, when the conversion is [gathered](Conversion::gathered).
    pub order: Option<BufferRef<'a>>,
    /// Written: an f32 for every row, when the conversion has [row factors](Conversion::row_factors).
    pub row_factors: Option<BufferMut<'a>>,
}

impl<'a> ConversionArgs<'a> {
    /// What every run has. Methods add the other operands, and where they are optional to the caller, too, the fields can
    /// be set.
    pub fn new(x: impl Into<BufferRef<'a>>, d: impl Into<BufferMut<'a>>) -> Self {
        Self { x: x.into(), d: d.into(), order: None, row_factors: None }
    }

    /// With the order of [`Conversion::gathered`].
    pub fn order(mut self, order: impl Into<BufferRef<'a>>) -> Self {
        self.order = Some(order.into());
        self
    }

    /// With the factors of [`Conversion::row_factors`].
    pub fn row_factors(mut self, row_factors: impl Into<BufferMut<'a>>) -> Self {
        self.row_factors = Some(row_factors.into());
        self
    }
}

impl ConversionPlan {
    pub(crate) fn new(device: &dyn Device, caches: &PlanCaches, conversion: &Conversion) -> Result<Self, Error> {
        let op = conversion.check()?;
        let make = || {
            let CheckedConvert { rows, columns, x, d, .. } = op;
            let _span = tracing::info_span!("plan", rows, columns, from = %x.dtype, to = %d.dtype).entered();
            let (family, plan) = choose(&op, device.info(), device.catalog().convert)?;
            Ok::<_, Error>(Ready { family, plan, sequence: family.prepare(device, &op, &plan)? })
        };
        Ok(Self {
            device: device.info().id,
            x: Extent::of(&op.x, op.rows, op.columns),
            d: Extent::of(&op.d, op.rows, op.d_columns),
            order: op.gathers.then(|| Extent::of_values(ElementType::Int32, op.d_columns)),
            row_factors: op.row_factors.then(|| Extent::of_values(DType::F32, op.rows)),
            ready: if op.is_nothing() { None } else { Some(caches.convert.get_or_make(&op, make)?) },
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
    pub fn launch(&self) -> Option<&ConvertPlan> {
        self.ready.as_ref().map(|ready| &ready.plan)
    }

    /// The kernels that a run launches, in order; `None` where there is nothing to write.
    pub fn sequence(&self) -> Option<&LaunchSequence> {
        self.ready.as_ref().map(|ready| &ready.sequence)
    }

    /// The validated operation.
    pub fn op(&self) -> &CheckedConvert {
        &self.op
    }

    /// Bytes that a run must move at least: those it reads and those it writes, once each.
    pub fn bytes(&self) -> u64 {
        self.op.traffic() as u64
    }

    /// The device that the plan is for.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Submits the conversion to `stream`. What [`Plan::run`](crate::Plan::run) says of allocations, waiting and locks is true here, too: it may be
    /// captured in a CUDA graph.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, on another device or not part of the conversion, or a device error.
    /// Nothing has been written then.
    pub fn run(&self, stream: &Stream, args: ConversionArgs<'_>) -> Result<(), Error> {
        let ConversionArgs { x, d, order, row_factors } = args;
        let checks = Checks(self.device);
        checks.device("stream", stream.device())?;
        checks.view("X", x, self.x)?;
        checks.view("D", d.view(), self.d)?;
        let order = checks.optional("column order", order, self.order, "the conversion gathers columns")?;
        let row_factors =
            checks.optional("row factors", row_factors, self.row_factors, "the conversion multiplies rows")?;
        let Some(ready) = &self.ready else { return Ok(()) };
        let mut operands = Operands::new();
        operands.read(ConvertOperand::X, x);
        operands.read_if_any(ConvertOperand::Order, order);
        operands.write(ConvertOperand::D, d);
        if let Some(row_factors) = row_factors {
            operands.write(ConvertOperand::RowFactors, row_factors);
        }
        let _span = tracing::trace_span!("launch", kernel = self.kernel_name()).entered();
        Ok(ready.sequence.run_for(&self.op, stream, operands)?)
    }
}

/// What was chosen, and the launches of a run: each with its kernel, geometry and operands.
impl fmt::Display for ConversionPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CheckedConvert { rows, d_columns, x, d, .. } = self.op;
        let (name, from, to) = (self.kernel_name(), x.dtype, d.dtype);
        write!(f, "{name} for {rows} x {d_columns} from {from} to {to} on {}", self.device)?;
        let Some(Ready { plan, sequence, .. }) = self.ready.as_deref() else { return Ok(()) };
        writeln!(f, ", expected to take {:.1} µs", plan.estimate * 1e6)?;
        sequence.display_with(&self.op.operands()).fmt(f)
    }
}
