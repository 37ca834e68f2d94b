//! Families of `attention`: a single one. A task is a block
//! of queries of the heads that share a KV head. For
//! few queries, tasks are split-KV parts, which are combined in order.

pub(super) mod keys;
mod rows;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::AnyBitPattern;
use qgemm_formats::DType;
use qgemm_hal::op::attention::MOST_HEAD_DIM;
use qgemm_hal::{
    AttentionConfig, AttentionOperand, AttentionPlan, AttentionSpec, CheckedAttention, Device, DeviceId, DeviceInfo,
    Families, Family, Geometry, HalError, HeadRows, HostMemory, HostStream, Kernel, KernelId, LaunchSequence,
    LaunchStep, Math, Operand, Operands, Operation, Spec, Stream, Unsupported,
};
use rayon::prelude::*;

use crate::arena;
use crate::convert;
use crate::device::CpuDevice;
use crate::operand::{absent, host_bytes};
use crate::pool::Pool;
use crate::simd::Simd;
use crate::source_hash::SOURCE_HASH;
use keys::{Index, Mask, Rows, Sequence, Source, TILE_KEYS};
use rows::{Block, MOST_ROWS, Weights, scratch_len};

/// Multiply-adds below which only the calling thread works,
/// because waking others takes longer.
const SERIAL: f64 = 65536.0;

/// Keys of a split-KV part: whole tiles.
const PART_KEYS: usize = 1024;
/// Maximum split-KV parts of a sequence.
const MOST_PARTS: usize = 64;
/// Enough tasks for any number of threads.
const ENOUGH_TASKS: usize = 256;

const _: () = assert!(PART_KEYS.is_multiple_of(TILE_KEYS));

/// Keys of a part, and maximum parts of a sequence, for
/// operations whose queries form one block. The bits depend on them,
/// so they depend neither on the number of threads nor, with
/// batch invariance, on the number of sequences.
fn parts(op: &CheckedAttention) -> (usize, usize) {
    let tasks = if op.batch_invariant { op.kv_heads } else { op.sequences * op.kv_heads };
    let most = ENOUGH_TASKS.div_ceil(tasks).min(MOST_PARTS);
    let rows = op.most_queries() * op.group();
    if rows == 0 || rows > MOST_ROWS || most == 1 || op.most_keys <= PART_KEYS {
        return (op.most_keys, 1);
    }
    let keys = op.most_keys.div_ceil(most).next_multiple_of(TILE_KEYS).max(PART_KEYS);
    (keys, op.most_keys.div_ceil(keys))
}

/// Families of the CPU.
pub const FAMILIES: Families<CheckedAttention> = &[&ATTENTION];

/// The family `attention`.
pub static ATTENTION: AttentionFamily = AttentionFamily;

/// Online softmax over tiles of keys, in f32.
#[derive(Debug)]
pub struct AttentionFamily;

impl Family<CheckedAttention> for AttentionFamily {
    fn name(&self) -> &'static str {
        "attention"
    }

    fn configs(&self, op: &CheckedAttention, _: &DeviceInfo) -> Result<Vec<AttentionConfig>, Unsupported> {
        let dims = [op.qk_dim, op.v_dim].map(|dim| dim as u32);
        let spec = AttentionSpec {
            masked: op.mask.is_some(),
            ..AttentionSpec::attend(op.kv, dims, MOST_ROWS as u32, TILE_KEYS as u32)
        };
        let (part_keys, parts) = parts(op);
        Ok(vec![AttentionConfig {
            kernel: KernelId::new(self.name(), None, Spec::Attention(spec)),
            launches: 1,
            parts: parts as u32,
            part_keys: part_keys as u32,
            workspace_bytes: 0,
            math: Math::FmaF32,
            padding: 1.0,
            efficiency: (700, 300),
        }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedAttention,
        plan: &AttentionPlan,
    ) -> Result<LaunchSequence, HalError> {
        let cpu = CpuDevice::of(device)?;
        let kernel = CpuAttention { op: op.clone(), simd: cpu.simd(), pool: cpu.pool().clone() };
        let tasks = u32::try_from(kernel.tasks() * parts(op).1).unwrap_or(u32::MAX);
        let geometry = Geometry { grid: [tasks, 1, 1], threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<AttentionOperand>(plan.config.kernel, geometry, Arc::new(kernel)).of_operation();
        Ok(LaunchSequence::new::<AttentionOperand>("attention", vec![step]))
    }

    fn source_hash(&self, _: &CheckedAttention, _: &AttentionConfig) -> u64 {
        SOURCE_HASH
    }
}

/// The family's loops, prepared for one operation.
struct CpuAttention {
    op: CheckedAttention,
    simd: &'static Simd,
    pool: Pool,
}

impl CpuAttention {
    /// Query blocks of the longest sequence.
    fn blocks(&self) -> usize {
        (self.op.most_queries() * self.op.group()).div_ceil(MOST_ROWS)
    }

    fn tasks(&self) -> usize {
        self.op.sequences * self.op.kv_heads * self.blocks()
    }
}

impl std::fmt::Debug for CpuAttention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuAttention").field("op", &self.op).finish_non_exhaustive()
    }
}

impl Kernel for CpuAttention {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let job = Job::new(self, operands)?;
        self.pool.enter(|| job.run());
        Ok(())
    }
}

/// An operation with bound operands.
struct Job<'a> {
    attention: &'a CpuAttention,
    q: &'a [u8],
    k: Rows<'a>,
    v: Rows<'a>,
    k_factors: Option<&'a [f32]>,
    v_factors: Option<&'a [f32]>,
    index: Index<'a>,
    mask: Option<Mask<'a>>,
    d: Written<'a>,
    lse: Option<Written<'a>>,
}

impl<'a> Job<'a> {
    fn new(attention: &'a CpuAttention, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use AttentionOperand as O;
        let op = &attention.op;
        let mut bytes = |operand: O| -> Result<&'a [u8], HalError> {
            host_bytes(operands.take(operand).ok_or(absent(operand.name(), 1))?, operand.name())
        };
        let q = bytes(O::Q)?;
        let end = row_end(&op.q, op, op.qk_dim);
        if q.len() < end {
            return Err(absent(O::Q.name(), end));
        }
        let has_scales = op.kv.has_scales();
        let mut scales = |operand: O| if has_scales { bytes(operand).map(Some) } else { Ok(None) };
        let (k_scales, v_scales) = (scales(O::KScales)?, scales(O::VScales)?);
        let k = Rows::new(bytes(O::K)?, k_scales, op.k, op, op.qk_dim, O::K.name())?;
        let v = Rows::new(bytes(O::V)?, v_scales, op.v, op, op.v_dim, O::V.name())?;
        let given = op.operands();
        let optional = |operand: O| given.contains(&operand);
        let factors = |operand: O, operands: &mut Operands<'a>| read::<f32>(operands, operand, op.kv_heads);
        let (mut k_factors, mut v_factors) = (None, None);
        if op.kv.has_factors() {
            k_factors = Some(factors(O::KFactors, &mut operands)?);
            v_factors = Some(factors(O::VFactors, &mut operands)?);
        }
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
        Ok(Self { attention, q, k, v, k_factors, v_factors, index, mask, d, lse })
    }

    fn run(&self) {
        let attention = self.attention;
        let op = &attention.op;
        let (blocks, (part_keys, parts)) = (attention.blocks(), parts(op));
        let is_serial = op.macs() < SERIAL;
        if parts > 1 {
            // A row of partial results: row_max, row_sum, sums.
            let row = op.v_dim + 2;
            let of_task = op.most_queries() * op.group() * row;
            let heads = op.sequences * op.kv_heads;
            return arena::with_sums(heads * parts * of_task, |all| {
                let attend = |(task, results): (usize, &mut [f32])| {
                    let (head, part) = (task / parts, task % parts);
                    let keys = part * part_keys..(part + 1) * part_keys;
                    self.attend([head / op.kv_heads, head % op.kv_heads, 0], keys, |i, _, sums, weights| {
                        let result = &mut results[i * row..][..row];
                        result[..2].copy_from_slice(&[weights.row_max, weights.row_sum]);
                        result[2..].copy_from_slice(sums);
                    });
                };
                match is_serial {
                    true => all.chunks_mut(of_task).enumerate().for_each(attend),
                    false => all.par_chunks_mut(of_task).enumerate().with_max_len(1).for_each(attend),
                }
                let add_up = |(head, results): (usize, &[f32])| self.add_up(head, results.chunks(of_task), row);
                all.chunks(parts * of_task).enumerate().for_each(add_up);
            });
        }
        let tasks = 0..attention.tasks();
        // The last blocks of a causal sequence attend to the most
        // keys, so they start first.
        let work = |task: usize| {
            let head = task / blocks;
            let place = [head / op.kv_heads, head % op.kv_heads, blocks - 1 - task % blocks];
            self.attend(place, 0..op.most_keys, |_, row, sums, weights| {
                let log_sum = weights.finish(sums, self.v_factor(row.kv_head));
                self.store(row, sums, log_sum);
            });
        };
        if is_serial {
            tasks.for_each(work);
        } else {
            tasks.into_par_iter().with_max_len(1).for_each(work);
        }
    }

    fn v_factor(&self, kv_head: usize) -> f32 {
        self.v_factors.map_or(1.0, |factors| factors[kv_head])
    }

    /// Attention of a block of queries of a sequence and KV
    /// head over `keys`. `done` gets each row's number in
    /// the block, its query, the weighted sums of its
    /// values, and its softmax state.
    fn attend(
        &self,
        [sequence, head, block]: [usize; 3],
        keys: Range<usize>,
        mut done: impl FnMut(usize, Row, &mut [f32], Weights),
    ) {
        let CpuAttention { op, simd, .. } = self.attention;
        let sequence = self.index.sequence(&op.addressing(), sequence);
        let (first, all) = (block * MOST_ROWS, sequence.queries * op.group());
        if first >= all {
            return;
        }
        let block = Block {
            source: Source { simd, index: &self.index, op, sequence, head },
            k: &self.k,
            v: &self.v,
            mask: self.mask.as_ref(),
            rows: first..all.min(first + MOST_ROWS),
            keys,
            scale: op.scale * self.k_factors.map_or(1.0, |factors| factors[head]),
        };
        let width = op.dtype.bytes();
        let load = |row: usize, out: &mut [f32]| {
            let Row { token, head, .. } = Row::of(op, sequence, head, row);
            let element = token * op.q.token_stride as usize + head * op.q.head_stride as usize;
            simd.to_f32(op.dtype, &self.q[element * width..], out);
        };
        arena::with_tile(scratch_len(op), |scratch| {
            block.attend(scratch, load, |row, sums, weights| {
                done(row - first, Row::of(op, sequence, head, row), sums, weights);
            });
        });
    }

    /// Combines the split-KV parts of a head, in order.
    fn add_up<'p>(&self, head: usize, parts: impl Iterator<Item = &'p [f32]> + Clone, row: usize) {
        let op = &self.attention.op;
        let sequence = self.index.sequence(&op.addressing(), head / op.kv_heads);
        let kv_head = head % op.kv_heads;
        let mut sums = [0.0; MOST_HEAD_DIM];
        for i in 0..sequence.queries * op.group() {
            let sums = &mut sums[..op.v_dim];
            sums.fill(0.0);
            let mut all = Weights::NONE;
            for results in parts.clone() {
                let (&[row_max, row_sum], values) =
                    results[i * row..][..row].split_first_chunk().unwrap_or((&[0.0; 2], &[]));
                all.add(sums, Weights { row_max, row_sum }, values);
            }
            let log_sum = all.finish(sums, self.v_factor(kv_head));
            self.store(Row::of(op, sequence, kv_head, i), sums, log_sum);
        }
    }

    /// Writes a row's results. No other task writes them.
    fn store(&self, row: Row, values: &[f32], log_sum: f32) {
        let op = &self.attention.op;
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

/// The `count` values of a read operand.
pub(super) fn read<'a, T: AnyBitPattern>(
    operands: &mut Operands<'a>,
    operand: impl Operand,
    count: usize,
) -> Result<&'a [T], HalError> {
    let (what, end) = (operand.name(), count * size_of::<T>());
    let bytes = host_bytes(operands.take(operand).ok_or(absent(what, end))?, what)?;
    let len = bytes.len();
    let bytes = bytes.get(..end).ok_or(HalError::OutOfBounds { what, start: 0, end, len })?;
    bytemuck::try_cast_slice(bytes).map_err(|_| {
        let why = "its address is no multiple of 4".into();
        HalError::Unsupported { device: DeviceId::CPU, what: what.into(), why }
    })
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
