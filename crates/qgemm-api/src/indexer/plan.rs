//! [`IndexerPlan`]: kernels made ready for one [`Indexer`].

use std::fmt;
use std::sync::Arc;

use qgemm_formats::{DType, ElementType};
use qgemm_hal::{
    BufferMut, BufferRef, CheckedIndexer, Device, DeviceId, IndexerLaunch, IndexerOperand, IndexerResult, KernelId,
    LaunchSequence, Operands, Operation, Paging, Stream,
};
use qgemm_sched::indexer::choose;

use super::description::Indexer;
use crate::attention::extent_bytes;
use crate::error::Error;
use crate::operand::{Checks, Extent, WIDE_ACCESS};
use crate::plan_cache::{PlanCaches, Ready};
use crate::workspace::Workspace;

/// Kernels chosen and made ready for one [`Indexer`]; made by [`Context::plan_indexer`](crate::Context::plan_indexer). Its text says what a
/// run launches.
#[derive(Debug)]
pub struct IndexerPlan {
    op: CheckedIndexer,
    device: DeviceId,
    extents: Extents,
    /// None where there is no query, or nothing to write.
    ready: Option<Arc<Ready<CheckedIndexer>>>,
}

/// What a run asks of its buffers.
#[derive(Debug)]
struct Extents {
    q: Extent,
    k: Extent,
    weights: Extent,
    k_scales: Extent,
    scores: Extent,
    indices: Extent,
}

/// What one run of an [`IndexerPlan`] reads and writes.
#[derive(Debug)]
#[non_exhaustive]
pub struct IndexerArgs<'a> {
    /// Queries.
    pub q: BufferRef<'a>,
    /// Keys.
    pub k: BufferRef<'a>,
    /// Weights of the heads: f32 `[queries, heads]`.
    pub weights: BufferRef<'a>,
    /// What each head of a query is multiplied with, for [`Indexer::q_scales`]: f32 `[queries, heads]`.
    pub q_scales: Option<BufferRef<'a>>,
    /// What each key is multiplied with, for E4M3: f32, `[keys]` or `[pages, page_size]`.
    pub k_scales: Option<BufferRef<'a>>,
    /// First key that each query sees, for [`Indexer::ranges`]: u32.
    pub starts: Option<BufferRef<'a>>,
    /// Where the keys that each query sees end, for [`Indexer::ranges`]: u32.
    pub ends: Option<BufferRef<'a>>,
    /// How many keys each sequence has, for [`Indexer::paged`]: u32.
    pub lengths: Option<BufferRef<'a>>,
    /// The pages of each sequence, for [`Indexer::paged`]: u32.
    pub block_table: Option<BufferRef<'a>>,
    /// Written: f32 scores, `[queries, keys]`; or for [`Indexer::best`], i32 keys, `[queries, count]`.
    pub result: BufferMut<'a>,
    /// At least [`IndexerPlan::workspace_bytes`], when that is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

impl<'a> IndexerArgs<'a> {
    /// What every run has; the others are fields to set.
    pub fn new(
        q: impl Into<BufferRef<'a>>,
        k: impl Into<BufferRef<'a>>,
        weights: impl Into<BufferRef<'a>>,
        result: impl Into<BufferMut<'a>>,
    ) -> Self {
        Self {
            q: q.into(),
            k: k.into(),
            weights: weights.into(),
            q_scales: None,
            k_scales: None,
            starts: None,
            ends: None,
            lengths: None,
            block_table: None,
            result: result.into(),
            workspace: None,
        }
    }

    /// With scales of the keys.
    pub fn k_scales(mut self, scales: impl Into<BufferRef<'a>>) -> Self {
        self.k_scales = Some(scales.into());
        self
    }

    /// With first keys and ends.
    pub fn ranges(mut self, starts: impl Into<BufferRef<'a>>, ends: impl Into<BufferRef<'a>>) -> Self {
        (self.starts, self.ends) = (Some(starts.into()), Some(ends.into()));
        self
    }

    /// With a workspace.
    pub fn workspace(mut self, workspace: &'a mut Workspace) -> Self {
        self.workspace = Some(workspace);
        self
    }
}

impl IndexerPlan {
    pub(crate) fn new(device: &dyn Device, caches: &PlanCaches, indexer: &Indexer) -> Result<Self, Error> {
        let op = indexer.check()?;
        let make = || {
            let CheckedIndexer { queries, heads, features, .. } = op;
            let _span = tracing::info_span!("plan", queries, heads, features).entered();
            let (family, plan) = choose(&op, device.info(), device.catalog().indexer)?;
            Ready::prepare(device, &op, family, plan, plan.config.math)
        };
        let ready = if op.is_nothing() { None } else { Some(caches.indexer.get_or_make(&op, make)?) };
        Ok(Self { device: device.info().id, extents: extents(&op), ready, op })
    }

    /// Bytes of workspace that [`IndexerPlan::run`] needs: for scores of some queries, where keys are chosen.
    pub fn workspace_bytes(&self) -> usize {
        self.launch().map_or(0, |launch| launch.config.workspace_bytes)
    }

    /// Name of the chosen kernels.
    pub fn kernel_name(&self) -> &str {
        self.sequence().map_or("none", LaunchSequence::name)
    }

    /// Identity of the kernel that scores; none where there is nothing to do.
    pub fn kernel_id(&self) -> Option<KernelId> {
        self.launch().map(|launch| launch.config.kernel)
    }

    /// The chosen configuration; none where there is nothing to do.
    pub fn launch(&self) -> Option<&IndexerLaunch> {
        self.ready.as_ref().map(|ready| &ready.plan)
    }

    /// The kernels that a run launches, in order; none where there is nothing to do.
    pub fn sequence(&self) -> Option<&LaunchSequence> {
        self.ready.as_ref().map(|ready| &ready.sequence)
    }

    /// The validated operation.
    pub fn op(&self) -> &CheckedIndexer {
        &self.op
    }

    /// Bytes that a run moves at least, where every query sees every key.
    pub fn bytes(&self) -> f64 {
        self.op.traffic()
    }

    /// Floating-point operations of a run, where every query sees every key.
    pub fn flops(&self) -> f64 {
        2.0 * self.op.macs()
    }

    /// The device that the plan is for.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Submits the indexer to `stream`. Allocates nothing, waits for nothing and takes no lock, so it may be captured in a CUDA graph;
    /// ranges, lengths and tables are read on the device when it runs.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, on another device or not part of the indexer, or a device error. Nothing has
    /// been written then.
    pub fn run(&self, stream: &Stream, args: IndexerArgs<'_>) -> Result<(), Error> {
        use IndexerOperand as O;
        let IndexerArgs { q, k, weights, q_scales, k_scales, starts, ends, lengths, block_table, result, workspace } =
            args;
        let (op, extents) = (&self.op, &self.extents);
        let checks = Checks(self.device);
        checks.device("stream", stream.device())?;
        checks.view("q", q, extents.q)?;
        checks.view("k", k, extents.k)?;
        checks.view("weights", weights, extents.weights)?;
        let (output, name, extent) = match op.result {
            IndexerResult::Scores { .. } => (O::Scores, "scores", extents.scores),
            IndexerResult::Best { .. } => (O::Indices, "indices", extents.indices),
        };
        checks.view(name, result.view(), extent)?;
        let used = op.operands();
        let of = |operand: O, element: ElementType, count: usize| {
            used.contains(&operand).then(|| Extent::of_values(element, count))
        };
        let words = |operand, count| of(operand, ElementType::Int32, count);
        let (sequences, _) = op.sequences();
        let of_ranges = "the indexer has ranges of keys";
        let of_pages = "the indexer finds keys by a table";
        let of_heads = "the indexer has scales of the queries";
        let table = sequences * op.paging().width;
        let index = [
            (O::QScales, "q scales", q_scales, of(O::QScales, DType::F32.into(), op.queries * op.heads), of_heads),
            (O::KScales, "k scales", k_scales, op.has_scales().then_some(extents.k_scales), "E4M3 has scales"),
            (O::Starts, "starts", starts, words(O::Starts, op.queries), of_ranges),
            (O::Ends, "ends", ends, words(O::Ends, op.queries), of_ranges),
            (O::Lengths, "lengths", lengths, words(O::Lengths, sequences), of_pages),
            (O::BlockTable, "block table", block_table, words(O::BlockTable, table), of_pages),
        ];
        let mut operands = Operands::new();
        for (operand, view) in [(O::Q, q), (O::K, k), (O::Weights, weights)] {
            operands.read(operand, view);
        }
        for (operand, name, view, extent, why) in index {
            operands.read_if_any(operand, checks.optional(name, view, extent, why)?);
        }
        operands.write(output, result);
        let why = "the plan keeps scores of some queries";
        if let Some(workspace) = checks.workspace(workspace.map(Workspace::view), self.workspace_bytes(), why)? {
            operands.write(O::Workspace, workspace);
        }
        let Some(ready) = &self.ready else { return Ok(()) };
        let _span = tracing::trace_span!("launch", kernel = self.kernel_name()).entered();
        Ok(ready.sequence.run_for(&self.op, stream, operands)?)
    }
}

fn extents(op: &CheckedIndexer) -> Extents {
    let Paging { pages, page_size, .. } = op.paging();
    let alignment = |aligned: bool| if aligned { WIDE_ACCESS } else { op.format.width() };
    let of = |strides, counts, aligned| {
        // `Indexer::check` found that they fit the address space.
        let bytes = extent_bytes(strides, counts, op.features, op.format).unwrap_or(u64::MAX) as usize;
        Extent::new(op.format.element(), bytes, alignment(aligned))
    };
    // Rows of words, the last of which may end early.
    let rows = |count: usize, stride: u64, columns: usize| {
        let words = if count * columns == 0 { 0 } else { (count - 1) * stride as usize + columns };
        Extent::of_values(DType::F32, words)
    };
    let scores = match op.result {
        IndexerResult::Scores { row_stride } => rows(op.queries, row_stride, op.most_keys()),
        IndexerResult::Best { .. } => Extent::of_values(DType::F32, 0),
    };
    Extents {
        q: of([0, op.q.token_stride, op.q.head_stride], [1, op.queries, op.heads], op.q.aligned),
        k: of([op.k.page_stride, op.k.row_stride, 0], [pages, page_size, 1], op.k.aligned),
        weights: rows(op.queries, op.weights_stride, op.heads),
        k_scales: rows(pages, op.k.scale_page_stride, page_size),
        scores,
        indices: Extent::of_values(ElementType::Int32, op.queries * op.chosen()),
    }
}

/// What was chosen, and the launches of a run: each with its kernel, geometry and operands.
impl fmt::Display for IndexerPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CheckedIndexer { queries, heads, features, .. } = self.op;
        write!(f, "{} for {queries} queries of {heads} heads of {features} features, ", self.kernel_name())?;
        write!(f, "up to {} keys, on {}", self.op.most_keys(), self.device)?;
        let Some(ready) = &self.ready else { return f.write_str(", nothing to do") };
        let IndexerLaunch { config, estimate } = ready.plan;
        let mut given = self.op.operands();
        if config.workspace_bytes > 0 {
            given.push(IndexerOperand::Workspace);
        }
        writeln!(f, ", {} bytes of workspace, expected to take {:.1} µs", config.workspace_bytes, estimate * 1e6)?;
        ready.sequence.display_with(&given).fmt(f)
    }
}
