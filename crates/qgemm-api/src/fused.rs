//! [`FusedWeight`]: several weights of one X, such as Q, K and V, as one weight with segments, and its products, whose outputs go to
//! buffers, strides and types of their own.

use std::fmt;
use std::ops::Range;

use qgemm_formats::{DType, HostWeight};
use qgemm_hal::{BufferMut, BufferRef, GemmOperand, Operand, Segment, Stream};
use qgemm_sched::SchedError;

use crate::context::Context;
use crate::convert::{Conversion, ConversionArgs, ConversionPlan};
use crate::error::Error;
use crate::gemm::{Args, Plan, Problem, XRef};
use crate::operand::{Checks, Stored, WIDE_ACCESS};
use crate::weight::Weight;
use crate::workspace::Workspace;

/// What parts of a workspace are aligned to.
const ALIGNMENT: usize = 256;

/// Weights with the same input features as one weight; made by [`Context::load_fused`]. Its [`FusedWeight::weight`] is one like any
/// other, and its product one pass: where an engine keeps the outputs of a token side by side, [`FusedWeight::columns`] says
/// which of D's columns are whose, and a view with D's row stride is all that it needs. [`FusedProblem`] is for outputs that
/// lie elsewhere.
#[derive(Clone, Debug)]
pub struct FusedWeight {
    weight: Weight,
    /// Where each segment ends.
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

    /// All of it, whose output features are those of the segments one after the other.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// How many weights it is made of.
    pub fn segments(&self) -> usize {
        self.ends.len()
    }

    /// The output features of a segment among all; `None` where there is no such segment.
    pub fn columns(&self, segment: usize) -> Option<Range<usize>> {
        let end = *self.ends.get(segment)?;
        Some(segment.checked_sub(1).map_or(0, |before| self.ends[before])..end)
    }
}

/// How the output of a segment lies.
#[derive(Clone, Copy, Debug)]
struct Output {
    /// The type of X where none was said.
    dtype: Option<DType>,
    row_stride: Option<u64>,
    alignment: usize,
}

/// The product of X with a [`FusedWeight`], whose segments have outputs of their own; described for
/// [`Context::plan_fused`](crate::Context::plan_fused).
///
/// One pass over X and the weight writes every output where it belongs, rounded once: on the CPU one launch, on wgpu, whose kernels have
/// one output, a dispatch a segment, on CUDA one launch for up to 16 tokens and for more than 64 (128 on Hopper, 8 on Volta and Turing), where X lies in
/// aligned rows and segments begin at whole tiles: multiples of 256 features are some on every chip. Otherwise there, and where a segment begins at no multiple of 16 features or
/// there are more than four, the product's sums go to the workspace, in the type of the outputs, or in f32 where these differ, and a step a
/// segment writes them from there.
#[derive(Clone, Debug)]
pub struct FusedProblem {
    weight: FusedWeight,
    m: usize,
    x_dtype: DType,
    each: Problem,
    outputs: Vec<Output>,
    /// A segment that was stated and is not there.
    unknown: Option<usize>,
}

impl FusedProblem {
    /// `m` tokens of type `x` times `weight`. Unless said otherwise, every output has the type of X and no gaps.
    pub fn new(weight: &FusedWeight, m: usize, x: DType) -> Self {
        let nothing = Output { dtype: None, row_stride: None, alignment: WIDE_ACCESS };
        let each = Problem::new(weight.weight(), m).x_dtype(x);
        let outputs = vec![nothing; weight.segments()];
        Self { weight: weight.clone(), m, x_dtype: x, each, outputs, unknown: None }
    }

    /// States what a [`Problem`] has beside weight, tokens, the type of X and D: `problem.each(|p| p.bias(DType::F32))`. A bias is
    /// that of all segments, one after the other; C and a residual have a column for each output feature of all.
    pub fn each(mut self, state: impl FnOnce(Problem) -> Problem) -> Self {
        self.each = state(self.each);
        self
    }

    /// Element type of a segment's output. A segment that is not there is refused when planned.
    pub fn output_dtype(self, segment: usize, dtype: DType) -> Self {
        self.with(segment, |output| output.dtype = Some(dtype))
    }

    /// Elements from one row of a segment's output to the next. What lies between rows is left as it is.
    pub fn output_row_stride(self, segment: usize, elements: u64) -> Self {
        self.with(segment, |output| output.row_stride = Some(elements))
    }

    /// What the address of a segment's output is a multiple of, in bytes; 16 when not given.
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

/// Kernels made ready for one [`FusedProblem`]; made by [`Context::plan_fused`](crate::Context::plan_fused).
#[derive(Debug)]
pub struct FusedPlan {
    product: Plan,
    segments: usize,
    /// Where the product does not write outputs where they belong.
    copies: Option<Copies>,
}

/// Steps that write outputs where they belong, from where the product has left them.
#[derive(Debug)]
struct Copies {
    /// Of each segment, with the bytes of a row of all outputs at which its own begin.
    parts: Vec<(ConversionPlan, usize)>,
    /// Where all outputs lie in the workspace.
    all: Range<usize>,
}

/// What one run of a [`FusedPlan`] reads and writes.
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
    /// Activations.
    pub x: XRef<'a>,
    /// The weight.
    pub w: &'a FusedWeight,
    /// The output of each segment.
    pub outputs: &'a mut [BufferMut<'a>],
    /// At least [`FusedPlan::workspace_bytes`].
    pub workspace: &'a mut Workspace,
    /// As [`Args::c`], with a column for each output feature of all segments.
    pub c: Option<BufferRef<'a>>,
    /// As [`Args::bias`], of all segments.
    pub bias: Option<BufferRef<'a>>,
    /// As [`Args::token_scale`].
    pub token_scale: Option<BufferRef<'a>>,
    /// As [`Args::residual`], with a column for each output feature of all segments.
    pub residual: Option<BufferRef<'a>>,
    /// As [`Args::gamma`].
    pub gamma: Option<BufferRef<'a>>,
    /// As [`Args::beta`].
    pub beta: Option<BufferRef<'a>>,
}

impl<'a> FusedArgs<'a> {
    /// What every run has. Methods add the other operands.
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
            // Most kernels of CUDA have one output.
            None | Some(Err(Error::Plan(SchedError::NoFamily { .. }))) => Self::with_copies(ctx, problem, &dtypes),
            Some(direct) => direct,
        }
    }

    /// The product writes every output where it belongs.
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

    /// The product writes all outputs into the workspace, where a step for each segment reads them.
    fn with_copies(ctx: &Context, problem: &FusedProblem, dtypes: &[DType]) -> Result<Self, Error> {
        let FusedProblem { weight, m, each, outputs, .. } = problem;
        let (segments, m) = (weight.segments(), *m);
        let common = if dtypes.iter().all(|&dtype| dtype == dtypes[0]) { dtypes[0] } else { DType::F32 };
        let product = ctx.plan(&each.clone().d_dtype(common))?;
        let row = product.op().d.row_stride;
        let overflow = || Error::ExtentOverflow { operand: "D", rows: m as u64, row_stride: row };
        let bytes = weight.weight().n().checked_mul(m).and_then(|elements| elements.checked_mul(common.bytes()));
        let start = product.workspace_bytes().checked_next_multiple_of(ALIGNMENT).ok_or_else(overflow)?;
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

    /// Bytes of workspace that a run needs.
    pub fn workspace_bytes(&self) -> usize {
        self.copies.as_ref().map_or(self.product.workspace_bytes(), |copies| copies.all.end)
    }

    /// The plan of the product of all segments.
    pub fn product(&self) -> &Plan {
        &self.product
    }

    /// Submits the product, and where it does not write each output itself what does, to `stream`. Allocates nothing, waits for nothing
    /// and takes no lock, as [`Plan::run`].
    ///
    /// # Errors
    /// As [`Plan::run`]; [`Error::OutputsMismatch`] when there are not as many outputs as segments. Where a step writes each output, nothing
    /// is written of one that does not fit, nor of those after it.
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

/// `args` with C, the bias, the tokens' factors, the residual, gamma and beta.
fn with<'a>(args: Args<'a>, optional: [Option<BufferRef<'a>>; 6]) -> Args<'a> {
    let [c, bias, token_scale, residual, gamma, beta] = optional;
    Args { c, bias, token_scale, residual, gamma, beta, ..args }
}

/// The product's launches, then those that write outputs where they belong.
impl fmt::Display for FusedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.product.fmt(f)?;
        let parts = self.copies.iter().flat_map(|copies| &copies.parts);
        parts.into_iter().try_for_each(|(conversion, _)| write!(f, "\n{conversion}"))
    }
}
