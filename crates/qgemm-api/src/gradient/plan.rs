//! [`GradientPlan`]: ready kernels of one gradient and one
//! weight.

use std::fmt;

use qgemm_formats::ElementType;
use qgemm_hal::{
    BufferMut, BufferRef, Device, DeviceId, KernelId, MatmulOperand, MatmulPlan as MatmulLaunch, Stream, UnpackOperand,
    WorkspaceLayout,
};
use qgemm_sched::TunedTable;

use super::description::Gradient;
use super::part::{GradientInputs, Part, ReadyPart, Scratch};
use super::through::{GradientWeight, ThroughShape};
use crate::error::Error;
use crate::operand::{Checks, Extent};
use crate::plan_cache::PlanCaches;
use crate::workspace::Workspace;

/// Alignment of workspace regions, in bytes.
const ALIGNMENT: usize = 256;

/// Ready kernels of one [`Gradient`] for weights of one shape,
/// from
/// [`Context::plan_gradient`](crate::Context::plan_gradient). Its
/// text lists the launches of a run: a decoding kernel and the
/// product, for each part of the weight.
#[derive(Debug)]
pub struct GradientPlan {
    weight: ThroughShape,
    tokens: usize,
    device: DeviceId,
    dy: Extent,
    dx: Extent,
    parts: Vec<ReadyPart>,
    scratch: Scratch,
    traffic: f64,
}

/// Operands of one run of a [`GradientPlan`].
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
    /// Gradient by the layer's output, `[tokens, out_features]`; for
    /// a gated pair `[tokens, 2 · out_features]`.
    pub dy: BufferRef<'a>,
    /// Weight of the layer, of the planned shape, or its experts.
    pub weight: GradientWeight<'a>,
    /// Gradient by the layer's input, `[tokens, in_features]`; an
    /// input, too, where it [accumulates](Gradient::accumulate).
    pub dx: BufferMut<'a>,
    /// Offsets of the rows of each expert, and their end: one `u32`
    /// more than experts. Rows outside dX, or before the rows of a
    /// preceding expert, belong to no expert.
    pub offsets: Option<BufferRef<'a>>,
    /// Workspace of at least [`GradientPlan::workspace_bytes`], when
    /// that is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

impl<'a> GradientArgs<'a> {
    /// Operands of every run.
    pub fn new(
        dy: impl Into<BufferRef<'a>>,
        weight: impl Into<GradientWeight<'a>>,
        dx: impl Into<BufferMut<'a>>,
    ) -> Self {
        Self { dy: dy.into(), weight: weight.into(), dx: dx.into(), offsets: None, workspace: None }
    }

    /// With the offsets of experts' rows.
    pub fn offsets(mut self, offsets: impl Into<BufferRef<'a>>) -> Self {
        self.offsets = Some(offsets.into());
        self
    }

    /// With a workspace.
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
        weight: &ThroughShape,
        gradient: &Gradient,
    ) -> Result<Self, Error> {
        let each = weight.each();
        Checks(device.info().id).device("weight", each.device)?;
        let parts = gradient.check(weight)?;
        let _span = tracing::info_span!("plan", tokens = gradient.tokens(), n = each.n, k = each.k).entered();
        let whole = gradient.whole(weight)?;
        let ready: Vec<ReadyPart> =
            parts.iter().map(|part| ReadyPart::new(device, tuned, caches, part)).collect::<Result<_, Error>>()?;
        let most = |bytes: fn(&ReadyPart) -> usize| ready.iter().map(bytes).max().unwrap_or(0);
        let products = most(ReadyPart::workspace_bytes);
        let (decoded, sums) = (most(|ready| ready.of.decoded_bytes()), most(|ready| ready.of.sums_bytes()));
        Ok(Self {
            weight: *weight,
            tokens: gradient.tokens(),
            device: device.info().id,
            dy: Extent::of_batch(&whole.a, 1, whole.m, whole.k),
            dx: Extent::of_batch(&whole.d, 1, whole.m, whole.n),
            scratch: Scratch::new(products, decoded, sums),
            traffic: parts.iter().map(Part::traffic).sum(),
            parts: ready,
        })
    }

    /// Bytes of workspace of a run; 0 where there is nothing to
    /// write.
    pub fn workspace_bytes(&self) -> usize {
        if self.parts.is_empty() { 0 } else { self.scratch.sums.end }
    }

    /// Number of parts of the weight.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Name of the product's kernel; `none` where there is nothing to
    /// write.
    pub fn kernel_name(&self) -> &str {
        self.parts.first().and_then(|part| part.products.first()).map_or("none", |ready| ready.sequence.name())
    }

    /// Identity of the product's kernel; `None` where there is
    /// nothing to write.
    pub fn kernel_id(&self) -> Option<KernelId> {
        self.matmul().map(|plan| plan.config.kernel)
    }

    /// Chosen launch of the product; `None` where there is nothing to
    /// write.
    pub fn matmul(&self) -> Option<&MatmulLaunch> {
        self.parts.first().and_then(|part| part.products.first()).map(|ready| &ready.plan)
    }

    /// Minimum memory traffic of a run, in bytes, with decoded parts
    /// of the weight.
    pub fn bytes(&self) -> f64 {
        self.traffic
    }

    /// Device of the plan.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Submits the gradient to `stream`. On CUDA, a run allocates
    /// nothing, waits for nothing and takes no lock. A CUDA graph may
    /// capture it.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned or on
    /// another device; when the weight differs from the planned one;
    /// or on a device error. Nothing is written then.
    pub fn run(&self, stream: &Stream, args: GradientArgs<'_>) -> Result<(), Error> {
        let GradientArgs { dy, weight, dx, offsets, workspace } = args;
        self.run_within(stream, GradientInputs { dy, weight, offsets }, dx, workspace.map(Workspace::view))
    }

    /// [`GradientPlan::run`] with a workspace inside another buffer.
    pub(crate) fn run_within(
        &self,
        stream: &Stream,
        from: GradientInputs<'_>,
        mut dx: BufferMut<'_>,
        workspace: Option<BufferMut<'_>>,
    ) -> Result<(), Error> {
        let checks = Checks(self.device);
        checks.device("stream", stream.device())?;
        let given = from.weight.shape();
        checks.device("weight", given.each().device)?;
        if !self.weight.serves(&given) {
            let (expected, got) = (self.weight.to_string(), given.to_string());
            return Err(Error::WrongWeight { expected, got });
        }
        checks.view("dY", from.dy, self.dy)?;
        checks.view("dX", dx.view(), self.dx)?;
        let of_experts = self.weight.experts().map(|experts| Extent::of_values(ElementType::Int32, experts + 1));
        checks.optional("offsets", from.offsets, of_experts, "rows are sorted by expert")?;
        let why = "the weight is decoded there";
        let Some(mut workspace) = checks.workspace(workspace, self.workspace_bytes(), why)? else { return Ok(()) };
        let _span = tracing::trace_span!("launch", kernel = self.kernel_name()).entered();
        for part in &self.parts {
            part.run(stream, &from, &mut dx, &mut workspace, &self.scratch)?;
        }
        Ok(())
    }
}

impl Scratch {
    /// Regions after the counters of every workspace and the
    /// workspace of products.
    pub(super) fn new(products: usize, decoded: usize, sums: usize) -> Self {
        let start = products.max(WorkspaceLayout::RESERVED).next_multiple_of(ALIGNMENT);
        let end = start + decoded;
        let behind = if sums == 0 { end } else { end.next_multiple_of(ALIGNMENT) };
        Self { decoded: start..end, sums: behind..behind + sums }
    }
}

/// Launches of a run, with kernel, geometry and operands of the
/// first part.
impl fmt::Display for GradientPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tokens, parts, bytes) = (self.tokens, self.parts.len(), self.workspace_bytes());
        write!(f, "gradient of {tokens} tokens through {}: {parts} parts, {bytes} bytes of workspace", self.weight)?;
        let Some(part) = self.parts.first() else { return Ok(()) };
        writeln!(f, ", the first of them:")?;
        if let Some(ready) = &part.unpack {
            ready.sequence.display_with(&[UnpackOperand::W, UnpackOperand::D]).fmt(f)?;
        }
        for ready in &part.products {
            ready.sequence.display_with(&[MatmulOperand::A, MatmulOperand::B, MatmulOperand::D]).fmt(f)?;
        }
        Ok(())
    }
}
