//! Fused weights ([`FusedWeight`]): several weights of one X (e.g. Q, K and V) as
//! segments of one weight, with separate outputs.

use std::fmt;
use std::ops::Range;

use qgemm_formats::{DType, HostWeight};
use qgemm_hal::{BufferMut, BufferRef, GemmOperand, Operand, Segment, Stream, WorkspaceLayout};
use qgemm_sched::SchedError;

use crate::context::Context;
use crate::convert::{Conversion, ConversionArgs, ConversionPlan};
use crate::error::Error;
use crate::gemm::{Args, Plan, Problem, XRef};
use crate::operand::{Checks, Stored, WIDE_ACCESS};
use crate::weight::Weight;
use crate::workspace::Workspace;

/// Alignment of workspace regions.
const ALIGNMENT: usize = 256;

/// Weights of the same input, concatenated to one; made by [`Context::load_fused`].
///
/// [`FusedWeight::weight`] is an ordinary weight with one product. If a token's
/// outputs are contiguous, its product suffices: [`FusedWeight::columns`] gives
/// the columns of a segment, as a strided view of D. [`FusedProblem`] writes
/// outputs to separate buffers.
#[derive(Clone, Debug)]
pub struct FusedWeight {
    weight: Weight,
    /// End of each segment.
    ends: Vec<usize>,
}

impl FusedWeight {
    pub(crate) fn load(ctx: &Context, parts: &[&HostWeight]) -> Result<Self, Error> {
        let weight = ctx.load(&HostWeight::concat_rows(parts)?)?;
        let ends = parts.iter().scan(0, |end, part| {
            *end += part.n();
            Some(*end)
        });
        Ok(Self { weight, ends: ends.collect() })
    }

    /// Concatenated weight of all segments.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// Number of segments.
    pub fn segments(&self) -> usize {
        self.ends.len()
    }

    /// Output features of a segment within the concatenated weight. `None` beyond the last.
    pub fn columns(&self, segment: usize) -> Option<Range<usize>> {
        let end = *self.ends.get(segment)?;
        Some(segment.checked_sub(1).map_or(0, |before| self.ends[before])..end)
    }
}

/// Output of a segment.
#[derive(Clone, Copy, Debug)]
struct Output {
    /// Element type. By default that of X.
    dtype: Option<DType>,
    row_stride: Option<u64>,
    alignment: usize,
}

/// Product of X with a [`FusedWeight`], with one output per segment; for
/// [`Context::plan_fused`](crate::Context::plan_fused).
///
/// Outputs are rounded once. The launches depend on the device:
///
/// - CPU: one launch.
/// - wgpu: one dispatch per segment, because kernels have one output.
/// - CUDA: one launch for M ≤ 16, and for M > 64 (Hopper: 128, Volta and Turing:
///   8). X must have aligned rows, and segments must start at multiples of 64, 128 or
///   256 features, depending on the tile; 256 always works.
/// - CUDA otherwise, or with more than four segments: the product goes to the
///   workspace, and one conversion per segment writes the output. The workspace has
///   the type of the outputs, or f32 if they differ.
#[derive(Clone, Debug)]
pub struct FusedProblem {
    weight: FusedWeight,
    m: usize,
    x_dtype: DType,
    each: Problem,
    outputs: Vec<Output>,
    /// Stated segment that does not exist.
    unknown: Option<usize>,
}

impl FusedProblem {
    /// Product of `m` tokens of type `x` with `weight`. By default each output has
    /// the type of X and no gaps.
    pub fn new(weight: &FusedWeight, m: usize, x: DType) -> Self {
        let nothing = Output { dtype: None, row_stride: None, alignment: WIDE_ACCESS };
        let each = Problem::new(weight.weight(), m).x_dtype(x);
        let outputs = vec![nothing; weight.segments()];
        Self { weight: weight.clone(), m, x_dtype: x, each, outputs, unknown: None }
    }

    /// Sets the other options of the product: `problem.each(|p| p.bias(DType::F32))`.
    ///
    /// A bias is that of all segments, concatenated. C and the residual have one column per
    /// output feature of all segments.
    pub fn each(mut self, state: impl FnOnce(Problem) -> Problem) -> Self {
        self.each = state(self.each);
        self
    }

    /// Element type of a segment's output. Planning refuses an unknown segment.
    pub fn output_dtype(self, segment: usize, dtype: DType) -> Self {
        self.with(segment, |output| output.dtype = Some(dtype))
    }

    /// Row stride of a segment's output, in elements. Gaps are not written.
    pub fn output_row_stride(self, segment: usize, elements: u64) -> Self {
        self.with(segment, |output| output.row_stride = Some(elements))
    }

    /// Alignment of the address of a segment's output, in bytes. 16 by default.
    pub fn output_alignment(self, segment: usize, bytes: usize) -> Self {
        self.with(segment, |output| output.alignment = bytes)
    }

    fn with(mut self, segment: usize, state: impl FnOnce(&mut Output)) -> Self {
        match self.outputs.get_mut(segment) {
            Some(output) => state(output),
            None => self.unknown = Some(segment),
        }
        self
    }
}

/// Plan of a [`FusedProblem`]; made by
/// [`Context::plan_fused`](crate::Context::plan_fused).
#[derive(Debug)]
pub struct FusedPlan {
    product: Plan,
    segments: usize,
    /// Copy steps, if the product does not write the outputs itself.
    copies: Option<Copies>,
}

/// Conversions from the product's result to the outputs.
#[derive(Debug)]
struct Copies {
    /// Conversion of each segment, and its byte offset within a row.
    parts: Vec<(ConversionPlan, usize)>,
    /// Workspace range of the product's result.
    all: Range<usize>,
}

/// Operands of a [`FusedPlan`] run.
///
/// ```
/// use qgemm_api::{Context, DType, FusedArgs, FusedProblem, HostWeight};
///
/// let ctx = Context::open("cpu")?;
/// let dense = |rows: &[f32]| HostWeight::new("f32".parse().unwrap(), rows.len() / 2, 2, DType::F32.encode(rows).into()).unwrap();
/// let (q, k) = (dense(&[1.0, 0.0, 0.0, 1.0]), dense(&[1.0, 1.0]));
/// let fused = ctx.load_fused(&[&q, &k])?;
/// let plan = ctx.plan_fused(&FusedProblem::new(&fused, 1, DType::F32).output_dtype(1, DType::F16))?;
/// let x = ctx.upload(&DType::F32.encode(&[3.0, 4.0]))?;
/// let (mut of_q, mut of_k) = (ctx.allocate(8)?, ctx.allocate(2)?);
/// let mut workspace = ctx.workspace(plan.workspace_bytes())?;
/// let outputs = &mut [(&mut of_q).into(), (&mut of_k).into()];
/// plan.run(&ctx.default_stream(), FusedArgs::new(&x, &fused, outputs, &mut workspace))?;
/// assert_eq!(ctx.download::<f32>(&of_q)?, [3.0, 4.0]);
/// assert_eq!(DType::F16.decode(&ctx.download(&of_k)?), [7.0]);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct FusedArgs<'a> {
    /// Activations X.
    pub x: XRef<'a>,
    /// Weight.
    pub w: &'a FusedWeight,
    /// Output of each segment.
    pub outputs: &'a mut [BufferMut<'a>],
    /// Workspace, at least [`FusedPlan::workspace_bytes`].
    pub workspace: &'a mut Workspace,
    /// C: see [`Args::c`]. One column per output feature of all segments.
    pub c: Option<BufferRef<'a>>,
    /// Bias of all segments: see [`Args::bias`].
    pub bias: Option<BufferRef<'a>>,
    /// Token factors: see [`Args::token_scale`].
    pub token_scale: Option<BufferRef<'a>>,
    /// Residual: see [`Args::residual`]. One column per output feature of all segments.
    pub residual: Option<BufferRef<'a>>,
    /// Norm weight: see [`Args::gamma`].
    pub gamma: Option<BufferRef<'a>>,
    /// Norm bias: see [`Args::beta`].
    pub beta: Option<BufferRef<'a>>,
}

impl<'a> FusedArgs<'a> {
    /// Required operands. Methods add the optional ones.
    pub fn new(
        x: impl Into<XRef<'a>>,
        w: &'a FusedWeight,
        outputs: &'a mut [BufferMut<'a>],
        workspace: &'a mut Workspace,
    ) -> Self {
        let [c, bias, token_scale, residual, gamma, beta] = [None; 6];
        Self { x: x.into(), w, outputs, workspace, c, bias, token_scale, residual, gamma, beta }
    }

    /// With the C of [`FusedArgs::c`].
    pub fn c(mut self, c: impl Into<BufferRef<'a>>) -> Self {
        self.c = Some(c.into());
        self
    }

    /// With the bias of all segments.
    pub fn bias(mut self, bias: impl Into<BufferRef<'a>>) -> Self {
        self.bias = Some(bias.into());
        self
    }

    /// With the factors of tokens.
    pub fn token_scale(mut self, token_scale: impl Into<BufferRef<'a>>) -> Self {
        self.token_scale = Some(token_scale.into());
        self
    }

    /// With the residual of all segments.
    pub fn residual(mut self, residual: impl Into<BufferRef<'a>>) -> Self {
        self.residual = Some(residual.into());
        self
    }

    /// With the gamma of the norm.
    pub fn gamma(mut self, gamma: impl Into<BufferRef<'a>>) -> Self {
        self.gamma = Some(gamma.into());
        self
    }

    /// With the beta of the norm.
    pub fn beta(mut self, beta: impl Into<BufferRef<'a>>) -> Self {
        self.beta = Some(beta.into());
        self
    }
}

impl FusedPlan {
    pub(crate) fn new(ctx: &Context, problem: &FusedProblem) -> Result<Self, Error> {
        let FusedProblem { weight, x_dtype, each, outputs, unknown, .. } = problem;
        let segments = weight.segments();
        if let &Some(got) = unknown {
            return Err(Error::OutOfRange { name: "segment", least: 0, most: segments - 1, got });
        }
        let op = each.check()?;
        if op.d.row_stride != weight.weight().n() as u64 {
            return Err(Error::NotForFused { what: "a row stride of D", why: "state it for each output" });
        }
        if op.residual_in_d {
            return Err(Error::NotForFused {
                what: "a residual in D",
                why: "give the residual as an operand of its own",
            });
        }
        let dtypes: Vec<DType> = outputs.iter().map(|output| output.dtype.unwrap_or(*x_dtype)).collect();
        let (_, borders) = weight.ends.split_last().unwrap_or((&0, &[]));
        let is_direct = segments <= Segment::MOST && borders.iter().all(|border| border.is_multiple_of(Segment::STEP));
        match is_direct.then(|| Self::direct(ctx, problem, &dtypes)) {
            // Most CUDA kernels have one output.
            None | Some(Err(Error::Plan(SchedError::NoFamily { .. }))) => Self::with_copies(ctx, problem, &dtypes),
            Some(direct) => direct,
        }
    }

    /// Plan whose product writes each output itself.
    fn direct(ctx: &Context, problem: &FusedProblem, dtypes: &[DType]) -> Result<Self, Error> {
        let FusedProblem { weight, m, each, outputs, .. } = problem;
        let segment = |(i, operand): (usize, GemmOperand)| {
            let columns = weight.columns(i).unwrap_or_default();
            let Output { row_stride, alignment, .. } = outputs[i];
            let (name, dtype) = (operand.name(), dtypes[i]);
            let d = Stored { name, rows: *m, columns: columns.len(), dtype, alignment }.check(row_stride)?;
            Ok(Segment { first: columns.start, d })
        };
        let others = (1..weight.segments()).zip(GemmOperand::OF_SEGMENTS).map(segment);
        let (first, of_first) = (outputs[0], weight.columns(0).unwrap_or_default());
        let product = (each.clone().segments(others.collect::<Result<_, Error>>()?))
            .d_dtype(dtypes[0])
            .d_row_stride(first.row_stride.unwrap_or(of_first.len() as u64))
            .d_alignment(first.alignment);
        Ok(Self { product: ctx.plan(&product)?, segments: weight.segments(), copies: None })
    }

    /// Plan whose product writes to the workspace, with a copy step per segment.
    fn with_copies(ctx: &Context, problem: &FusedProblem, dtypes: &[DType]) -> Result<Self, Error> {
        let FusedProblem { weight, m, each, outputs, .. } = problem;
        let (segments, m) = (weight.segments(), *m);
        let common = if dtypes.iter().all(|&dtype| dtype == dtypes[0]) { dtypes[0] } else { DType::F32 };
        let product = ctx.plan(&each.clone().d_dtype(common))?;
        let row = product.op().d.row_stride;
        let overflow = || Error::ExtentOverflow { operand: "D", rows: m as u64, row_stride: row };
        let bytes = weight.weight().n().checked_mul(m).and_then(|elements| elements.checked_mul(common.bytes()));
        // The first bytes are the counters of products, which stay zero.
        let start = product.workspace_bytes().max(WorkspaceLayout::RESERVED);
        let start = start.checked_next_multiple_of(ALIGNMENT).ok_or_else(overflow)?;
        let end = bytes.and_then(|bytes| start.checked_add(bytes)).ok_or_else(overflow)?;
        let part = |(segment, (output, &dtype)): (usize, (&Output, &DType))| {
            let columns = weight.columns(segment).unwrap_or_default();
            let first = columns.start * common.bytes();
            let mut conversion = Conversion::new(m, columns.len(), common, dtype)
                .x_row_stride(row)
                .x_alignment(if first.is_multiple_of(WIDE_ACCESS) { WIDE_ACCESS } else { common.bytes() })
                .d_alignment(output.alignment);
            if let Some(elements) = output.row_stride {
                conversion = conversion.d_row_stride(elements);
            }
            Ok((ctx.plan_conversion(&conversion)?, first))
        };
        let parts = outputs.iter().zip(dtypes).enumerate().map(part).collect::<Result<_, Error>>()?;
        Ok(Self { product, segments, copies: Some(Copies { parts, all: start..end }) })
    }

    /// Required workspace in bytes.
    pub fn workspace_bytes(&self) -> usize {
        self.copies.as_ref().map_or(self.product.workspace_bytes(), |copies| copies.all.end)
    }

    /// Plan of the product of all segments.
    pub fn product(&self) -> &Plan {
        &self.product
    }

    /// Submits the product and its copy steps to `stream`. Like [`Plan::run`] it allocates
    /// nothing, waits for nothing and takes no lock.
    ///
    /// # Errors
    /// As [`Plan::run`]. [`Error::OutputsMismatch`] when there is not one
    /// output per segment. With copy steps, an output that does not fit and
    /// later ones are not written.
    pub fn run(&self, stream: &Stream, args: FusedArgs<'_>) -> Result<(), Error> {
        let FusedArgs { x, w, outputs, workspace, c, bias, token_scale, residual, gamma, beta } = args;
        let (expected, got) = (self.segments, outputs.len());
        let [first, others @ ..] = outputs else { return Err(Error::OutputsMismatch { expected, got }) };
        if expected != got {
            return Err(Error::OutputsMismatch { expected, got });
        }
        let optional = [c, bias, token_scale, residual, gamma, beta];
        let Some(Copies { parts, all }) = &self.copies else {
            let args = with(Args::new(x, w.weight(), first.reborrow()), optional);
            let others = others.iter_mut().map(BufferMut::reborrow);
            return self.product.run_segments(stream, args, others, Some(workspace.view()));
        };
        let why = "the plan keeps the outputs of all segments";
        let checks = Checks(self.product.device());
        let Some(workspace) = checks.workspace(Some(workspace.view()), all.end, why)? else { return Ok(()) };
        let (own, rest) = workspace.split_at(all.start)?;
        let mut sums = rest.slice(0..all.len())?;
        let args = with(Args::new(x, w.weight(), sums.reborrow()), optional);
        self.product.run_within(stream, args, Some(own))?;
        for ((conversion, first), output) in parts.iter().zip(std::iter::once(first).chain(others)) {
            let from = sums.view().slice(*first..all.len())?;
            conversion.run(stream, ConversionArgs::new(from, output.reborrow()))?;
        }
        Ok(())
    }
}

/// Adds C, bias, token factors, residual, gamma and beta to `args`.
fn with<'a>(args: Args<'a>, optional: [Option<BufferRef<'a>>; 6]) -> Args<'a> {
    let [c, bias, token_scale, residual, gamma, beta] = optional;
    Args { c, bias, token_scale, residual, gamma, beta, ..args }
}

/// Launches of the product, then copy steps.
impl fmt::Display for FusedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.product.fmt(f)?;
        let parts = self.copies.iter().flat_map(|copies| &copies.parts);
        parts.into_iter().try_for_each(|(conversion, _)| write!(f, "\n{conversion}"))
    }
}
