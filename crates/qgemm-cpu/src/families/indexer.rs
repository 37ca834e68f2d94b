//! Families of `indexer`: a single one. A task scores a block
//! of keys for some queries of a sequence. For top-k, scores
//! of some queries are kept in the workspace, and a task
//! selects keys for one query.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use qgemm_formats::float8::e4m3_to_f32;
use qgemm_hal::op::indexer::MOST_CHOSEN;
use qgemm_hal::{
    BufferMut, CheckedIndexer, Device, DeviceId, DeviceInfo, Families, Family, Geometry, HalError, HostMemory,
    HostStream, IndexerConfig, IndexerKeys, IndexerLaunch, IndexerOperand, IndexerResult, IndexerSpec, IndexerStep,
    Kernel, KernelId, KvFormat, LaunchSequence, LaunchStep, Math, Operand, Operands, Operation, Paging, Spec, Stream,
    Unsupported, WorkspaceLayout,
};
use rayon::prelude::*;

use crate::arena;
use crate::operand::{absent, host_bytes, read};
use crate::pool::Pool;
use crate::processor::Processor;
use crate::simd::{LANES, Simd};
use crate::source_hash::SOURCE_HASH;

/// Multiply-adds below which only the calling thread works,
/// because waking others takes longer.
const SERIAL: f64 = 65536.0;
/// Keys of a task. A query is converted
/// once for all of them.
const BLOCK_KEYS: usize = 256;
/// Keys in the L1 cache at a time.
const TILE_KEYS: usize = 64;
/// Maximum queries of a task. Keys are converted
/// once for all of them.
const BLOCK_QUERIES: usize = 16;
/// Heads of a query that are processed together.
const TILE_HEADS: usize = 64;

/// Families of the CPU.
pub const FAMILIES: Families<CheckedIndexer> = &[&INDEXER];

/// The family `indexer`.
pub static INDEXER: IndexerFamily = IndexerFamily;

/// f32 products and a partial sort.
#[derive(Debug)]
pub struct IndexerFamily;

impl Family<CheckedIndexer> for IndexerFamily {
    fn name(&self) -> &'static str {
        "indexer"
    }

    fn configs(&self, op: &CheckedIndexer, info: &DeviceInfo) -> Result<Vec<IndexerConfig>, Unsupported> {
        let spec = IndexerSpec::of(IndexerStep::Index, op.format, op.features as u32, BLOCK_KEYS as u32);
        let chooses = op.chosen() > 0;
        let most_bytes = usize::try_from(info.max_buffer_bytes).unwrap_or(usize::MAX);
        let part_queries = if chooses { op.part_queries(most_bytes) } else { op.queries };
        Ok(vec![IndexerConfig {
            kernel: KernelId::new(self.name(), None, Spec::Indexer(spec)),
            launches: 1,
            part_queries,
            workspace_bytes: if chooses { op.score_bytes(part_queries) } else { 0 },
            math: Math::FmaF32,
            padding: 1.0,
            efficiency: (700, 500),
        }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedIndexer,
        plan: &IndexerLaunch,
    ) -> Result<LaunchSequence, HalError> {
        let cpu = Processor::of(device)?;
        let part_queries = plan.config.part_queries;
        let kernel = CpuIndexer { op: op.clone(), part_queries, simd: cpu.simd(), pool: cpu.pool().clone() };
        let tasks = u32::try_from(kernel.tasks(0, op.queries.min(part_queries))).unwrap_or(u32::MAX);
        let geometry = Geometry { grid: [tasks, 1, 1], threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<IndexerOperand>(plan.config.kernel, geometry, Arc::new(kernel)).of_operation();
        Ok(LaunchSequence::new::<IndexerOperand>(format!("indexer_{}", op.format), vec![step]))
    }

    fn source_hash(&self, _: &CheckedIndexer, _: &IndexerConfig) -> u64 {
        SOURCE_HASH
    }
}

/// The family's loops, prepared for one operation.
struct CpuIndexer {
    op: CheckedIndexer,
    part_queries: usize,
    simd: &'static Simd,
    pool: Pool,
}

impl std::fmt::Debug for CpuIndexer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuIndexer").field("op", &self.op).finish_non_exhaustive()
    }
}

impl CpuIndexer {
    /// Key blocks, and query blocks of `queries` queries from `first` on.
    /// No block has queries of two sequences.
    fn blocks(&self, first: usize, queries: usize) -> (usize, usize) {
        let (_, each) = self.op.sequences();
        let of_sequence = each.min(queries).div_ceil(BLOCK_QUERIES);
        let sequences = (first + queries).div_ceil(each) - first / each;
        (self.op.most_keys().div_ceil(BLOCK_KEYS), sequences * of_sequence)
    }

    fn tasks(&self, first: usize, queries: usize) -> usize {
        let (of_keys, of_queries) = self.blocks(first, queries);
        of_keys * of_queries
    }
}

impl Kernel for CpuIndexer {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let job = Job::new(self, operands)?;
        self.pool.share(self.op.macs() >= SERIAL, |threads| job.run(threads));
        Ok(())
    }
}

/// An operation with bound operands.
struct Job<'a> {
    indexer: &'a CpuIndexer,
    q: &'a [u8],
    k: &'a [u8],
    weights: &'a [f32],
    q_scales: Option<&'a [f32]>,
    k_scales: Option<&'a [f32]>,
    ranges: Option<[&'a [u32]; 2]>,
    pages: Option<[&'a [u32]; 2]>,
    /// Scores of a part of the queries, with row stride `row_stride`.
    scores: Written<'a, f32>,
    row_stride: usize,
    indices: Option<Written<'a, i32>>,
}

impl<'a> Job<'a> {
    fn new(indexer: &'a CpuIndexer, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use IndexerOperand as O;
        let op = &indexer.op;
        let Paging { pages, page_size, width } = op.paging();
        let mut numbers = |operand: O, rows: usize, last: usize| -> Result<&'a [u8], HalError> {
            let end = if rows > 0 { op.format.bytes_of(last + op.features) } else { 0 };
            let what = operand.name();
            let bytes = host_bytes(operands.take(operand).ok_or(absent(what, end))?, what)?;
            if bytes.len() < end { Err(absent(what, end)) } else { Ok(bytes) }
        };
        let last_q = (op.queries - 1) * op.q.token_stride as usize + (op.heads - 1) * op.q.head_stride as usize;
        let q = numbers(O::Q, op.queries, last_q)?;
        let k = numbers(O::K, pages * page_size, k_element(op, pages.max(1) - 1, page_size.max(1) - 1))?;
        let given = op.operands();
        let mut floats = |operand: O, count: usize| match given.contains(&operand) {
            true => read::<f32>(&mut operands, operand, count).map(Some),
            false => Ok(None),
        };
        let weights = floats(O::Weights, (op.queries - 1) * op.weights_stride as usize + op.heads)?.unwrap_or_default();
        let q_scales = floats(O::QScales, op.queries * op.heads)?;
        let scales = if pages == 0 { 0 } else { (pages - 1) * op.k.scale_page_stride as usize + page_size };
        let k_scales = floats(O::KScales, scales)?;
        let mut words = |operand: O, count: usize| match given.contains(&operand) {
            true => read::<u32>(&mut operands, operand, count).map(Some),
            false => Ok(None),
        };
        let ranges = words(O::Starts, op.queries)?.zip(words(O::Ends, op.queries)?).map(<[_; 2]>::from);
        let (sequences, _) = op.sequences();
        let pages = words(O::Lengths, sequences)?.zip(words(O::BlockTable, sequences * width)?).map(<[_; 2]>::from);
        let (scores, row_stride, indices) = match op.result {
            IndexerResult::Scores { row_stride } => {
                let end = (op.queries - 1) * row_stride as usize + op.most_keys();
                (Written::new(operands.take_mut(O::Scores), O::Scores.name(), 0, end)?, row_stride as usize, None)
            }
            IndexerResult::Best { count } => {
                let end = indexer.part_queries * op.kept_stride();
                let kept = operands.take_mut(O::Workspace);
                let scores = Written::new(kept, O::Workspace.name(), WorkspaceLayout::RESERVED, end)?;
                let indices = Written::new(operands.take_mut(O::Indices), O::Indices.name(), 0, op.queries * count)?;
                (scores, op.kept_stride(), Some(indices))
            }
        };
        Ok(Self { indexer, q, k, weights, q_scales, k_scales, ranges, pages, scores, row_stride, indices })
    }

    fn run(&self, threads: usize) {
        let CpuIndexer { op, part_queries, .. } = self.indexer;
        let each = |tasks: usize, work: &(dyn Fn(usize) + Sync)| match threads {
            1 => (0..tasks).for_each(work),
            _ => (0..tasks).into_par_iter().with_max_len(1).for_each(work),
        };
        for first in (0..op.queries).step_by(*part_queries) {
            let queries = (op.queries - first).min(*part_queries);
            each(self.indexer.tasks(first, queries), &|task| self.score(first, queries, task));
            if let Some(indices) = &self.indices {
                each(queries, &|query| self.choose(first + query, query, indices));
            }
        }
    }

    /// Visible keys of a query.
    fn visible(&self, query: usize) -> Range<usize> {
        let op = &self.indexer.op;
        let most = op.most_keys();
        if let Some([starts, ends]) = self.ranges {
            let end = (ends[query] as usize).min(most);
            return (starts[query] as usize).min(end)..end;
        }
        let IndexerKeys::Pages { each, .. } = op.keys else { return 0..most };
        let length = self.pages.map_or(0, |[lengths, _]| (lengths[query / each] as usize).min(most));
        0..(length + query % each + 1).saturating_sub(each)
    }

    /// Page and row of key `key` of a sequence; `None` when
    /// the table has no valid page.
    fn place(&self, sequence: usize, key: usize) -> Option<(usize, usize)> {
        let Paging { pages, page_size, width } = self.indexer.op.paging();
        let Some([_, table]) = self.pages else { return Some((0, key)) };
        let page = table[sequence * width + key / page_size] as usize;
        (page < pages).then_some((page, key % page_size))
    }

    /// Scores of a block of keys for a block of the
    /// `queries` queries from `first` on.
    fn score(&self, first: usize, queries: usize, task: usize) {
        let CpuIndexer { op, simd, .. } = self.indexer;
        let (_, each) = op.sequences();
        let (of_keys, _) = self.indexer.blocks(first, queries);
        let of_sequence = each.min(queries).div_ceil(BLOCK_QUERIES);
        let (block, key) = (task / of_keys, task % of_keys * BLOCK_KEYS);
        let sequence = first / each + block / of_sequence;
        let from = sequence * each + block % of_sequence * BLOCK_QUERIES;
        // A part begins within a sequence only if
        // there is one sequence.
        let from = if each > queries { first + block % of_sequence * BLOCK_QUERIES } else { from };
        let end = (from + BLOCK_QUERIES).min((sequence + 1) * each).min(first + queries);
        let keys = key..op.most_keys().min(key + BLOCK_KEYS);
        let width = op.features.next_multiple_of(LANES);
        let lens = [BLOCK_KEYS * width, TILE_HEADS * width, TILE_HEADS * TILE_KEYS, 2 * BLOCK_KEYS, TILE_HEADS];
        arena::with_tile(lens.iter().sum(), |scratch| {
            let (k, rest) = scratch.split_at_mut(lens[0]);
            let (q, rest) = rest.split_at_mut(lens[1]);
            let (products, rest) = rest.split_at_mut(lens[2]);
            let (factors, weights) = rest.split_at_mut(lens[3]);
            let (scales, there) = factors.split_at_mut(BLOCK_KEYS);
            let mut is_loaded = false;
            for query in from..end {
                let visible = self.visible(query);
                let visible = visible.start.max(keys.start)..visible.end.min(keys.end);
                // SAFETY: tasks share no (query, key) pairs, and rows
                // of scores do not overlap.
                let out =
                    unsafe { self.scores.part((query - first_of(self, first)) * self.row_stride + key, keys.len()) };
                out.fill(f32::NEG_INFINITY);
                if visible.is_empty() {
                    continue;
                }
                if !is_loaded {
                    self.load_keys(sequence, keys.clone(), width, k, scales, there);
                    is_loaded = true;
                }
                let mut sums = [0.0; BLOCK_KEYS];
                for head in (0..op.heads).step_by(TILE_HEADS) {
                    let heads = (op.heads - head).min(TILE_HEADS);
                    self.load_heads(query, head..head + heads, width, q, weights);
                    for tile in (0..keys.len()).step_by(TILE_KEYS) {
                        let products = &mut products[..heads * TILE_KEYS];
                        simd.match_keys(&q[..heads * width], &k[tile * width..][..TILE_KEYS * width], width, products);
                        add_weighed(products, &weights[..heads], &mut sums[tile..tile + TILE_KEYS]);
                    }
                }
                for key in visible {
                    let at = key - keys.start;
                    if there[at] != 0.0 {
                        out[at] = sums[at] * scales[at];
                    }
                }
            }
        });
    }

    /// Rows of keys of a block in f32, their
    /// scales, and presence flags.
    fn load_keys(
        &self,
        sequence: usize,
        keys: Range<usize>,
        width: usize,
        k: &mut [f32],
        scales: &mut [f32],
        there: &mut [f32],
    ) {
        let op = &self.indexer.op;
        let first = keys.start;
        for (i, row) in k.chunks_exact_mut(width).enumerate() {
            let place = (first + i < keys.end).then(|| self.place(sequence, first + i)).flatten();
            let Some((page, at)) = place else {
                row.fill(0.0);
                (scales[i], there[i]) = (0.0, 0.0);
                continue;
            };
            self.convert(&self.k[op.format.bytes_of(k_element(op, page, at))..], row);
            scales[i] = self.k_scales.map_or(1.0, |scales| scales[page * op.k.scale_page_stride as usize + at]);
            there[i] = 1.0;
        }
    }

    /// Heads of a query in f32, and their weights.
    fn load_heads(&self, query: usize, heads: Range<usize>, width: usize, q: &mut [f32], weights: &mut [f32]) {
        let op = &self.indexer.op;
        for (i, head) in heads.enumerate() {
            let element = query * op.q.token_stride as usize + head * op.q.head_stride as usize;
            self.convert(&self.q[op.format.bytes_of(element)..], &mut q[i * width..(i + 1) * width]);
            let scale = self.q_scales.map_or(1.0, |scales| scales[query * op.heads + head]);
            weights[i] = self.weights[query * op.weights_stride as usize + head] * scale;
        }
    }

    /// Features as f32, zero-padded.
    fn convert(&self, bytes: &[u8], out: &mut [f32]) {
        static E4M3: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|code| e4m3_to_f32(code as u8)));
        let CpuIndexer { op, simd, .. } = self.indexer;
        let (values, rest) = out.split_at_mut(op.features);
        rest.fill(0.0);
        match op.format {
            KvFormat::Plain(dtype) => simd.to_f32(dtype, bytes, values),
            _ => values.iter_mut().zip(bytes).for_each(|(value, code)| *value = E4M3[usize::from(*code)]),
        }
    }

    /// Top-k of `query`, whose scores are in row `row`.
    fn choose(&self, query: usize, row: usize, indices: &Written<'_, i32>) {
        let op = &self.indexer.op;
        let (_, each) = op.sequences();
        let count = op.chosen();
        // SAFETY: tasks share no query.
        let out = unsafe { indices.part(query * count, count) };
        out.fill(-1);
        let visible = self.visible(query);
        arena::with_tile(2 * visible.len(), |scratch| {
            let candidates: &mut [u64] = bytemuck::cast_slice_mut(scratch);
            // SAFETY: nobody writes scores during top-k.
            let scores = unsafe { self.scores.part(row * self.row_stride, op.most_keys()) };
            let mut found = 0;
            for key in visible {
                if self.place(query / each, key).is_some() {
                    candidates[found] = u64::from(ordered(scores[key])) << 32 | u64::from(!(key as u32));
                    found += 1;
                }
            }
            let mut best = &mut candidates[..found];
            if found > count {
                let (highest, _, _) = best.select_nth_unstable_by(count, |a, b| b.cmp(a));
                best = highest;
            }
            best.sort_unstable_by(|a, b| b.cmp(a));
            out.iter_mut().zip(best).for_each(|(out, best)| *out = !(*best as u32) as i32);
        });
    }
}

/// The query whose scores are in the first row.
fn first_of(job: &Job<'_>, first: usize) -> usize {
    if job.indices.is_some() { first } else { 0 }
}

/// First element of a row of keys.
fn k_element(op: &CheckedIndexer, page: usize, row: usize) -> usize {
    page * op.k.page_stride as usize + row * op.k.row_stride as usize
}

/// `sums[key] += Σ weights[head] · ReLU(products[head][key])`;
/// ReLU keeps NaN.
fn add_weighed(products: &[f32], weights: &[f32], sums: &mut [f32]) {
    for (products, weight) in products.chunks_exact(sums.len()).zip(weights) {
        for (sum, product) in sums.iter_mut().zip(products) {
            *sum += weight * if *product < 0.0 { 0.0 } else { *product };
        }
    }
}

/// Bits in the order of the values. Both zeros are
/// equal; NaN is below all.
fn ordered(score: f32) -> u32 {
    let bits = score.to_bits();
    match score {
        _ if score.is_nan() => 0,
        0.0 => 1 << 31,
        _ if score < 0.0 => !bits,
        _ => bits | 1 << 31,
    }
}

/// An operand that threads write concurrently.
struct Written<'a, T> {
    start: *mut T,
    len: usize,
    values: PhantomData<&'a mut [T]>,
}

// SAFETY: a `Written` is a `&mut [T]` of numbers whose
// only access is `part`, an unsafe method whose callers
// must not share an element.
unsafe impl<T: Send> Sync for Written<'_, T> {}

impl<'a, T: bytemuck::Pod> Written<'a, T> {
    /// The `len` values from byte `first` on.
    fn new(view: Option<BufferMut<'a>>, what: &'static str, first: usize, len: usize) -> Result<Self, HalError> {
        let end = first + len * size_of::<T>();
        let bytes = HostMemory::of_device_mut(DeviceId::CPU, view.ok_or(absent(what, end))?, what)?;
        let bytes = bytes.get_mut(first..end).ok_or(absent(what, end))?;
        let values: &'a mut [T] = bytemuck::try_cast_slice_mut(bytes).map_err(|_| {
            let why = "its address is no multiple of 4".into();
            HalError::Unsupported { device: DeviceId::CPU, what: what.into(), why }
        })?;
        Ok(Self { start: values.as_mut_ptr(), len: values.len(), values: PhantomData })
    }

    /// `len` values from `first` on.
    ///
    /// # Safety
    /// While it is used, no other thread may
    /// use the same values.
    ///
    /// # Panics
    /// When the range exceeds the operand.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that no two threads share elements")]
    unsafe fn part(&self, first: usize, len: usize) -> &mut [T] {
        assert!(first + len <= self.len, "rows lie in the output");
        // SAFETY: the range was just asserted; the caller guarantees
        // that nobody else uses them.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), len) }
    }
}

const _: () = assert!(MOST_CHOSEN <= i32::MAX as usize && BLOCK_KEYS.is_multiple_of(TILE_KEYS));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_in_the_order_of_scores() {
        let ascending = [f32::NAN, f32::NEG_INFINITY, -1.0, -1e-40, 0.0, 1e-40, 2.0, f32::INFINITY];
        assert!(ascending.map(ordered).is_sorted_by(|a, b| a < b));
        assert_eq!((ordered(-0.0), ordered(-f32::NAN)), (ordered(0.0), ordered(f32::NAN)));
    }
}
