//! `indexer`: a scoring kernel with one key per invocation, and a
//! top-k kernel over scores in the workspace.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::dtype_code;
use qgemm_hal::{
    CheckedIndexer, Device, DeviceInfo, Families, Family, Geometry, HalError, IndexerConfig, IndexerKeys,
    IndexerLaunch, IndexerOperand, IndexerResult, IndexerSpec, IndexerStep, Kernel, KernelId, KvFormat, LaunchSequence,
    LaunchStep, Math, Operand, Operands, Operation, Paging, Spec, Stream, Unsupported, WorkspaceLayout,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, stride, submit, too_large};
use super::operands::{Bound, Touched};
use crate::device::shared_of;
use crate::event::WgpuStream;
use crate::pipeline::{Compiled, Interface};
use crate::shader::{INDEXER_TEXTS, Shader, compose_indexer};
use crate::shared::Shared;
use crate::source_hash::hash_of;

/// wgpu families of `indexer`.
pub(super) const FAMILIES: Families<CheckedIndexer> = &[&Indexer];

/// Interface of the scoring kernel: the operands of
/// `shaders/indexer_score.wgsl`.
pub(crate) const SCORE_INTERFACE: Interface =
    Interface { name: NAME, bindings: "rrrrrrrw", params_bytes: size_of::<Params>() as u32 };

/// Interface of the top-k kernel: the operands of
/// `shaders/indexer_choose.wgsl`.
pub(crate) const CHOOSE_INTERFACE: Interface =
    Interface { name: "indexer_choose", bindings: "rrrw", params_bytes: size_of::<Params>() as u32 };

/// Family name.
const NAME: &str = "indexer";
/// Invocations of a scoring workgroup, and its keys.
const SCORE_THREADS: u32 = 64;
/// Invocations of a top-k workgroup.
const CHOOSE_THREADS: u32 = 128;
/// Bytes of a weight, scale, length, page number, score or index.
const WORD: usize = 4;
/// Bits of a masked key's score: −∞, or for top-k a
/// value that no score has.
const MASKED_SCORE: [u32; 2] = [0xff80_0000, u32::MAX];

static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| hash_of(INDEXER_TEXTS));

/// `Params` of `shaders/indexer_params.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    q_base: u32,
    k_base: u32,
    weights_base: u32,
    q_scales_base: u32,
    k_scales_base: u32,
    starts_base: u32,
    ends_base: u32,
    scores_base: u32,
    indices_base: u32,
    first_query: u32,
    part_queries: u32,
    each: u32,
    most_keys: u32,
    key_groups: u32,
    pages: u32,
    page_size: u32,
    table_width: u32,
    scores_row: u32,
    masked_score: u32,
    chosen: u32,
}

/// The kernel family.
#[derive(Debug)]
struct Indexer;

fn kernel_id(op: &CheckedIndexer, step: IndexerStep) -> KernelId {
    let spec = IndexerSpec::of(step, op.format, op.features as u32, SCORE_THREADS);
    KernelId::new(NAME, None, Spec::Indexer(spec))
}

/// Bytes of each operand.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    q: usize,
    k: usize,
    weights: usize,
    q_scales: usize,
    k_scales: usize,
    /// Starts and ends, or lengths and the block table.
    index: [usize; 2],
}

impl Sizes {
    fn of(op: &CheckedIndexer) -> Self {
        let Paging { pages, page_size, width } = op.paging();
        let last_q = (op.queries - 1) * op.q.token_stride as usize + (op.heads - 1) * op.q.head_stride as usize;
        let (has_rows, last_page) = (pages > 0 && page_size > 0, pages.max(1) - 1);
        let last_k = last_page * op.k.page_stride as usize + (page_size.max(1) - 1) * op.k.row_stride as usize;
        let scales = last_page * op.k.scale_page_stride as usize + page_size;
        let (sequences, _) = op.sequences();
        Self {
            q: op.format.bytes_of(last_q + op.features),
            k: if has_rows { op.format.bytes_of(last_k + op.features) } else { 0 },
            weights: ((op.queries - 1) * op.weights_stride as usize + op.heads) * WORD,
            q_scales: if op.q_scales { op.queries * op.heads * WORD } else { 0 },
            k_scales: if has_rows && op.has_scales() { scales * WORD } else { 0 },
            index: match op.keys {
                IndexerKeys::Pages { .. } => [sequences * WORD, sequences * width * WORD],
                IndexerKeys::Rows { ranges: true, .. } => [op.queries * WORD; 2],
                _ => [0; 2],
            },
        }
    }
}

/// Row stride of scores.
fn scores_row(op: &CheckedIndexer) -> usize {
    match op.result {
        IndexerResult::Scores { row_stride } => row_stride as usize,
        IndexerResult::Best { .. } => op.kept_stride(),
    }
}

/// Queries of a launch.
#[derive(Clone, Copy, Debug)]
struct Part {
    first: usize,
    queries: usize,
}

impl Part {
    fn grid(self, groups_of_query: usize) -> [u32; 3] {
        // `check` checked that the count fits.
        let groups = (self.queries * groups_of_query) as u32;
        let x = groups.min(MAX_GROUPS);
        [x, groups.div_ceil(x.max(1)), 1]
    }

    /// Bytes up to the last score.
    fn score_bytes(self, op: &CheckedIndexer) -> usize {
        ((self.queries - 1) * scores_row(op) + op.most_keys()) * WORD
    }
}

fn key_groups(op: &CheckedIndexer) -> usize {
    op.most_keys().div_ceil(SCORE_THREADS as usize)
}

/// Queries whose scores fit in a binding.
fn part_queries(op: &CheckedIndexer, limit: u64) -> usize {
    let most_bytes = limit.saturating_sub(MARGIN + WorkspaceLayout::RESERVED as u64);
    op.part_queries(usize::try_from(most_bytes).unwrap_or(usize::MAX))
}

/// Checks that the kernels support `op`.
fn check(op: &CheckedIndexer, limit: u64) -> Result<(), Unsupported> {
    if !matches!(op.keys, IndexerKeys::Rows { .. } | IndexerKeys::Pages { .. }) {
        return Err(Unsupported::new(format!("reads keys in rows or pages, and these are {:?}", op.keys)));
    }
    let Sizes { q, k, weights, q_scales, k_scales, index: [starts, ends] } = Sizes::of(op);
    let queries = if op.chosen() > 0 { part_queries(op, limit) } else { op.queries };
    let sizes = [
        ("the queries", q),
        ("the keys", k),
        ("the weights", weights),
        ("the scales of the queries", q_scales),
        ("the scales of the keys", k_scales),
        ("the starts or lengths", starts),
        ("the ends or the block table", ends),
        ("the scores", Part { first: 0, queries }.score_bytes(op)),
        ("the indices", op.queries * op.chosen() * WORD),
    ];
    if let Some((name, bytes)) = sizes.into_iter().find(|(_, bytes)| *bytes as u64 + MARGIN > limit) {
        return Err(too_large(name, bytes as u64, limit));
    }
    if key_groups(op).checked_mul(queries).is_none_or(|groups| groups >= 1 << 31) {
        return Err(Unsupported::new("counts workgroups in 31 bits: ask for fewer queries at once"));
    }
    Ok(())
}

impl Family<CheckedIndexer> for Indexer {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedIndexer, info: &DeviceInfo) -> Result<Vec<IndexerConfig>, Unsupported> {
        check(op, info.max_buffer_bytes)?;
        let chooses = op.chosen() > 0;
        let part_queries = if chooses { part_queries(op, info.max_buffer_bytes) } else { op.queries };
        let parts = op.queries.div_ceil(part_queries) as u32;
        // Adapters do not report bandwidth, and there is no
        // other family to rank against.
        Ok(vec![IndexerConfig {
            kernel: kernel_id(op, if op.most_keys() > 0 { IndexerStep::Score } else { IndexerStep::Choose }),
            launches: parts * (u32::from(op.most_keys() > 0) + u32::from(chooses)),
            part_queries,
            workspace_bytes: if chooses { op.score_bytes(part_queries) } else { 0 },
            math: Math::FmaF32,
            padding: 1.0,
            efficiency: (500, 300),
        }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedIndexer,
        plan: &IndexerLaunch,
    ) -> Result<LaunchSequence, HalError> {
        let shared = shared_of(device, "an indexer on the wgpu backend")?;
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: shared.id, what: NAME.to_owned(), why: reason.why };
        check(op, device.info().max_buffer_bytes).map_err(refused)?;
        let part_queries = plan.config.part_queries.max(1);
        let mut steps = Vec::new();
        for first in (0..op.queries).step_by(part_queries) {
            let part = Part { first, queries: (op.queries - first).min(part_queries) };
            for chooses in [false, true] {
                let is_wanted = if chooses { op.chosen() > 0 } else { op.most_keys() > 0 };
                if is_wanted {
                    steps.push(step(shared, op, part, chooses)?);
                }
            }
        }
        Ok(LaunchSequence::new::<IndexerOperand>(format!("{NAME}_{}", op.format), steps))
    }

    fn source_hash(&self, _: &CheckedIndexer, _: &IndexerConfig) -> u64 {
        *SOURCE_HASH
    }
}

fn step(shared: &Arc<Shared>, op: &CheckedIndexer, part: Part, chooses: bool) -> Result<LaunchStep, HalError> {
    use IndexerOperand as O;
    let interface = if chooses { &CHOOSE_INTERFACE } else { &SCORE_INTERFACE };
    let compiled = Compiled::new(shared, interface, interface.name.to_owned(), shader(op, chooses))?;
    let (groups, threads, step) = if chooses {
        (1, CHOOSE_THREADS, IndexerStep::Choose)
    } else {
        (key_groups(op), SCORE_THREADS, IndexerStep::Score)
    };
    let geometry = Geometry { grid: part.grid(groups), threads, shared_bytes: 0 };
    let kernel = PartKernel { compiled, shared: shared.clone(), op: op.clone(), part, chooses, grid: geometry.grid };
    let step = LaunchStep::new::<O>(kernel_id(op, step), geometry, Arc::new(kernel));
    let is_bound = |operand: &O| match operand {
        O::Lengths | O::BlockTable | O::Starts | O::Ends => true,
        O::Indices => chooses,
        _ => !chooses,
    };
    let step = step.bind_all(op.operands().into_iter().filter(is_bound));
    Ok(match op.chosen() {
        0 => step,
        _ => step.bind_part(O::Workspace, O::Workspace, WorkspaceLayout::RESERVED..op.score_bytes(part.queries)),
    })
}

/// The shader of a kernel. Values that differ between plans
/// of a model are parameters.
fn shader(op: &CheckedIndexer, chooses: bool) -> Shader {
    let dtype = match op.format {
        KvFormat::Plain(dtype) => dtype,
        _ => DType::F16,
    };
    let Paging { pages, page_size, .. } = op.paging();
    let words = [
        ("THREADS", if chooses { CHOOSE_THREADS } else { SCORE_THREADS }),
        ("HEADS", op.heads as u32),
        ("FEATURES", op.features as u32),
        ("DTYPE", dtype_code(dtype)),
        ("Q_TOKEN", stride(op.queries, op.q.token_stride)),
        ("Q_HEAD", stride(op.heads, op.q.head_stride)),
        ("WEIGHTS_ROW", stride(op.queries, op.weights_stride)),
        ("K_PAGE", stride(pages, op.k.page_stride)),
        ("K_ROW", stride(page_size, op.k.row_stride)),
        ("K_SCALE_PAGE", stride(pages, op.k.scale_page_stride)),
    ];
    let choices = [
        ("E4M3", !op.format.is_plain()),
        ("Q_SCALES", op.q_scales),
        ("K_SCALES", op.has_scales()),
        ("RANGES", matches!(op.keys, IndexerKeys::Rows { ranges: true, .. })),
        ("PAGES", matches!(op.keys, IndexerKeys::Pages { .. })),
    ];
    compose_indexer(&words, &choices, chooses)
}

/// One of the kernels. A launch allocates no device memory.
#[derive(Debug)]
struct PartKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedIndexer,
    part: Part,
    chooses: bool,
    grid: [u32; 3],
}

impl PartKernel {
    fn dispatch<'a>(&'a self, operands: &'a Operands<'a>) -> Result<Dispatch<'a, Params>, HalError> {
        use IndexerOperand as O;
        let Self { shared, op, part, chooses, grid, .. } = self;
        let Paging { pages, page_size, width } = op.paging();
        let (_, each) = op.sequences();
        let mut p = Params {
            first_query: part.first as u32,
            part_queries: part.queries as u32,
            each: each as u32,
            most_keys: op.most_keys() as u32,
            key_groups: key_groups(op) as u32,
            pages: pages as u32,
            page_size: page_size as u32,
            table_width: width as u32,
            scores_row: scores_row(op) as u32,
            masked_score: MASKED_SCORE[usize::from(op.chosen() > 0)],
            chosen: op.chosen() as u32,
            ..Params::default()
        };
        let touched = |operand: O, bytes: Range<usize>, width: usize| Touched {
            what: operand.name(),
            view: operands.get(operand),
            bytes,
            width,
        };
        let words =
            |operand: O, bytes: usize| -> Result<Bound<'a>, HalError> { touched(operand, 0..bytes, WORD).bind(shared) };
        let sizes = Sizes::of(op);
        let is_paged = matches!(op.keys, IndexerKeys::Pages { .. });
        let [of_starts, of_ends] = if is_paged { [O::Lengths, O::BlockTable] } else { [O::Starts, O::Ends] };
        let (starts, ends);
        (starts, p.starts_base) = words(of_starts, sizes.index[0])?;
        (ends, p.ends_base) = words(of_ends, sizes.index[1])?;
        let kept = if op.chosen() > 0 { O::Workspace } else { O::Scores };
        let of_scores = touched(kept, 0..if op.most_keys() > 0 { part.score_bytes(op) } else { 0 }, WORD);
        let bindings = if *chooses {
            let (scores, indices);
            (scores, p.scores_base) = of_scores.bind(shared)?;
            let bytes = op.queries * op.chosen() * WORD;
            (indices, p.indices_base) = touched(O::Indices, 0..bytes, WORD).bind_written(shared)?;
            vec![scores, starts, ends, indices]
        } else {
            let width = op.format.width();
            let (q, k, weights, q_scales, k_scales, scores);
            (q, p.q_base) = touched(O::Q, 0..sizes.q, width).bind(shared)?;
            (k, p.k_base) = touched(O::K, 0..sizes.k, width).bind(shared)?;
            (weights, p.weights_base) = words(O::Weights, sizes.weights)?;
            (q_scales, p.q_scales_base) = words(O::QScales, sizes.q_scales)?;
            (k_scales, p.k_scales_base) = words(O::KScales, sizes.k_scales)?;
            (scores, p.scores_base) = of_scores.bind_written(shared)?;
            vec![q, k, weights, q_scales, k_scales, starts, ends, scores]
        };
        Ok(Dispatch { params: p, bindings, grid: *grid })
    }
}

impl Kernel for PartKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let dispatch = self.dispatch(&operands)?;
        let interface = if self.chooses { &CHOOSE_INTERFACE } else { &SCORE_INTERFACE };
        submit(&self.shared, interface, &self.compiled, &[dispatch])
    }
}

/// Shaders of plans with all options and with none, for the
/// test that all shaders are valid.
#[cfg(test)]
pub(crate) fn all_shaders() -> Vec<Shader> {
    use qgemm_hal::{HeadRows, IndexerRows};
    let plain = CheckedIndexer {
        queries: 3,
        heads: 9,
        features: 48,
        format: KvFormat::Plain(DType::BF16),
        keys: IndexerKeys::Rows { rows: 100, ranges: false },
        q: HeadRows { token_stride: 512, head_stride: 48, aligned: true },
        q_scales: false,
        weights_stride: 9,
        k: IndexerRows { page_stride: 0, row_stride: 48, scale_page_stride: 0, aligned: true },
        result: IndexerResult::Best { count: 7 },
    };
    let pages = IndexerKeys::Pages { sequences: 3, each: 1, pages: 9, page_size: 5, width: 3 };
    let ranges = IndexerKeys::Rows { rows: 100, ranges: true };
    let scaled = CheckedIndexer { keys: pages, format: KvFormat::E4M3, q_scales: true, ..plain.clone() };
    let halves = CheckedIndexer { keys: ranges, format: KvFormat::Plain(DType::F16), ..plain.clone() };
    [plain, scaled, halves].iter().flat_map(|op| [false, true].map(|chooses| shader(op, chooses))).collect()
}
