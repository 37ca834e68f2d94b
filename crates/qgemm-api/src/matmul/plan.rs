//! [`MatmulPlan`]: ready kernel of one product.

use qgemm_formats::{DType, ElementType, XFormat};
use qgemm_hal::{
    BufferMut, BufferRef, CheckedMatmul, DeviceInfo, DeviceKind, Families, MatmulConfig, MatmulOperand,
    MatmulPlan as MatmulLaunch, Stream,
};
use qgemm_sched::{Candidates, Preferences, SchedError, TunedTable, matmul};

use super::description::Matmul;
use crate::context::Context;
use crate::error::Error;
use crate::operand::Extent;
use crate::planned::{Bound, Chosen, Planned, Wanted, explain};
use crate::quantization::QuantizedX;
use crate::record::{Dispatch, PlanRecord, Recorded, Reduction, ReductionOrder, Sizes, SplitAxis, WorkspaceRegion};
use crate::setters::setters;
use crate::workspace::Workspace;

/// Ready kernels of one [`Matmul`], from
/// [`Context::plan_matmul`]. Its text lists the launches of a
/// run.
pub type MatmulPlan = Planned<CheckedMatmul>;

/// Operands of one run of a [`MatmulPlan`].
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
    /// Left operand, A.
    pub a: BufferRef<'a>,
    /// Right operand, B.
    pub b: BufferRef<'a>,
    /// Output; an input, too, where the product
    /// [accumulates](Matmul::accumulate).
    pub d: BufferMut<'a>,
    /// Scale of A, an f32, when [it has one](Matmul::a_scaled), or
    /// the scales of its blocks.
    pub a_scale: Option<BufferRef<'a>>,
    /// Scale of B, or the scales of its blocks.
    pub b_scale: Option<BufferRef<'a>>,
    /// C, when the product adds one.
    pub c: Option<BufferRef<'a>>,
    /// Bias, when the product adds one.
    pub bias: Option<BufferRef<'a>>,
    /// Offsets of each product's part of K, or of its rows, and their
    /// end: one `u32` more than products. For products
    /// [by parts of K](Matmul::k_grouped) or
    /// [by groups of rows](Matmul::rows_grouped).
    pub offsets: Option<BufferRef<'a>>,
    /// Workspace of at least [`MatmulPlan::workspace_bytes`], when
    /// that is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

impl<'a> MatmulArgs<'a> {
    /// Operands of every run. Methods add the other operands. Callers
    /// with optional operands can set the fields.
    pub fn new(a: impl Into<BufferRef<'a>>, b: impl Into<BufferRef<'a>>, d: impl Into<BufferMut<'a>>) -> Self {
        let (a_scale, b_scale, c, bias, offsets) = (None, None, None, None, None);
        Self { a: a.into(), b: b.into(), d: d.into(), a_scale, b_scale, c, bias, offsets, workspace: None }
    }

    /// Operands quantized to E4M3 with block scales, as in
    /// [`Matmul::of_quantized`].
    ///
    /// # Errors
    /// [`Error::BlockScaledProduct`] when an operand has another
    /// format.
    pub fn of_quantized(a: &'a QuantizedX, b: &'a QuantizedX, d: impl Into<BufferMut<'a>>) -> Result<Self, Error> {
        let scales_of = |x: &'a QuantizedX| {
            x.scales()
                .filter(|_| x.format() == XFormat::E4M3Block)
                .ok_or(Error::BlockScaledProduct { why: "both factors must be quantized to e4m3_1x128" })
        };
        let (a_scales, b_scales) = (scales_of(a)?, scales_of(b)?);
        Ok(Self::new(a.codes(), b.codes(), d).a_scale(a_scales).b_scale(b_scales))
    }

    setters! {
        /// With the scale of A, an f32; or, for codes with scales, with
        /// rows of one f32 per 128 values along K.
        a_scale: BufferRef,
        /// With the scale of B, or its rows of scales.
        b_scale: BufferRef,
        /// With C.
        c: BufferRef,
        /// With a bias.
        bias: BufferRef,
        /// With the offsets of products by parts of K or groups of rows.
        offsets: BufferRef,
    }

    /// With a workspace.
    pub fn workspace(mut self, workspace: &'a mut Workspace) -> Self {
        self.workspace = Some(workspace);
        self
    }
}

impl Context {
    /// Chooses a kernel for `matmul` and makes it ready. A known
    /// problem costs a lookup, as with [`Context::plan`].
    ///
    /// ```
    /// use qgemm_api::{Context, DType, Matmul, MatmulArgs};
    ///
    /// let ctx = Context::open("cpu")?;
    /// // Two products of a row and a column; the row is the same.
    /// let matmul = Matmul::new([1, 1, 2], DType::F32, DType::F32, DType::F32).batch(2).a_batch_stride(0);
    /// let plan = ctx.plan_matmul(&matmul)?;
    /// let (a, b) = (ctx.upload(&DType::F32.encode(&[1.0, 2.0]))?, ctx.upload(&DType::F32.encode(&[3.0, 4.0, 5.0, 6.0]))?);
    /// let mut d = ctx.allocate(2 * 4)?;
    /// plan.run(&ctx.default_stream(), MatmulArgs::new(&a, &b, &mut d))?;
    /// assert_eq!(DType::F32.decode(&ctx.download(&d)?), [11.0, 17.0]);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the product is invalid or no family serves it, or when
    /// the kernel cannot be prepared.
    pub fn plan_matmul(&self, matmul: &Matmul) -> Result<MatmulPlan, Error> {
        Planned::new(self, matmul.check()?, Preferences::default())
    }

    /// Plans of all candidates of [`Context::plan_matmul`], fastest
    /// first by the cost model. Empty where there is nothing to
    /// write. For tests and measurements of every candidate.
    ///
    /// # Errors
    /// As [`Context::plan_matmul`].
    pub fn plan_matmul_candidates(&self, matmul: &Matmul) -> Result<Vec<MatmulPlan>, Error> {
        Planned::of_candidates(self, &matmul.check()?, &Preferences::default())
    }

    /// Record of the choice of [`Context::plan_matmul`]: see
    /// [`Context::explain`].
    ///
    /// # Errors
    /// When the product is invalid.
    pub fn explain_matmul(&self, product: &Matmul) -> Result<PlanRecord, Error> {
        explain(self, &product.check()?, &Preferences::default())
    }
}

impl Chosen for CheckedMatmul {
    fn candidates(
        &self,
        info: &DeviceInfo,
        families: Families<Self>,
        _: &Preferences,
        tuned: &TunedTable,
    ) -> Result<Candidates<'static, Self>, SchedError> {
        Ok(matmul::candidates(self, info, families, tuned))
    }
}

impl Recorded for CheckedMatmul {
    fn sizes(&self) -> Option<Sizes> {
        Some(Sizes { m: self.m, n: self.n, k: self.k })
    }

    fn workspace(&self, plan: &MatmulLaunch) -> Vec<WorkspaceRegion> {
        let layout = &plan.workspace;
        let sums = (layout.partial_bytes > 0)
            .then(|| WorkspaceRegion::new("partial accumulators", layout.partials, layout.partial_bytes));
        let factors = (plan.config.factor_bytes > 0)
            .then(|| WorkspaceRegion::new("factors", plan.factors, plan.config.factor_bytes as usize));
        sums.into_iter().chain(factors).collect()
    }

    fn cut(plan: &MatmulLaunch) -> String {
        match plan.splits {
            1 => "whole tiles".into(),
            splits => format!("K in {splits} parts"),
        }
    }

    fn dispatch(&self, plan: &MatmulLaunch) -> Dispatch {
        let MatmulConfig { tile_m, tile_n, tile_k, .. } = plan.config;
        let tiles = |len: usize, tile: u32| len.div_ceil(tile.max(1) as usize);
        let tiles = Sizes { m: tiles(self.m, tile_m), n: tiles(self.n, tile_n), k: tiles(self.k, tile_k) };
        let split_axis = match (plan.splits > 1, tiles.n == 1 && tiles.m > 1) {
            (true, _) => SplitAxis::K,
            (false, true) => SplitAxis::M,
            (false, false) => SplitAxis::N,
        };
        Dispatch { tiles: Some(tiles), ..Dispatch::along(split_axis, plan.splits) }
    }

    fn reduction(&self, plan: &MatmulLaunch, info: &DeviceInfo) -> Option<Reduction> {
        let order = match info.id.kind {
            DeviceKind::Cpu => ReductionOrder::FixedTree,
            DeviceKind::Wgpu => ReductionOrder::InOrder,
            _ => ReductionOrder::LastArriverInOrder,
        };
        (plan.splits > 1).then(|| Reduction::of_parts(self.workspace(plan), order))
    }
}

impl Bound for CheckedMatmul {
    fn wanted(&self, operand: MatmulOperand, _: bool) -> Wanted {
        use MatmulOperand as O;
        let scale = |all: &'static str, blocks: &'static str, is_scaled: bool, outer: usize, scale_row: u64| {
            if self.has_block_scales() {
                let scales = self.scales_extent(outer, scale_row).unwrap_or(u64::MAX) as usize;
                return Wanted::optional(blocks, Some(Extent::of_values(DType::F32, scales)), "blocks have scales");
            }
            Wanted::optional(all, is_scaled.then(|| Extent::of_values(DType::F32, 1)), "all of the factor has one")
        };
        match operand {
            O::A => Wanted::always("A", Extent::of_batch(&self.a, self.batch, self.m, self.k)),
            O::B => Wanted::always("B", Extent::of_batch(&self.b, self.batch, self.k, self.n)),
            O::D => Wanted::always("D", Extent::of_batch(&self.d, self.batch, self.m, self.n)),
            O::AScale => scale("A's factor", "A's scales", self.a_scaled, self.m, self.a_scale_row),
            O::BScale => scale("B's factor", "B's scales", self.b_scaled, self.n, self.b_scale_row),
            O::C => {
                let extent = self.c.as_ref().map(|c| Extent::of_batch(c, self.batch, self.m, self.n));
                Wanted::optional("C", extent, "the product adds C")
            }
            O::Bias => {
                let extent = self.bias.map(|dtype| Extent::of_values(dtype, self.n));
                Wanted::optional("bias", extent, "the product adds a bias")
            }
            O::Offsets => {
                let is_grouped = self.k_grouped || self.rows_grouped;
                let extent = is_grouped.then(|| Extent::of_values(ElementType::Int32, self.batch + 1));
                Wanted::optional("offsets", extent, "the products are by parts of K or groups of rows")
            }
            O::Workspace => Wanted::workspace("the plan adds up parts of K"),
        }
    }
}

impl MatmulPlan {
    /// Submits the product to `stream`. A run allocates nothing,
    /// waits for nothing and takes no lock. A CUDA graph may capture
    /// it.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, unexpected
    /// or on another device; or on a device error. Nothing is written
    /// then.
    pub fn run(&self, stream: &Stream, mut args: MatmulArgs<'_>) -> Result<(), Error> {
        let workspace = args.workspace.take().map(Workspace::view);
        self.run_within(stream, args, workspace)
    }

    /// [`MatmulPlan::run`] with a workspace inside another buffer,
    /// instead of the one in `args`.
    pub(crate) fn run_within(
        &self,
        stream: &Stream,
        args: MatmulArgs<'_>,
        workspace: Option<BufferMut<'_>>,
    ) -> Result<(), Error> {
        use MatmulOperand as O;
        let MatmulArgs { a, b, d, a_scale, b_scale, c, bias, offsets, workspace: _ } = args;
        let mut run = self.start(stream)?;
        run.read(O::A, a)?;
        run.read(O::B, b)?;
        run.write(O::D, d)?;
        run.read(O::AScale, a_scale)?;
        run.read(O::BScale, b_scale)?;
        // With a factor of 0, C is no operand. A C that is passed is
        // ignored.
        run.read(O::C, c.filter(|_| self.op().c.is_some()))?;
        run.read(O::Bias, bias)?;
        run.read(O::Offsets, offsets)?;
        if run.is_nothing() {
            return Ok(());
        }
        run.workspace(workspace)?;
        run.launch(stream)
    }
}
