//! [`MatmulPlan`]: a kernel made ready for one product.

use std::fmt;
use std::sync::Arc;

use qgemm_formats::{DType, ElementType, XFormat};
use qgemm_hal::{
    BufferMut, BufferRef, CheckedMatmul, Device, DeviceId, KernelId, LaunchSequence, MatmulOperand,
    MatmulPlan as Launch, Operands, Operation, Stream,
};
use qgemm_sched::matmul::{candidates, choose};
use qgemm_sched::{Offered, TunedTable};

use super::description::Matmul;
use crate::error::Error;
use crate::operand::{Checks, Extent};
use crate::plan_cache::{PlanCaches, Ready};
use crate::quantization::QuantizedX;
use crate::workspace::Workspace;

/// A kernel chosen and made ready for one [`Matmul`]; made by [`Context::plan_matmul`](crate::Context::plan_matmul). Its text says what
/// a run launches.
#[derive(Debug)]
pub struct MatmulPlan {
    op: CheckedMatmul,
    device: DeviceId,
    /// `None` where there is nothing to write.
    ready: Option<Arc<Ready<CheckedMatmul>>>,
}

/// What one run of a [`MatmulPlan`] reads and writes.
///
/// ```
/// use qgemm_api::{Context, DType, Matmul, MatmulArgs};
///
/// let ctx = Context::open("cpu")?;
/// // A gradient, dW += dYᵀ·X: of three rows of dY, with two columns, and of X, with one.
/// let plan = ctx.plan_matmul(&Matmul::new([2, 1, 3], DType::BF16, DType::BF16, DType::F32).a_transposed().accumulate(1.0))?;
/// let dy = ctx.upload(&DType::BF16.encode(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))?;
/// let x = ctx.upload(&DType::BF16.encode(&[1.0, 0.5, -1.0]))?;
/// let mut dw = ctx.upload(&DType::F32.encode(&[10.0, 20.0]))?;
/// plan.run(&ctx.default_stream(), MatmulArgs::new(&dy, &x, &mut dw))?;
/// assert_eq!(DType::F32.decode(&ctx.download(&dw)?), [7.5, 18.0]);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct MatmulArgs<'a> {
    /// The left factors.
    pub a: BufferRef<'a>,
    /// The right factors.
    pub b: BufferRef<'a>,
    /// The results; read, too, where the product [accumulates](Matmul::accumulate).
    pub d: BufferMut<'a>,
    /// The factor of all of A, an f32, when [it has one](Matmul::a_scaled), or the scales of its blocks.
    pub a_scale: Option<BufferRef<'a>>,
    /// That of B.
    pub b_scale: Option<BufferRef<'a>>,
    /// C, when the product adds one.
    pub c: Option<BufferRef<'a>>,
    /// Bias, when the product adds one.
    pub bias: Option<BufferRef<'a>>,
    /// Where each product's part of K, or its rows, begin, and the last one's end: `u32` each, one more than products, when the products
    /// are [by parts of K](Matmul::k_grouped) or [by groups of rows](Matmul::rows_grouped).
    pub offsets: Option<BufferRef<'a>>,
    /// At least [`MatmulPlan::workspace_bytes`], when that is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

impl<'a> MatmulArgs<'a> {
    /// What every run has. Methods add the other operands, and where they are optional to the caller, too, the fields can
    /// be set.
    pub fn new(a: impl Into<BufferRef<'a>>, b: impl Into<BufferRef<'a>>, d: impl Into<BufferMut<'a>>) -> Self {
        let (a_scale, b_scale, c, bias, offsets) = (None, None, None, None, None);
        Self { a: a.into(), b: b.into(), d: d.into(), a_scale, b_scale, c, bias, offsets, workspace: None }
    }

    /// Of factors that were quantized to E4M3 with scales of blocks, as [`Matmul::of_quantized`] describes them.
    ///
    /// # Errors
    /// [`Error::BlockScaledProduct`] when one is of another format.
    pub fn of_quantized(a: &'a QuantizedX, b: &'a QuantizedX, d: impl Into<BufferMut<'a>>) -> Result<Self, Error> {
        let scales_of = |x: &'a QuantizedX| {
            x.scales()
                .filter(|_| x.format() == XFormat::E4M3Block)
                .ok_or(Error::BlockScaledProduct { why: "both factors must be quantized to e4m3_1x128" })
        };
        let (a_scales, b_scales) = (scales_of(a)?, scales_of(b)?);
        Ok(Self::new(a.codes(), b.codes(), d).a_scale(a_scales).b_scale(b_scales))
    }

    /// With the factor of all of A, an f32, or, of codes with scales, an f32 for every 128 values along K: rows of them.
    pub fn a_scale(mut self, scale: impl Into<BufferRef<'a>>) -> Self {
        self.a_scale = Some(scale.into());
        self
    }

    /// The same of B.
    pub fn b_scale(mut self, scale: impl Into<BufferRef<'a>>) -> Self {
        self.b_scale = Some(scale.into());
        self
    }

    /// With C.
    pub fn c(mut self, c: impl Into<BufferRef<'a>>) -> Self {
        self.c = Some(c.into());
        self
    }

    /// With a bias.
    pub fn bias(mut self, bias: impl Into<BufferRef<'a>>) -> Self {
        self.bias = Some(bias.into());
        self
    }

    /// With the offsets of products by parts of K or groups of rows.
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

impl MatmulPlan {
    pub(crate) fn new(
        device: &dyn Device,
        tuned: &TunedTable,
        caches: &PlanCaches,
        matmul: &Matmul,
    ) -> Result<Self, Error> {
        let op = matmul.check()?;
        let make = || {
            let CheckedMatmul { batch, m, n, k, .. } = op;
            let _span = tracing::info_span!("plan", batch, m, n, k).entered();
            let (family, plan) = choose(&op, device.info(), device.catalog().matmul, tuned)?;
            Ready::prepare(device, &op, family, plan, plan.config.math)
        };
        let nothing = op.batch == 0 || op.m == 0 || op.n == 0;
        let ready = if nothing { None } else { Some(caches.matmul.get_or_make(&op, make)?) };
        Ok(Self { device: device.info().id, ready, op })
    }

    pub(crate) fn every_way(device: &dyn Device, tuned: &TunedTable, matmul: &Matmul) -> Result<Vec<Self>, Error> {
        let (op, ways) = Self::ways(device, tuned, matmul)?;
        ways.iter().map(|way| Self::of_way(device, &op, way)).collect()
    }

    /// Candidates of a product, fastest first; empty if D is empty.
    pub(crate) fn ways(
        device: &dyn Device,
        tuned: &TunedTable,
        matmul: &Matmul,
    ) -> Result<(CheckedMatmul, Vec<Offered<'static, CheckedMatmul>>), Error> {
        let op = matmul.check()?;
        let all = || candidates(&op, device.info(), device.catalog().matmul, tuned).offered;
        let ways = if op.is_nothing() { Vec::new() } else { all() };
        Ok((op, ways))
    }

    /// The plan of one of them.
    pub(crate) fn of_way(
        device: &dyn Device,
        op: &CheckedMatmul,
        way: &Offered<'static, CheckedMatmul>,
    ) -> Result<Self, Error> {
        let Offered { family, plan, .. } = *way;
        let ready = Some(Arc::new(Ready::prepare(device, op, family, plan, plan.config.math)?));
        Ok(Self { device: device.info().id, ready, op: op.clone() })
    }

    /// Bytes of workspace that [`MatmulPlan::run`] needs; 0 where K is not shared out, and no launch before the product's rewrites factors.
    pub fn workspace_bytes(&self) -> usize {
        self.launch().map_or(0, |plan| plan.workspace.bytes)
    }

    /// Name of the chosen kernel; `none` where there is nothing to write.
    pub fn kernel_name(&self) -> &str {
        self.sequence().map_or("none", LaunchSequence::name)
    }

    /// Identity of the chosen kernel; `None` where there is nothing to write.
    pub fn kernel_id(&self) -> Option<KernelId> {
        self.launch().map(|plan| plan.config.kernel)
    }

    /// The chosen configuration and its cut; `None` where there is nothing to write.
    pub fn launch(&self) -> Option<&Launch> {
        self.ready.as_ref().map(|ready| &ready.plan)
    }

    /// The kernels that a run launches, in order; `None` where there is nothing to write.
    pub fn sequence(&self) -> Option<&LaunchSequence> {
        self.ready.as_ref().map(|ready| &ready.sequence)
    }

    /// The validated operation.
    pub fn op(&self) -> &CheckedMatmul {
        &self.op
    }

    /// Bytes that a run must move at least: those it reads and those it writes, once each.
    pub fn bytes(&self) -> f64 {
        self.op.traffic()
    }

    /// The device that the plan is for.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Submits the product to `stream`. Allocates nothing, waits for nothing and takes no lock, so it may be captured in a CUDA graph.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, on another device or not part of the product, or a device error.
    /// Nothing has been written then.
    pub fn run(&self, stream: &Stream, mut args: MatmulArgs<'_>) -> Result<(), Error> {
        let workspace = args.workspace.take().map(Workspace::view);
        self.run_within(stream, args, workspace)
    }

    /// [`MatmulPlan::run`] with a workspace that may be part of another buffer, in place of that of `args`.
    pub(crate) fn run_within(
        &self,
        stream: &Stream,
        args: MatmulArgs<'_>,
        workspace: Option<BufferMut<'_>>,
    ) -> Result<(), Error> {
        use MatmulOperand as O;
        let MatmulArgs { a, b, d, a_scale, b_scale, c, bias, offsets, workspace: _ } = args;
        let op = &self.op;
        let checks = Checks(self.device);
        checks.device("stream", stream.device())?;
        checks.view("A", a, Extent::of_batch(&op.a, op.batch, op.m, op.k))?;
        checks.view("B", b, Extent::of_batch(&op.b, op.batch, op.k, op.n))?;
        checks.view("D", d.view(), Extent::of_batch(&op.d, op.batch, op.m, op.n))?;
        let of_c = op.c.as_ref().map(|c| Extent::of_batch(c, op.batch, op.m, op.n));
        let of_scale = |scaled: bool| scaled.then(|| Extent::of_values(DType::F32, 1));
        let of_blocks = |outer: usize, scale_row: u64| {
            let scales = op.scales_extent(outer, scale_row).unwrap_or(u64::MAX) as usize;
            Some(Extent::of_values(DType::F32, scales))
        };
        let (a_scale, b_scale) = if op.has_block_scales() {
            let (of_a, of_b) = (of_blocks(op.m, op.a_scale_row), of_blocks(op.n, op.b_scale_row));
            let why = "blocks have scales";
            (checks.optional("A's scales", a_scale, of_a, why)?, checks.optional("B's scales", b_scale, of_b, why)?)
        } else {
            let (of_a, of_b) = (of_scale(op.a_scaled), of_scale(op.b_scaled));
            let a_scale = checks.optional("A's factor", a_scale, of_a, "all of A has one")?;
            (a_scale, checks.optional("B's factor", b_scale, of_b, "all of B has one")?)
        };
        // With a factor of 0 a C is no operand, and one that is passed all the same is not looked at.
        let c = checks.optional("C", c.filter(|_| of_c.is_some()), of_c, "the product adds C")?;
        let of_bias = op.bias.map(|dtype| Extent::of_values(dtype, op.n));
        let bias = checks.optional("bias", bias, of_bias, "the product adds a bias")?;
        let grouped = op.k_grouped || op.rows_grouped;
        let of_groups = grouped.then(|| Extent::of_values(ElementType::Int32, op.batch + 1));
        let offsets =
            checks.optional("offsets", offsets, of_groups, "the products are by parts of K or groups of rows")?;
        let Some(ready) = &self.ready else { return Ok(()) };
        let mut operands = Operands::new();
        operands.read(O::A, a);
        operands.read(O::B, b);
        operands.read_if_any(O::AScale, a_scale);
        operands.read_if_any(O::BScale, b_scale);
        operands.read_if_any(O::C, c);
        operands.read_if_any(O::Bias, bias);
        operands.read_if_any(O::Offsets, offsets);
        operands.write(O::D, d);
        let why = "the plan adds up parts of K";
        if let Some(workspace) = checks.workspace(workspace, self.workspace_bytes(), why)? {
            operands.write(O::Workspace, workspace);
        }
        let _span = tracing::trace_span!("launch", kernel = self.kernel_name()).entered();
        Ok(ready.sequence.run_for(&self.op, stream, operands)?)
    }
}

/// What was chosen, and the launches of a run: each with its kernel, geometry and operands.
impl fmt::Display for MatmulPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CheckedMatmul { batch, m, n, k, .. } = self.op;
        write!(f, "{} for {batch} of {m}x{n}x{k} on {}", self.kernel_name(), self.device)?;
        let (Some(launch), Some(sequence)) = (self.launch(), self.sequence()) else { return Ok(()) };
        let mut given = self.op.operands();
        if launch.workspace.bytes > 0 {
            given.push(MatmulOperand::Workspace);
        }
        let (splits, bytes, estimate) = (launch.splits, launch.workspace.bytes, launch.estimate * 1e6);
        writeln!(f, ", K in {splits} parts, {bytes} bytes of workspace, expected to take {estimate:.1} µs")?;
        sequence.display_with(&given).fmt(f)
    }
}
