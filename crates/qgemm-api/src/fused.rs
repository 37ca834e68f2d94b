//! Fused weights ([`FusedWeight`]): several weights of one X (e.g. Q, K and V) as
//! segments with separate outputs.

use std::fmt;
use std::ops::Range;

use qgemm_formats::{DType, FormatError, HostWeight};
use qgemm_hal::{BufferMut, BufferRef, GemmOperand, Operand, Segment, Stream, WorkspaceLayout};
use qgemm_sched::SchedError;

use crate::context::Context;
use crate::convert::{Conversion, ConversionArgs, ConversionPlan};
use crate::error::Error;
use crate::gemm::{Args, Plan, Problem, XRef};
use crate::operand::{Checks, Stored, WIDE_ACCESS};
use crate::setters::setters;
use crate::weight::Weight;
use crate::workspace::Workspace;

/// Alignment of workspace regions.
const ALIGNMENT: usize = 256;

/// Weights of the same input as segments; made by [`Context::load_fused`].
///
/// Neighbours of one format are one weight, with one product. Where all are,
/// [`FusedWeight::weight`] is an ordinary weight: if a token's outputs are contiguous, its
/// product suffices, and [`FusedWeight::columns`] gives the columns of a segment, as a
/// strided view of D. [`FusedProblem`] writes outputs to separate buffers.
#[derive(Clone, Debug)]
pub struct FusedWeight {
    /// Weights of neighbours, each with its segments.
    groups: Vec<(Weight, Range<usize>)>,
    /// End of each segment.
    ends: Vec<usize>,
}

impl FusedWeight {
    pub(crate) fn load(ctx: &Context, parts: &[&HostWeight]) -> Result<Self, Error> {
        let (first, others) = parts.split_first().ok_or(FormatError::NoParts)?;
        let of_other_k = others.iter().position(|part| part.k() != first.k());
        if let Some(other) = of_other_k {
            let (first, got) = (first.k().to_string(), others[other].k().to_string());
            return Err(FormatError::PartMismatch { what: "K", number: other + 2, first, got }.into());
        }
        let mut groups = Vec::new();
        let mut start = 0;
        while start < parts.len() {
            let (weight, end) = longest_group(&parts[start..])?;
            groups.push((ctx.load(&weight)?, start..start + end));
            start += end;
        }
        let ends = parts.iter().scan(0, |end, part| {
            *end += part.n();
            Some(*end)
        });
        Ok(Self { groups, ends: ends.collect() })
    }

    /// The weight of all segments. `None` where their formats or column orders differ.
    pub fn weight(&self) -> Option<&Weight> {
        if let [(weight, _)] = &self.groups[..] { Some(weight) } else { None }
    }

    /// Weights of neighbours of one format, in order.
    pub fn weights(&self) -> impl Iterator<Item = &Weight> {
        self.groups.iter().map(|(weight, _)| weight)
    }

    /// Number of segments.
    pub fn segments(&self) -> usize {
        self.ends.len()
    }

    /// Output features of a segment among those of all. `None` beyond the last.
    pub fn columns(&self, segment: usize) -> Option<Range<usize>> {
        let end = *self.ends.get(segment)?;
        Some(segment.checked_sub(1).map_or(0, |before| self.ends[before])..end)
    }
}

/// Weight of as many first parts as can be one, and their number.
fn longest_group(parts: &[&HostWeight]) -> Result<(HostWeight, usize), FormatError> {
    let fits = |count: &usize| match HostWeight::concat_rows(&parts[..*count]) {
        Err(FormatError::PartMismatch { .. } | FormatError::PartEndsInScale { .. }) => None,
        other => Some(other.map(|weight| (weight, *count))),
    };
    (1..=parts.len()).rev().find_map(|count| fits(&count)).unwrap_or(Err(FormatError::NoParts))
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
/// Outputs are rounded once. Each weight of [`FusedWeight::weights`] has launches of its own,
/// which depend on the device:
///
/// - CPU: one launch.
/// - wgpu: one dispatch per segment, because kernels have one output.
/// - CUDA: one launch for M ≤ 16, and for M > 64 (Hopper: 128, Volta and Turing:
///   8, with X in f16). X must have aligned rows, and segments must start at multiples of 64, 128 or
///   256 features, depending on the tile; 256 always works.
/// - CUDA otherwise, or with more than four segments: the product goes to the
///   workspace, and one conversion per segment writes the output. The workspace has
///   the type of the outputs, or f32 if they differ.
///
/// ```
/// use qgemm_api::{Context, DType, FusedArgs, FusedProblem, quantize};
///
/// let ctx = Context::open("cpu")?;
/// let of = |value: f32, n| quantize(&vec![value; n * 64], n, 64, "q8_0".parse()?).map(|(weight, _)| weight);
/// let (q, k) = (of(1.0, 64)?, of(0.5, 32)?);
/// let weight = ctx.load_fused(&[&q, &k])?;
/// let plan = ctx.plan_fused(&FusedProblem::new(&weight, 1, DType::F32))?;
/// let mut workspace = ctx.workspace(plan.workspace_bytes())?;
/// let x = ctx.upload(&[1.0f32; 64])?;
/// let (mut q, mut k) = (ctx.allocate(64 * 4)?, ctx.allocate(32 * 4)?);
/// let mut outputs = [(&mut q).into(), (&mut k).into()];
/// plan.run(&ctx.default_stream(), FusedArgs::new(&x, &weight, &mut outputs, &mut workspace))?;
/// assert!((ctx.download::<f32>(&k)?[0] - 32.0).abs() < 0.1);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
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
        // Each group of segments gets its weight when it is planned.
        let each = Problem::new(&weight.groups[0].0, m).x_dtype(x);
        let outputs = vec![nothing; weight.segments()];
        Self { weight: weight.clone(), m, x_dtype: x, each, outputs, unknown: None }
    }

    /// Sets the other options of the product: `problem.each(|p| p.bias(DType::F32))`.
    ///
    /// A bias is that of all segments, concatenated. C and the residual have one column per
    /// output feature of all segments; segments of several weights have neither.
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
    groups: Vec<GroupPlan>,
    segments: usize,
}

/// Plan of the segments of one weight.
#[derive(Debug)]
struct GroupPlan {
    product: Plan,
    segments: Range<usize>,
    /// Output features among those of all segments.
    columns: Range<usize>,
    /// Copy steps, if the product does not write the outputs itself.
    copies: Option<Copies>,
}

/// Weight of a group, and what its outputs are.
struct Group<'p> {
    ctx: &'p Context,
    problem: &'p FusedProblem,
    each: Problem,
    weight: &'p Weight,
    segments: Range<usize>,
    dtypes: &'p [DType],
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

    setters! {
        /// With the C of [`FusedArgs::c`].
        c: BufferRef,
        /// With the bias of all segments.
        bias: BufferRef,
        /// With the factors of tokens.
        token_scale: BufferRef,
        /// With the residual of all segments.
        residual: BufferRef,
        /// With the gamma of the norm.
        gamma: BufferRef,
        /// With the beta of the norm.
        beta: BufferRef,
    }
}

impl FusedPlan {
    pub(crate) fn new(ctx: &Context, problem: &FusedProblem) -> Result<Self, Error> {
        let FusedProblem { weight, x_dtype, each, outputs, unknown, .. } = problem;
        let segments = weight.segments();
        if let &Some(got) = unknown {
            return Err(Error::OutOfRange { name: "segment", least: 0, most: segments - 1, got });
        }
        let refused = |what, why| Err(Error::NotForFused { what, why });
        let op = each.check()?;
        if op.d.row_stride != weight.groups[0].0.n() as u64 {
            return refused("a row stride of D", "state it for each output");
        }
        if op.residual_in_d {
            return refused("a residual in D", "give the residual as an operand of its own");
        }
        if weight.groups.len() > 1 && (op.c.is_some() || op.residual.is_some()) {
            return refused("C or a residual", "the segments have weights of several formats");
        }
        let dtypes: Vec<DType> = outputs.iter().map(|output| output.dtype.unwrap_or(*x_dtype)).collect();
        let group = |(weight, segments): &(Weight, Range<usize>)| {
            let (dtypes, segments) = (&dtypes[segments.clone()], segments.clone());
            Group { ctx, problem, each: each.clone().with_weight(weight), weight, segments, dtypes }.plan()
        };
        Ok(Self { groups: weight.groups.iter().map(group).collect::<Result<_, _>>()?, segments })
    }

    /// Required workspace in bytes.
    pub fn workspace_bytes(&self) -> usize {
        self.groups.iter().map(GroupPlan::workspace_bytes).max().unwrap_or(0)
    }

    /// Plans of the products, one for each of [`FusedWeight::weights`].
    pub fn products(&self) -> impl Iterator<Item = &Plan> {
        self.groups.iter().map(|group| &group.product)
    }

    /// Submits the products and their copy steps to `stream`. Like [`Plan::run`] it allocates
    /// nothing, waits for nothing and takes no lock.
    ///
    /// # Errors
    /// As [`Plan::run`]. [`Error::OutputsMismatch`] when there is not one
    /// output per segment. With copy steps or several weights, an output that does not fit and
    /// later ones are not written.
    pub fn run(&self, stream: &Stream, args: FusedArgs<'_>) -> Result<(), Error> {
        let FusedArgs { x, w, outputs, workspace, c, bias, token_scale, residual, gamma, beta } = args;
        let (expected, got) = (self.segments, outputs.len());
        if expected != got || w.groups.len() != self.groups.len() {
            return Err(Error::OutputsMismatch { expected, got });
        }
        for (group, (weight, _)) in self.groups.iter().zip(&w.groups) {
            let bias = bias.map(|bias| group.part_of(bias)).transpose()?;
            let optional = [c, bias, token_scale, residual, gamma, beta];
            group.run(stream, (x, weight), &mut outputs[group.segments.clone()], optional, workspace)?;
        }
        Ok(())
    }
}

impl Group<'_> {
    fn plan(&self) -> Result<GroupPlan, Error> {
        let starts = self.segments.clone().skip(1).map(|segment| self.columns(segment).start);
        let is_direct =
            self.segments.len() <= Segment::MOST && starts.into_iter().all(|start| start.is_multiple_of(Segment::STEP));
        match is_direct.then(|| self.direct()) {
            // Most CUDA kernels have one output.
            None | Some(Err(Error::Plan(SchedError::NoFamily { .. }))) => self.with_copies(),
            Some(direct) => direct,
        }
    }

    /// Output features of a segment within those of the weight.
    fn columns(&self, segment: usize) -> Range<usize> {
        let columns = self.problem.weight.columns(segment).unwrap_or_default();
        let first = self.problem.weight.columns(self.segments.start).unwrap_or_default().start;
        columns.start - first..columns.end - first
    }

    /// Output features of the weight among those of all segments.
    fn all_columns(&self) -> Range<usize> {
        let first = self.problem.weight.columns(self.segments.start).unwrap_or_default().start;
        first..first + self.weight.n()
    }

    /// Plan whose product writes each output itself.
    fn direct(&self) -> Result<GroupPlan, Error> {
        let FusedProblem { m, outputs, .. } = self.problem;
        let outputs = &outputs[self.segments.clone()];
        let segment = |(i, operand): (usize, GemmOperand)| {
            let columns = self.columns(self.segments.start + i);
            let Output { row_stride, alignment, .. } = outputs[i];
            let (name, dtype) = (operand.name(), self.dtypes[i]);
            let d = Stored { name, rows: *m, columns: columns.len(), dtype, alignment }.check(row_stride)?;
            Ok(Segment { first: columns.start, d })
        };
        let others = (1..outputs.len()).zip(GemmOperand::OF_SEGMENTS).map(segment);
        let (first, of_first) = (outputs[0], self.columns(self.segments.start));
        let product = (self.each.clone().segments(others.collect::<Result<_, Error>>()?))
            .d_dtype(self.dtypes[0])
            .d_row_stride(first.row_stride.unwrap_or(of_first.len() as u64))
            .d_alignment(first.alignment);
        self.done(self.ctx.plan(&product)?, None)
    }

    /// Plan whose product writes to the workspace, with a copy step per segment.
    fn with_copies(&self) -> Result<GroupPlan, Error> {
        let (dtypes, m) = (self.dtypes, self.problem.m);
        let outputs = &self.problem.outputs[self.segments.clone()];
        let common = if dtypes.iter().all(|&dtype| dtype == dtypes[0]) { dtypes[0] } else { DType::F32 };
        let product = self.ctx.plan(&self.each.clone().d_dtype(common))?;
        let row = product.op().d.row_stride;
        let overflow = || Error::ExtentOverflow { operand: "D", rows: m as u64, row_stride: row };
        let bytes = self.weight.n().checked_mul(m).and_then(|elements| elements.checked_mul(common.bytes()));
        // The first bytes are the counters of products, which stay zero.
        let start = product.workspace_bytes().max(WorkspaceLayout::RESERVED);
        let start = start.checked_next_multiple_of(ALIGNMENT).ok_or_else(overflow)?;
        let end = bytes.and_then(|bytes| start.checked_add(bytes)).ok_or_else(overflow)?;
        let part = |(segment, (output, &dtype)): (usize, (&Output, &DType))| {
            let columns = self.columns(segment);
            let first = columns.start * common.bytes();
            let mut conversion = Conversion::new(m, columns.len(), common, dtype)
                .x_row_stride(row)
                .x_alignment(if first.is_multiple_of(WIDE_ACCESS) { WIDE_ACCESS } else { common.bytes() })
                .d_alignment(output.alignment);
            if let Some(elements) = output.row_stride {
                conversion = conversion.d_row_stride(elements);
            }
            Ok((self.ctx.plan_conversion(&conversion)?, first))
        };
        let parts = self.segments.clone().zip(outputs.iter().zip(dtypes)).map(part).collect::<Result<_, Error>>()?;
        self.done(product, Some(Copies { parts, all: start..end }))
    }

    fn done(&self, product: Plan, copies: Option<Copies>) -> Result<GroupPlan, Error> {
        Ok(GroupPlan { product, segments: self.segments.clone(), columns: self.all_columns(), copies })
    }
}

impl GroupPlan {
    fn workspace_bytes(&self) -> usize {
        self.copies.as_ref().map_or(self.product.workspace_bytes(), |copies| copies.all.end)
    }

    /// The part of a bias of all segments.
    fn part_of<'a>(&self, bias: BufferRef<'a>) -> Result<BufferRef<'a>, Error> {
        let Some(dtype) = self.product.op().bias else { return Ok(bias) };
        let Range { start, end } = self.columns;
        let (start, end) = (start * dtype.bytes(), end * dtype.bytes());
        if bias.len() < end {
            return Err(Error::BufferTooShort { operand: "bias", expected: end, got: bias.len() });
        }
        Ok(bias.slice(start..end)?)
    }

    fn run<'a>(
        &self,
        stream: &Stream,
        (x, weight): (XRef<'a>, &'a Weight),
        outputs: &mut [BufferMut<'_>],
        optional: [Option<BufferRef<'a>>; 6],
        workspace: &mut Workspace,
    ) -> Result<(), Error> {
        let (expected, got) = (self.segments.len(), outputs.len());
        let [first, others @ ..] = outputs else { return Err(Error::OutputsMismatch { expected, got }) };
        let Some(Copies { parts, all }) = &self.copies else {
            let args = with(Args::new(x, weight, first.reborrow()), optional);
            let others = others.iter_mut().map(BufferMut::reborrow);
            return self.product.run_segments(stream, args, others, Some(workspace.view()));
        };
        let why = "the plan keeps the outputs of all segments";
        let checks = Checks(self.product.device());
        let Some(workspace) = checks.workspace(Some(workspace.view()), all.end, why)? else { return Ok(()) };
        let (own, rest) = workspace.split_at(all.start)?;
        let mut sums = rest.slice(0..all.len())?;
        let args = with(Args::new(x, weight, sums.reborrow()), optional);
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

/// Launches of each product, then its copy steps.
impl fmt::Display for FusedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, group) in self.groups.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            group.product.fmt(f)?;
            let parts = group.copies.iter().flat_map(|copies| &copies.parts);
            parts.into_iter().try_for_each(|(conversion, _)| write!(f, "\n{conversion}"))?;
        }
        Ok(())
    }
}
