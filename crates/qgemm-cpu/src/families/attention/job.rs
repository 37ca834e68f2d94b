//! A launch: operands, tasks of its threads, results.
//! A task is a block of queries of the heads that share a KV head.

use std::marker::PhantomData;
use std::ops::Range;

use qgemm_formats::DType;
use qgemm_hal::op::attention::MOST_HEAD_DIM;
use qgemm_hal::{
    AttentionOperand, CheckedAttention, DeviceId, HalError, HeadRows, HostMemory, KvFormat, Operand, Operands,
    Operation,
};
use rayon::prelude::*;

use super::cache::Cache;
use super::cost::SERIAL;
use super::keys::{Index, Mask, Sequence};
use super::rows::{Block, CHUNK_KEYS, MOST_ROWS, scratch_len};
use super::softmax::Softmax;
use crate::arena;
use crate::convert;
use crate::operand::{absent, host_bytes, read};
use crate::simd::Simd;

/// Query blocks of the longest sequence.
pub(super) fn blocks(op: &CheckedAttention) -> usize {
    (op.most_queries() * op.group()).div_ceil(MOST_ROWS)
}

/// Tasks of a thread with which threads end at
/// about the same time.
const ENOUGH_TASKS: usize = 4;

/// An operation with bound operands.
pub(super) struct Job<'a> {
    op: &'a CheckedAttention,
    simd: &'static Simd,
    q: &'a [u8],
    k: Cache<'a>,
    v: Cache<'a>,
    k_factors: Option<&'a [f32]>,
    v_factors: Option<&'a [f32]>,
    index: Index<'a>,
    mask: Option<Mask<'a>>,
    sinks: Option<&'a [f32]>,
    gate: Option<&'a [u8]>,
    d: Written<'a>,
    lse: Option<Written<'a>>,
}

impl<'a> Job<'a> {
    pub fn new(op: &'a CheckedAttention, simd: &'static Simd, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use AttentionOperand as O;
        let mut bytes = |operand: O| -> Result<&'a [u8], HalError> {
            host_bytes(operands.take(operand).ok_or(absent(operand.name(), 1))?, operand.name())
        };
        let q = bytes(O::Q)?;
        let end = row_end(&op.q, op, op.qk_dim);
        if q.len() < end {
            return Err(absent(O::Q.name(), end));
        }
        let gate = if op.gate.is_some() { Some(bytes(O::Gate)?) } else { None };
        let gate_end = op.gate.as_ref().map_or(0, |rows| row_end(rows, op, op.v_dim));
        if gate.is_some_and(|gate| gate.len() < gate_end) {
            return Err(absent(O::Gate.name(), gate_end));
        }
        let mut scales =
            |operand: O, format: KvFormat| if format.has_scales() { bytes(operand).map(Some) } else { Ok(None) };
        let (k_scales, v_scales) = (scales(O::KScales, op.kv.k)?, scales(O::VScales, op.kv.v)?);
        let k = Cache::new(bytes(O::K)?, k_scales, op.k, op, op.kv.k, op.qk_dim, O::K.name())?;
        let v = Cache::new(bytes(O::V)?, v_scales, op.v, op, op.kv.v, op.v_dim, O::V.name())?;
        let given = op.operands();
        let optional = |operand: O| given.contains(&operand);
        let mut factors = |operand: O, format: KvFormat| match format.has_factors() {
            true => read::<f32>(&mut operands, operand, op.kv_heads).map(Some),
            false => Ok(None),
        };
        let (k_factors, v_factors) = (factors(O::KFactors, op.kv.k)?, factors(O::VFactors, op.kv.v)?);
        let sinks = if op.sinks { Some(read::<f32>(&mut operands, O::Sinks, op.heads)?) } else { None };
        let mut words = |operand: O, count: usize| match optional(operand) {
            true => read::<u32>(&mut operands, operand, count).map(Some),
            false => Ok(None),
        };
        let index = Index {
            q_offsets: words(O::QOffsets, op.sequences + 1)?,
            kv_offsets: words(O::KvOffsets, op.sequences + 1)?,
            lengths: words(O::KvLengths, op.sequences)?,
            table: words(O::BlockTable, op.sequences * op.paging().width)?,
        };
        let mask_words = words(O::Mask, op.mask_words())?;
        let mask = op.mask.zip(mask_words).map(|(bits, words)| Mask::new(bits, words, op));
        let mut written = |operand: O, end: usize| -> Result<Written<'a>, HalError> {
            let view = operands.take_mut(operand).ok_or(absent(operand.name(), end))?;
            let bytes = HostMemory::of_device_mut(DeviceId::CPU, view, operand.name())?;
            if bytes.len() < end {
                return Err(absent(operand.name(), end));
            }
            Ok(Written { start: bytes.as_mut_ptr(), len: bytes.len(), bytes: PhantomData })
        };
        if !op.d.is_injective(op.tokens, op.heads, op.v_dim) {
            let why = format!("{:?} are the strides of {} tokens and {} heads", op.d, op.tokens, op.heads);
            let what = "an output with overlapping elements".into();
            return Err(HalError::Unsupported { device: DeviceId::CPU, what, why });
        }
        let d = written(O::D, row_end(&op.d, op, op.v_dim))?;
        let lse = if op.lse { Some(written(O::Lse, op.tokens * op.heads * size_of::<f32>())?) } else { None };
        Ok(Self { op, simd, q, k, v, k_factors, v_factors, index, mask, sinks, gate, d, lse })
    }

    /// Whether the work takes longer than waking other threads.
    pub fn is_worth_sharing(&self) -> bool {
        let op = self.op;
        let keys_of = |sequence: usize| {
            let Sequence { queries, keys, .. } = self.index.sequence(&op.addressing(), sequence);
            queries as f64 * op.window.map_or(keys, |window| keys.min(window)) as f64
        };
        let pairs: f64 = (0..op.sequences).map(keys_of).sum();
        pairs * (op.heads * (op.qk_dim + op.v_dim)) as f64 >= SERIAL
    }

    /// Computes the result with the pool's threads, if more than one.
    pub fn run(&self, threads: usize) {
        let chunks = self.chunks();
        let heads = self.heads_at_once(threads, chunks);
        let tasks = self.tasks(heads);
        if threads > 1 && tasks < ENOUGH_TASKS * threads && chunks > 1 {
            let at_once = (ENOUGH_TASKS * threads).div_ceil(chunks);
            let split = |first: usize| self.run_split(heads, first..tasks.min(first + at_once), chunks);
            return (0..tasks).step_by(at_once).for_each(split);
        }
        let work = |task: usize| {
            self.attend(heads, task, 0..chunks, |_, row, sums, state| self.finish(row, sums, state));
        };
        match threads {
            1 => (0..tasks).for_each(work),
            _ => (0..tasks).into_par_iter().with_max_len(1).for_each(work),
        }
    }

    /// Chunks of the keys of the longest sequence.
    fn chunks(&self) -> usize {
        let op = self.op;
        let keys = (0..op.sequences).map(|sequence| self.index.sequence(&op.addressing(), sequence).keys);
        keys.max().unwrap_or(0).div_ceil(CHUNK_KEYS)
    }

    /// KV heads of a task: all whose rows it has room for, or fewer,
    /// so that threads have enough tasks.
    fn heads_at_once(&self, threads: usize, chunks: usize) -> usize {
        let op = self.op;
        let rows = (op.most_queries() * op.group()).max(1);
        let mut heads = (MOST_ROWS / rows).clamp(1, op.kv_heads);
        while threads > 1 && heads > 1 && self.tasks(heads) * chunks < ENOUGH_TASKS * threads {
            heads = heads.div_ceil(2);
        }
        heads
    }

    /// Tasks with `heads` KV heads each.
    fn tasks(&self, heads: usize) -> usize {
        let op = self.op;
        op.sequences * op.kv_heads.div_ceil(heads) * blocks(op)
    }

    /// Split-KV: chunks of keys are tasks, whose results are merged in order.
    fn run_split(&self, heads: usize, tasks: Range<usize>, chunks: usize) {
        let op = self.op;
        // A row of partial results: row_max, row_sum, sums.
        let (v_dim, row_len) = (op.v_dim, op.v_dim + 2);
        let of_chunk = heads * MOST_ROWS.min(op.most_queries() * op.group()) * row_len;
        arena::with_sums(tasks.len() * chunks * of_chunk, |all| {
            all.par_chunks_mut(of_chunk).enumerate().with_max_len(1).for_each(|(i, results)| {
                let (task, chunk) = (tasks.start + i / chunks, i % chunks);
                self.attend(heads, task, chunk..chunk + 1, |i, _, sums, state| {
                    let result = &mut results[i * row_len..][..row_len];
                    result[..2].copy_from_slice(&[state.row_max, state.row_sum]);
                    result[2..].copy_from_slice(sums);
                });
            });
            all.par_chunks(chunks * of_chunk).enumerate().for_each(|(i, parts)| {
                let mut sums = [0.0; MOST_HEAD_DIM];
                let (sequence, heads, rows) = self.block_of(heads, tasks.start + i);
                let of_task = heads.flat_map(|head| rows.clone().map(move |row| (head, row)));
                for (i, (head, row)) in of_task.enumerate() {
                    let (sums, mut state) = (&mut sums[..v_dim], Softmax::NONE);
                    sums.fill(0.0);
                    for part in parts.chunks(of_chunk) {
                        if let Some((&[row_max, row_sum], values)) = part[i * row_len..][..row_len].split_first_chunk()
                        {
                            state.merge(sums, Softmax { row_max, row_sum }, values);
                        }
                    }
                    self.finish(Row::of(op, sequence, head, row), sums, state);
                }
            });
        });
    }

    /// Sequence, KV heads and rows of a task.
    fn block_of(&self, heads: usize, task: usize) -> (Sequence, Range<usize>, Range<usize>) {
        let op = self.op;
        let (blocks, groups) = (blocks(op), op.kv_heads.div_ceil(heads));
        let (group, block) = (task / blocks, task % blocks);
        let sequence = self.index.sequence(&op.addressing(), group / groups);
        let first_head = group % groups * heads;
        // The last blocks of a causal sequence attend to the most
        // keys, so they start first.
        let first = (blocks - 1 - block) * MOST_ROWS;
        let all = sequence.queries * op.group();
        (sequence, first_head..op.kv_heads.min(first_head + heads), first.min(all)..all.min(first + MOST_ROWS))
    }

    /// Attention of a task to chunks of its keys. `done` gets each row's
    /// number in the task, its query, the weighted sums of its
    /// values, and its softmax state.
    fn attend(
        &self,
        heads: usize,
        task: usize,
        chunks: Range<usize>,
        mut done: impl FnMut(usize, Row, &mut [f32], Softmax),
    ) {
        let Self { op, simd, .. } = *self;
        let (sequence, heads, rows) = self.block_of(heads, task);
        if rows.is_empty() {
            return;
        }
        let block = Block {
            simd,
            op,
            index: &self.index,
            sequence,
            heads,
            rows,
            k: &self.k,
            v: &self.v,
            mask: self.mask.as_ref(),
            k_factors: self.k_factors,
        };
        let width = op.dtype.bytes();
        let load = |head: usize, row: usize, out: &mut [f32]| {
            let Row { token, head, .. } = Row::of(op, sequence, head, row);
            let element = token * op.q.token_stride as usize + head * op.q.head_stride as usize;
            simd.to_f32(op.dtype, &self.q[element * width..], out);
        };
        arena::with_tile(scratch_len(op), |scratch| {
            block.attend(chunks, scratch, load, |i, [head, row], sums, state| {
                done(i, Row::of(op, sequence, head, row), sums, state);
            });
        });
    }

    /// Normalizes a row and writes its results.
    fn finish(&self, row: Row, sums: &mut [f32], mut state: Softmax) {
        if let Some(sinks) = self.sinks {
            state.add_sink(sums, sinks[row.head]);
        }
        let factor = self.v_factors.map_or(1.0, |factors| factors[row.kv_head]);
        let log_sum = state.finish(sums, factor);
        self.multiply_by_gate(row, sums);
        self.store(row, sums, log_sum);
    }

    /// Multiplies a row's results by the sigmoid of its gate, if any.
    fn multiply_by_gate(&self, row: Row, values: &mut [f32]) {
        let (Some(gate), Some(rows)) = (self.gate, self.op.gate) else { return };
        let element = row.token * rows.token_stride as usize + row.head * rows.head_stride as usize;
        let mut logits = [0.0; MOST_HEAD_DIM];
        let logits = &mut logits[..values.len()];
        self.simd.to_f32(self.op.dtype, &gate[element * self.op.dtype.bytes()..], logits);
        values.iter_mut().zip(logits).for_each(|(value, logit)| *value *= 1.0 / (1.0 + (-*logit).exp()));
    }

    /// Writes a row's results. No other task writes them.
    fn store(&self, row: Row, values: &[f32], log_sum: f32) {
        let op = self.op;
        let Row { token, head, .. } = row;
        let element = token * op.d.token_stride as usize + head * op.d.head_stride as usize;
        // SAFETY: tasks share no row: no token belongs to two sequences
        // (`Index::sequence`), and rows of D do not overlap.
        unsafe { self.d.store(op.dtype, element, values) };
        if let Some(lse) = &self.lse {
            // SAFETY: as above.
            unsafe { lse.store(DType::F32, token * op.heads + head, &[log_sum]) };
        }
    }
}

/// A query of a head.
#[derive(Clone, Copy)]
struct Row {
    token: usize,
    head: usize,
    kv_head: usize,
}

impl Row {
    /// Row `row` of a sequence and a KV head.
    fn of(op: &CheckedAttention, sequence: Sequence, kv_head: usize, row: usize) -> Self {
        let group = op.group();
        Self { token: sequence.token + row / group, head: kv_head * group + row % group, kv_head }
    }
}

/// Elements up to the end of the last token's last head.
fn row_end(rows: &HeadRows, op: &CheckedAttention, columns: usize) -> usize {
    let (token, head) = (op.tokens - 1, op.heads - 1);
    let last = token * rows.token_stride as usize + head * rows.head_stride as usize;
    (last + columns) * op.dtype.bytes()
}

/// An operand that threads write concurrently.
struct Written<'a> {
    start: *mut u8,
    len: usize,
    bytes: PhantomData<&'a mut [u8]>,
}

// SAFETY: a `Written` is a `&mut [u8]` whose only access
// is `store`, an unsafe method whose callers must not
// write an element from two threads.
unsafe impl Sync for Written<'_> {}

impl Written<'_> {
    /// Writes `values` from `element` on, rounded to `dtype`.
    ///
    /// # Safety
    /// No other thread may write the same elements.
    ///
    /// # Panics
    /// When the range exceeds the operand.
    unsafe fn store(&self, dtype: DType, element: usize, values: &[f32]) {
        // Aligned for every type.
        let mut rounded = [0u32; MOST_HEAD_DIM];
        let rounded = &mut bytemuck::cast_slice_mut(&mut rounded)[..values.len() * dtype.bytes()];
        convert::from_f32(dtype, values, rounded);
        let first = element * dtype.bytes();
        assert!(first + rounded.len() <= self.len, "rows lie in the output");
        // SAFETY: the range was just asserted; the caller guarantees
        // that nobody else writes there.
        unsafe { self.start.add(first).copy_from_nonoverlapping(rounded.as_ptr(), rounded.len()) };
    }
}
