//! [`GradientPlan`]: kernels made ready for one gradient and one weight.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use qgemm_hal::{
    BufferMut, BufferRef, CheckedMatmul, CheckedUnpack, Device, DeviceId, KernelId, MatmulOperand,
    MatmulPlan as MatmulLaunch, Operands, Operation, Stream, UnpackOperand, WorkspaceLayout,
};
use qgemm_sched::{TunedTable, matmul, unpack};

use super::description::{Gradient, Part, outputs};
use crate::error::Error;
use crate::operand::{Checks, Extent};
use crate::plan_cache::{PlanCaches, Ready};
use crate::weight::{Weight, WeightShape};
use crate::workspace::Workspace;

/// What parts of a workspace are aligned to.
const ALIGNMENT: usize = 256;

/// Kernels chosen and made ready for one [`Gradient`] and weights like one; made by
/// [`Context::plan_gradient`](crate::Context::plan_gradient). Its text says what a run launches: for each part of the weight a kernel
/// that decodes it, and the product.
#[derive(Debug)]
pub struct GradientPlan {
    weight: WeightShape,
    tokens: usize,
    device: DeviceId,
    dy: Extent,
    dx: Extent,
    parts: Vec<ReadyPart>,
    /// Where decoded parts of the weight lie in the workspace.
    scratch: Range<usize>,
    traffic: f64,
}

/// A part with its kernels.
#[derive(Debug)]
struct ReadyPart {
    /// What is computed.
    of: Part,
    unpack: Option<Arc<Ready<CheckedUnpack>>>,
    matmul: Arc<Ready<CheckedMatmul>>,
    /// Where its columns of dX begin, in bytes.
    dx_start: usize,
    /// Bytes of its numbers.
    decoded_bytes: usize,
}

/// What one run of a [`GradientPlan`] reads and writes.
///
/// ```
/// use qgemm_api::{Context, DType, Gradient, GradientArgs};
///
/// let ctx = Context::open("cpu")?;
/// // W of two output features and 32 input features, in Q8_0.
/// let values: Vec<f32> = (0..64).map(|i| if i < 32 { 1.0 } else { -2.0 }).collect();
/// let weight = ctx.load(&qgemm_api::quantize(&values, 2, 32, "q8_0".parse()?)?.0)?;
/// let plan = ctx.plan_gradient(&weight, &Gradient::new(1, DType::F32, DType::F32))?;
/// let dy = ctx.upload(&DType::F32.encode(&[3.0, 0.5]))?;
/// let (mut dx, mut workspace) = (ctx.allocate(32 * 4)?, ctx.workspace(plan.workspace_bytes())?);
/// plan.run(&ctx.default_stream(), GradientArgs::new(&dy, &weight, &mut dx).workspace(&mut workspace))?;
/// let dx = DType::F32.decode(&ctx.download(&dx)?);
/// assert!(dx.iter().all(|dx| (dx - 2.0).abs() < 1e-2), "{dx:?}");
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct GradientArgs<'a> {
    /// The gradient by the layer's output, `[tokens, out_features]`, of a gated pair `[tokens, 2 · out_features]`.
    pub dy: BufferRef<'a>,
    /// The layer's weight, such as the plan was made for.
    pub weight: &'a Weight,
    /// The gradient by its input, `[tokens, in_features]`; read, too, where it [accumulates](Gradient::accumulate).
    pub dx: BufferMut<'a>,
    /// At least [`GradientPlan::workspace_bytes`], when that is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

impl<'a> GradientArgs<'a> {
    /// What every run has.
    pub fn new(dy: impl Into<BufferRef<'a>>, weight: &'a Weight, dx: impl Into<BufferMut<'a>>) -> Self {
        Self { dy: dy.into(), weight, dx: dx.into(), workspace: None }
    }

    /// With scratch memory.
    pub fn workspace(mut self, workspace: &'a mut Workspace) -> Self {
        self.workspace = Some(workspace);
        self
    }
}

impl GradientPlan {
    pub(crate) fn new(
        device: &dyn Device,
        tuned: &TunedTable,
        caches: &PlanCaches,
        weight: &WeightShape,
        gradient: &Gradient,
    ) -> Result<Self, Error> {
        Checks(device.info().id).device("weight", weight.device)?;
        let parts = gradient.check(weight)?;
        let _span = tracing::info_span!("plan", tokens = gradient.tokens(), n = weight.n, k = weight.k).entered();
        let whole = parts.first().map(|part| &part.matmul);
        let none = Extent::of_bytes(0, 1);
        let ready: Vec<ReadyPart> =
            parts.iter().map(|part| ReadyPart::new(device, tuned, caches, part)).collect::<Result<_, Error>>()?;
        let products = ready.iter().map(|part| part.matmul.plan.workspace.bytes).max().unwrap_or(0);
        let decoded = ready.iter().map(|part| part.decoded_bytes).max().unwrap_or(0);
        let traffic = |part: &Part| part.matmul.traffic() + part.unpack.as_ref().map_or(0.0, Operation::traffic);
        Ok(Self {
            weight: *weight,
            tokens: gradient.tokens(),
            device: device.info().id,
            dy: whole.map_or(none, |op| Extent::of_batch(&op.a, op.a.dtype.bytes(), 1, op.m, outputs(weight))),
            dx: whole.map_or(none, |op| Extent::of_batch(&op.d, op.d.dtype.bytes(), 1, op.m, weight.k)),
            scratch: scratch(products, decoded),
            traffic: parts.iter().map(traffic).sum(),
            parts: ready,
        })
    }

    /// Bytes of scratch memory that a run needs; 0 where there is nothing to write.
    pub fn workspace_bytes(&self) -> usize {
        if self.parts.is_empty() { 0 } else { self.scratch.end }
    }

    /// Parts that the weight is cut into.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Name of the product's kernel; `none` where there is nothing to write.
    pub fn kernel_name(&self) -> &str {
        self.parts.first().map_or("none", |part| part.matmul.sequence.name())
    }

    /// Identity of the product's kernel; `None` where there is nothing to write.
    pub fn kernel_id(&self) -> Option<KernelId> {
        self.matmul().map(|plan| plan.config.kernel)
    }

    /// What was chosen for the product; `None` where there is nothing to write.
    pub fn matmul(&self) -> Option<&MatmulLaunch> {
        self.parts.first().map(|part| &part.matmul.plan)
    }

    /// Bytes that a run must move at least, decoded parts of the weight among them.
    pub fn bytes(&self) -> f64 {
        self.traffic
    }

    /// The device that the plan is for.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Submits the gradient to `stream`. On CUDA it allocates nothing, waits for nothing and takes no lock, so it may be captured in a CUDA graph.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned or on another device, the weight is another than the plan was made for, or
    /// a device error. Nothing has been written then.
    pub fn run(&self, stream: &Stream, args: GradientArgs<'_>) -> Result<(), Error> {
        let GradientArgs { dy, weight, dx, workspace } = args;
        self.run_within(stream, dy, weight, dx, workspace.map(Workspace::view))
    }

    /// [`GradientPlan::run`] with a workspace that may be part of another buffer.
    pub(crate) fn run_within(
        &self,
        stream: &Stream,
        dy: BufferRef<'_>,
        weight: &Weight,
        mut dx: BufferMut<'_>,
        workspace: Option<BufferMut<'_>>,
    ) -> Result<(), Error> {
        let checks = Checks(self.device);
        checks.device("stream", stream.device())?;
        if !self.weight.serves(weight.shape()) {
            let (expected, got) = (self.weight.to_string(), weight.shape().to_string());
            return Err(Error::WrongWeight { expected, got });
        }
        checks.view("dY", dy, self.dy)?;
        checks.view("dX", dx.view(), self.dx)?;
        let why = "the weight is decoded there";
        let Some(mut workspace) = checks.workspace(workspace, self.workspace_bytes(), why)? else { return Ok(()) };
        let _span = tracing::trace_span!("launch", kernel = self.kernel_name()).entered();
        for part in &self.parts {
            let (mut products, mut decoded) = workspace.reborrow().split_at(self.scratch.start)?;
            if let (Some(op), Some(ready)) = (&part.of.unpack, &part.unpack) {
                let mut operands = Operands::new();
                weight.give_to_unpack(&mut operands);
                operands.write(UnpackOperand::D, decoded.reborrow().slice(0..part.decoded_bytes)?);
                ready.sequence.run_for(op, stream, operands)?;
            }
            let mut operands = Operands::new();
            operands.read(MatmulOperand::A, dy);
            operands.read(MatmulOperand::B, decoded.view().slice(0..part.decoded_bytes)?);
            let len = dx.view().len();
            operands.write(MatmulOperand::D, dx.reborrow().slice(part.dx_start..len)?);
            let bytes = part.matmul.plan.workspace.bytes;
            if bytes > 0 {
                operands.write(MatmulOperand::Workspace, products.reborrow().slice(0..bytes)?);
            }
            part.matmul.sequence.run_for(&part.of.matmul, stream, operands)?;
        }
        Ok(())
    }
}

impl ReadyPart {
    fn new(device: &dyn Device, tuned: &TunedTable, caches: &PlanCaches, part: &Part) -> Result<Self, Error> {
        let (info, catalog) = (device.info(), device.catalog());
        let make_unpack = |op: &CheckedUnpack| {
            let make = || {
                let (family, plan) = unpack::choose(op, info, catalog.unpack)?;
                Ok::<_, Error>(Ready { family, plan, sequence: family.prepare(device, op, &plan)? })
            };
            caches.unpack.get_or_make(op, make)
        };
        let op = &part.matmul;
        let make_matmul = || {
            let (family, plan) = matmul::choose(op, info, catalog.matmul, tuned)?;
            Ok::<_, Error>(Ready {
                family,
                plan,
                sequence: family.prepare(device, op, &plan)?.with_math(plan.config.math),
            })
        };
        Ok(Self {
            of: part.clone(),
            unpack: part.unpack.as_ref().map(make_unpack).transpose()?,
            matmul: caches.matmul.get_or_make(op, make_matmul)?,
            dx_start: part.first * op.d.dtype.bytes(),
            decoded_bytes: part.unpack.as_ref().map_or(0, decoded_bytes),
        })
    }
}

/// Where decoded parts of the weight lie: behind the counters of products, which stand at the start of every workspace, and behind what
/// the products need.
pub(super) fn scratch(products: usize, decoded: usize) -> Range<usize> {
    let start = products.max(WorkspaceLayout::RESERVED).next_multiple_of(ALIGNMENT);
    start..start + decoded
}

/// Bytes of a part as plain numbers.
pub(super) fn decoded_bytes(op: &CheckedUnpack) -> usize {
    op.d.extent(op.features, op.columns()).unwrap_or(u64::MAX) as usize * op.d.dtype.bytes()
}

/// What was chosen, and the launches of a run: of the first part with its kernels, geometry and operands.
impl fmt::Display for GradientPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tokens, parts, bytes) = (self.tokens, self.parts.len(), self.workspace_bytes());
        write!(f, "gradient of {tokens} tokens through {}: {parts} parts, {bytes} bytes of workspace", self.weight)?;
        let Some(part) = self.parts.first() else { return Ok(()) };
        writeln!(f, ", the first of them:")?;
        if let Some(ready) = &part.unpack {
            ready.sequence.display_with(&[UnpackOperand::W, UnpackOperand::D]).fmt(f)?;
        }
        part.matmul.sequence.display_with(&[MatmulOperand::A, MatmulOperand::B, MatmulOperand::D]).fmt(f)
    }
}
