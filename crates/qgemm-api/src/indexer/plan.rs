//! [`IndexerPlan`]: ready kernels of one [`Indexer`].

use qgemm_formats::{DType, ElementType};
use qgemm_hal::{
    BufferMut, BufferRef, CheckedIndexer, DeviceInfo, Families, IndexerLaunch, IndexerOperand, IndexerResult, Paging,
    Stream,
};
use qgemm_sched::{Candidates, Preferences, SchedError, TunedTable, indexer};

use super::description::Indexer;
use crate::attention::extent_bytes;
use crate::context::Context;
use crate::error::Error;
use crate::operand::{Extent, WIDE_ACCESS};
use crate::planned::{Bound, Chosen, Planned, Wanted, explain};
use crate::record::{PlanRecord, Recorded, WorkspaceRegion};
use crate::workspace::Workspace;

/// Ready kernels of one [`Indexer`], from
/// [`Context::plan_indexer`]. Its text lists the launches of a
/// run.
pub type IndexerPlan = Planned<CheckedIndexer>;

/// Operands of one run of an [`IndexerPlan`].
#[derive(Debug)]
#[non_exhaustive]
pub struct IndexerArgs<'a> {
    /// Queries.
    pub q: BufferRef<'a>,
    /// Keys.
    pub k: BufferRef<'a>,
    /// Weights of the heads: f32 `[queries, heads]`.
    pub weights: BufferRef<'a>,
    /// Scale of each query head, for [`Indexer::q_scales`]: f32
    /// `[queries, heads]`.
    pub q_scales: Option<BufferRef<'a>>,
    /// Scale of each key, for E4M3: f32, `[keys]` or
    /// `[pages, page_size]`.
    pub k_scales: Option<BufferRef<'a>>,
    /// First visible key of each query, for [`Indexer::ranges`]: u32.
    pub starts: Option<BufferRef<'a>>,
    /// End of the visible keys of each query, for
    /// [`Indexer::ranges`]: u32.
    pub ends: Option<BufferRef<'a>>,
    /// Number of keys of each sequence, for [`Indexer::paged`]: u32.
    pub lengths: Option<BufferRef<'a>>,
    /// Page indices of each sequence, for [`Indexer::paged`]: u32.
    pub block_table: Option<BufferRef<'a>>,
    /// Output: f32 scores `[queries, keys]`, or i32 keys
    /// `[queries, count]` for [`Indexer::best`].
    pub result: BufferMut<'a>,
    /// Workspace of at least [`IndexerPlan::workspace_bytes`], when
    /// that is not 0.
    pub workspace: Option<&'a mut Workspace>,
}

impl<'a> IndexerArgs<'a> {
    /// Operands of every run. Methods add the other operands.
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

    /// With the lengths and pages of [`Indexer::paged`].
    pub fn pages(mut self, lengths: impl Into<BufferRef<'a>>, block_table: impl Into<BufferRef<'a>>) -> Self {
        (self.lengths, self.block_table) = (Some(lengths.into()), Some(block_table.into()));
        self
    }

    /// With the scales of [`Indexer::q_scales`].
    pub fn q_scales(mut self, q_scales: impl Into<BufferRef<'a>>) -> Self {
        self.q_scales = Some(q_scales.into());
        self
    }
}

impl Context {
    /// Chooses kernels for `indexer` and makes them ready. A known
    /// problem costs a lookup, as with [`Context::plan`].
    ///
    /// ```
    /// use qgemm_api::{Context, DType, Indexer, IndexerArgs, KvFormat};
    ///
    /// let ctx = Context::open("cpu")?;
    /// // One query of two heads, of which one counts twice; four keys, each of which one head matches, or none.
    /// let (one, two) = ([1.0f32; 16], [[1.0f32; 16], [-1.0; 16]]);
    /// let f16 = |rows: &[[f32; 16]]| DType::F16.encode(&rows.concat());
    /// let q = ctx.upload(&f16(&two))?;
    /// let k = ctx.upload(&f16(&[one, [0.0; 16], [-1.0; 16], [0.5; 16]]))?;
    /// let weights = ctx.upload(&[1.0f32, 2.0])?;
    /// let indexer = Indexer::new(KvFormat::Plain(DType::F16), 1, 2, 16, 4);
    ///
    /// let mut scores = ctx.allocate(4 * 4)?;
    /// let plan = ctx.plan_indexer(&indexer)?;
    /// plan.run(&ctx.default_stream(), IndexerArgs::new(&q, &k, &weights, &mut scores))?;
    /// assert_eq!(ctx.download::<f32>(&scores)?, [16.0, 0.0, 32.0, 8.0]);
    ///
    /// let mut best = ctx.allocate(3 * 4)?;
    /// let plan = ctx.plan_indexer(&indexer.best(3))?;
    /// let mut workspace = ctx.workspace(plan.workspace_bytes())?;
    /// plan.run(&ctx.default_stream(), IndexerArgs::new(&q, &k, &weights, &mut best).workspace(&mut workspace))?;
    /// assert_eq!(ctx.download::<u8>(&best)?, [2i32, 0, 3].map(i32::to_le_bytes).concat());
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the indexer is invalid or no family serves it, or when a
    /// kernel cannot be prepared.
    pub fn plan_indexer(&self, indexer: &Indexer) -> Result<IndexerPlan, Error> {
        Planned::new(self, indexer.check()?, Preferences::default())
    }

    /// Record of the choice of [`Context::plan_indexer`]: see
    /// [`Context::explain`].
    ///
    /// # Errors
    /// When the indexer is invalid.
    pub fn explain_indexer(&self, problem: &Indexer) -> Result<PlanRecord, Error> {
        explain(self, &problem.check()?, &Preferences::default())
    }
}

impl Chosen for CheckedIndexer {
    fn candidates(
        &self,
        info: &DeviceInfo,
        families: Families<Self>,
        _: &Preferences,
        _: &TunedTable,
    ) -> Result<Candidates<'static, Self>, SchedError> {
        Ok(indexer::candidates(self, info, families))
    }
}

impl Recorded for CheckedIndexer {
    fn workspace(&self, plan: &IndexerLaunch) -> Vec<WorkspaceRegion> {
        WorkspaceRegion::whole("scores", plan.config.workspace_bytes)
    }
}

impl Bound for CheckedIndexer {
    fn wanted(&self, operand: IndexerOperand, used: bool) -> Wanted {
        use IndexerOperand as O;
        let Paging { pages, page_size, width } = self.paging();
        let (sequences, _) = self.sequences();
        let of = |strides, counts, aligned: bool| {
            // `Indexer::check` has verified that the extents fit the address
            // space.
            let bytes = extent_bytes(strides, counts, self.features, self.format).unwrap_or(u64::MAX) as usize;
            Extent::new(self.format.element(), bytes, if aligned { WIDE_ACCESS } else { self.format.width() })
        };
        // Rows of words; the last row may be shorter.
        let rows = |count: usize, stride: u64, columns: usize| {
            let words = if count * columns == 0 { 0 } else { (count - 1) * stride as usize + columns };
            Extent::of_values(DType::F32, words)
        };
        let words =
            |name, count, why| Wanted::optional(name, used.then(|| Extent::of_values(ElementType::Int32, count)), why);
        let of_ranges = "the indexer has ranges of keys";
        let of_pages = "the indexer finds keys by a table";
        match operand {
            O::Q => Wanted::always(
                "q",
                of([0, self.q.token_stride, self.q.head_stride], [1, self.queries, self.heads], self.q.aligned),
            ),
            O::K => Wanted::always(
                "k",
                of([self.k.page_stride, self.k.row_stride, 0], [pages, page_size, 1], self.k.aligned),
            ),
            O::Weights => Wanted::always("weights", rows(self.queries, self.weights_stride, self.heads)),
            O::QScales => {
                let extent = self.q_scales.then(|| Extent::of_values(DType::F32, self.queries * self.heads));
                Wanted::optional("q scales", extent, "the indexer has scales of the queries")
            }
            O::KScales => {
                let extent = self.has_scales().then(|| rows(pages, self.k.scale_page_stride, page_size));
                Wanted::optional("k scales", extent, "E4M3 has scales")
            }
            O::Starts => words("starts", self.queries, of_ranges),
            O::Ends => words("ends", self.queries, of_ranges),
            O::Lengths => words("lengths", sequences, of_pages),
            O::BlockTable => words("block table", sequences * width, of_pages),
            O::Scores => {
                let extent = match self.result {
                    IndexerResult::Scores { row_stride } => Some(rows(self.queries, row_stride, self.most_keys())),
                    IndexerResult::Best { .. } => None,
                };
                Wanted::optional("scores", extent, "the indexer writes scores")
            }
            O::Indices => words("indices", self.queries * self.chosen(), "the indexer chooses keys"),
            O::Workspace => Wanted::workspace("the plan keeps scores of some queries"),
        }
    }
}

impl IndexerPlan {
    /// Submits the indexer to `stream`. A run allocates nothing,
    /// waits for nothing and takes no lock. A CUDA graph may capture
    /// it. Ranges, lengths and tables are read on the device at run
    /// time.
    ///
    /// # Errors
    /// When an operand is missing, too short, misaligned, unexpected
    /// or on another device; or on a device error. Nothing is written
    /// then.
    pub fn run(&self, stream: &Stream, args: IndexerArgs<'_>) -> Result<(), Error> {
        use IndexerOperand as O;
        let IndexerArgs { q, k, weights, q_scales, k_scales, starts, ends, lengths, block_table, result, workspace } =
            args;
        let mut run = self.start(stream)?;
        for (operand, view) in [(O::Q, q), (O::K, k), (O::Weights, weights)] {
            run.read(operand, view)?;
        }
        let output = match self.op().result {
            IndexerResult::Scores { .. } => O::Scores,
            IndexerResult::Best { .. } => O::Indices,
        };
        run.write(output, result)?;
        run.read(O::QScales, q_scales)?;
        run.read(O::KScales, k_scales)?;
        let index = [(O::Starts, starts), (O::Ends, ends), (O::Lengths, lengths), (O::BlockTable, block_table)];
        index.into_iter().try_for_each(|(operand, view)| run.read(operand, view))?;
        run.workspace(workspace.map(Workspace::view))?;
        run.launch(stream)
    }
}
