//! Families of `linear_attention`: a single one. A task is a head, or
//! some of its values, of all sequences in turn. No two tasks write
//! the same element, whatever slots sequences have.

mod gates;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::op::linear_attention::{BetaSource, CheckedBeta, DIM_STEP, LinearAttentionStep};
use qgemm_hal::{
    Addressing, CheckedLinearAttention, Dense, Device, DeviceId, DeviceInfo, Families, Family, Geometry, HalError,
    HeadRows, HostMemory, HostStream, Kernel, KvAddressing, LaunchSequence, LaunchStep, LinearAttentionConfig,
    LinearAttentionOperand, LinearAttentionPlan, Operand, Operands, Operation, Stream, Unsupported,
};
use rayon::prelude::*;

use super::attention::keys::{Index, Sequence};
use crate::arena;
use crate::operand::{OutputBatch, absent, host_bytes, read};
use crate::pool::{Pool, Scratch};
use crate::processor::Processor;
use crate::simd::{Recurrence, Simd};
use crate::source_hash::SOURCE_HASH;
use gates::{Decays, sigmoid};

/// Multiply-adds below which only the calling thread works, because
/// waking others takes longer.
const SERIAL_MACS: f64 = (1 << 17) as f64;

/// Floats of a task's state, which stay in the L1 cache from one token
/// to the next.
const CACHED_FLOATS: usize = 1 << 12;

/// Families of the CPU.
pub const FAMILIES: Families<CheckedLinearAttention> = &[&LinearAttentionFamily];

/// Family name.
const NAME: &str = "linear_attention";

/// Recurrence, token by token.
#[derive(Debug)]
struct LinearAttentionFamily;

impl Family<CheckedLinearAttention> for LinearAttentionFamily {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedLinearAttention, _: &DeviceInfo) -> Result<Vec<LinearAttentionConfig>, Unsupported> {
        let kernel = op.kernel_of(NAME, None, LinearAttentionStep::Recur);
        Ok(vec![LinearAttentionConfig::of_tokens(kernel)])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedLinearAttention,
        plan: &LinearAttentionPlan,
    ) -> Result<LaunchSequence, HalError> {
        let cpu = Processor::of(device)?;
        let kernel = CpuLinearAttention { op: *op, simd: cpu.simd(), pool: cpu.pool().clone() };
        cpu.pool().reserve(!kernel.is_small(), Scratch { tile: scratch(op, op.v_dim), ..Scratch::default() });
        let geometry = Geometry { grid: [op.heads as u32, 1, 1], threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<LinearAttentionOperand>(plan.config.kernel, geometry, Arc::new(kernel));
        let step = step.bind_all(op.operands());
        Ok(LaunchSequence::new::<LinearAttentionOperand>(op.kernel_name(), vec![step]))
    }

    fn source_hash(&self, _: &CheckedLinearAttention, _: &LinearAttentionConfig) -> u64 {
        SOURCE_HASH
    }
}

/// Scratch floats of a task with `rows` values: a state, query, key,
/// decays, values and results.
fn scratch(op: &CheckedLinearAttention, rows: usize) -> usize {
    (rows + 3) * op.qk_dim + 2 * rows
}

/// The family's loop, prepared for one operation.
struct CpuLinearAttention {
    op: CheckedLinearAttention,
    simd: &'static Simd,
    pool: Pool,
}

impl std::fmt::Debug for CpuLinearAttention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuLinearAttention").field("op", &self.op).finish_non_exhaustive()
    }
}

impl CpuLinearAttention {
    /// Whether the calling thread works alone.
    fn is_small(&self) -> bool {
        self.op.macs() < SERIAL_MACS
    }
}

impl Kernel for CpuLinearAttention {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let job = Job::new(&self.op, self.simd, operands)?;
        self.pool.share(!self.is_small(), |threads| job.run(threads));
        Ok(())
    }
}

/// States, shared by the threads of a launch.
struct States<'a> {
    start: *mut f32,
    len: usize,
    borrowed: PhantomData<&'a mut [f32]>,
}

// SAFETY: `States` is a `&mut [f32]` whose only access is `rows`, whose
// callers must leave every element to one thread.
unsafe impl Sync for States<'_> {}

impl<'a> States<'a> {
    fn new(op: &CheckedLinearAttention, operands: &mut Operands<'a>) -> Result<Self, HalError> {
        let what = LinearAttentionOperand::States.name();
        let last = op.slots.saturating_sub(1) * op.slot_stride as usize + op.heads * op.state_len();
        let end = if op.slots == 0 { 0 } else { last * size_of::<f32>() };
        let view = operands.take_mut(LinearAttentionOperand::States).ok_or(absent(what, end))?;
        let bytes = HostMemory::of_device_mut(DeviceId::CPU, view, what)?;
        let len = bytes.len();
        let bytes = bytes.get_mut(..end).ok_or(HalError::OutOfBounds { what, start: 0, end, len })?;
        let floats: &mut [f32] = bytemuck::try_cast_slice_mut(bytes).map_err(|_| HalError::Unsupported {
            device: DeviceId::CPU,
            what: what.into(),
            why: "its address is no multiple of 4".into(),
        })?;
        Ok(Self { start: floats.as_mut_ptr(), len: floats.len(), borrowed: PhantomData })
    }

    /// The floats of `range`.
    ///
    /// # Safety
    /// No other reference to the same elements may exist.
    ///
    /// # Panics
    /// When the range exceeds the states.
    #[expect(clippy::mut_from_ref, reason = "the caller guarantees that elements are not shared")]
    unsafe fn floats(&self, range: Range<usize>) -> &mut [f32] {
        assert!(range.end <= self.len, "states lie in their memory");
        // SAFETY: the range is within the borrowed memory; the caller
        // guarantees that it is not shared.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

/// Queries, keys or values, as stored.
struct Rows<'a> {
    bytes: &'a [u8],
    layout: HeadRows,
    dtype: DType,
}

impl<'a> Rows<'a> {
    fn new(
        op: &CheckedLinearAttention,
        operands: &mut Operands<'a>,
        operand: LinearAttentionOperand,
        layout: HeadRows,
        [heads, columns]: [usize; 2],
    ) -> Result<Self, HalError> {
        let what = operand.name();
        let bytes = host_bytes(operands.take(operand).ok_or(absent(what, 1))?, what)?;
        let rows = Self { bytes, layout, dtype: op.dtype };
        let end = rows.at(op.tokens - 1, heads - 1, columns);
        match bytes.len() {
            len if end > len => Err(HalError::OutOfBounds { what, start: 0, end, len }),
            _ => Ok(rows),
        }
    }

    /// Byte of a feature.
    fn at(&self, token: usize, head: usize, feature: usize) -> usize {
        let HeadRows { token_stride, head_stride, .. } = self.layout;
        (token * token_stride as usize + head * head_stride as usize + feature) * self.dtype.bytes()
    }

    fn load(&self, simd: &Simd, token: usize, head: usize, first: usize, out: &mut [f32]) {
        simd.to_f32(self.dtype, &self.bytes[self.at(token, head, first)..], out);
    }
}

/// Operand of β.
#[derive(Clone, Copy)]
struct Beta<'a> {
    values: &'a [f32],
    token_stride: usize,
    is_logit: bool,
}

impl Beta<'_> {
    fn of(&self, token: usize, head: usize) -> f32 {
        let value = self.values[token * self.token_stride + head];
        if self.is_logit { sigmoid(value) } else { value }
    }
}

/// An operation with bound operands.
struct Job<'a> {
    op: &'a CheckedLinearAttention,
    simd: &'static Simd,
    q: Rows<'a>,
    k: Rows<'a>,
    v: Rows<'a>,
    decays: Option<Decays<'a>>,
    beta: Option<Beta<'a>>,
    skip: Option<&'a [f32]>,
    slots: Option<&'a [i32]>,
    advance: Option<&'a [u32]>,
    pending: Option<&'a [u32]>,
    q_offsets: Option<&'a [u32]>,
    states: States<'a>,
    /// A matrix of tokens for each head.
    d: OutputBatch<'a>,
}

impl<'a> Job<'a> {
    fn new(op: &'a CheckedLinearAttention, simd: &'static Simd, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use LinearAttentionOperand as O;
        let &CheckedLinearAttention { sequences, tokens, heads, key_heads, qk_dim, v_dim, d, .. } = op;
        let given = op.operands();
        let operands = &mut operands;
        let d = {
            let view = operands.take_mut(O::D).ok_or(absent(O::D.name(), 1))?;
            let rows = Dense { dtype: op.dtype, row_stride: d.token_stride, col_stride: 1, aligned16: false };
            let bytes = HostMemory::of_device_mut(DeviceId::CPU, view, O::D.name())?;
            OutputBatch::new(bytes, rows, [tokens, v_dim], heads, d.head_stride, O::D.name())?
        };
        let states = States::new(op, operands)?;
        let q = Rows::new(op, operands, O::Q, op.q, [key_heads, qk_dim])?;
        let k = Rows::new(op, operands, O::K, op.k, [key_heads, qk_dim])?;
        let v = Rows::new(op, operands, O::V, op.v, [heads, v_dim])?;
        let decays = Decays::new(op, operands)?;
        let beta = match op.beta {
            Some(CheckedBeta { source, token_stride }) if op.reads_beta() => {
                let token_stride = token_stride as usize;
                let values = read(operands, O::Beta, (tokens - 1) * token_stride + heads)?;
                Some(Beta { values, token_stride, is_logit: source == BetaSource::Sigmoid })
            }
            _ => None,
        };
        let skip = if op.skip { Some(read(operands, O::Skip, heads)?) } else { None };
        let slots = if op.slot_indices { Some(read(operands, O::Slots, sequences)?) } else { None };
        let mut words = |operand: O, count: usize| match given.contains(&operand) {
            true => read::<u32>(operands, operand, count).map(Some),
            false => Ok(None),
        };
        let (advance, pending) = (words(O::Advance, sequences)?, words(O::Pending, sequences)?);
        let q_offsets = words(O::QOffsets, sequences + 1)?;
        Ok(Self { op, simd, q, k, v, decays, beta, skip, slots, advance, pending, q_offsets, states, d })
    }

    fn run(&self, threads: usize) {
        let op = self.op;
        let sequences = self.sequences();
        // Enough tasks for all threads, of whole vectors of values.
        let for_threads = if threads == 1 { 1 } else { (2 * threads).div_ceil(op.heads) };
        let wanted = for_threads.max(op.state_len() / CACHED_FLOATS);
        let rows = op.v_dim.div_ceil(wanted.min(op.v_dim / DIM_STEP)).next_multiple_of(DIM_STEP);
        let slices = op.v_dim.div_ceil(rows);
        let work = |task: usize| {
            let (head, first) = (task / slices, task % slices * rows);
            let part = Part { head, rows: first..op.v_dim.min(first + rows) };
            arena::with_tile(scratch(op, part.rows.len()), |scratch| {
                sequences.iter().for_each(|sequence| self.sequence(sequence, &part, scratch));
            });
        };
        let tasks = 0..op.heads * slices;
        match threads {
            1 => tasks.for_each(work),
            _ => tasks.into_par_iter().with_max_len(1).for_each(work),
        }
    }

    /// Tokens of each sequence.
    fn sequences(&self) -> Vec<Sequence> {
        let &CheckedLinearAttention { sequences, tokens, queries, .. } = self.op;
        let index = Index { q_offsets: self.q_offsets, kv_offsets: None, lengths: None, table: None };
        let places = KvAddressing::Pages { capacity: 0, lengths: false };
        let addressing = Addressing { sequences, tokens, queries, most_keys: 0, places, keys_ready: false };
        (0..sequences).map(|sequence| index.sequence(&addressing, sequence)).collect()
    }

    /// The state of a sequence for a part of a head, if it has one.
    fn stored(&self, sequence: &Sequence, part: &Part) -> Option<Range<usize>> {
        let op = self.op;
        let slot = match self.slots {
            Some(slots) => usize::try_from(slots[sequence.index]).ok()?,
            None => sequence.index,
        };
        let first = slot * op.slot_stride as usize + (part.head * op.v_dim + part.rows.start) * op.qk_dim;
        (slot < op.slots).then(|| first..first + part.rows.len() * op.qk_dim)
    }

    /// All tokens of a sequence, for a part of a head.
    fn sequence(&self, sequence: &Sequence, part: &Part, scratch: &mut [f32]) {
        if sequence.queries == 0 {
            return;
        }
        let (op, tokens) = (self.op, sequence.queries);
        let (scratch_state, scratch) = scratch.split_at_mut(part.rows.len() * op.qk_dim);
        let count = |counts: Option<&[u32]>, default: usize| {
            counts.map_or(default, |counts| (counts[sequence.index] as usize).min(tokens))
        };
        let (advance, pending) = (count(self.advance, tokens), count(self.pending, 0));
        // SAFETY: a part of a head is one task's, which has one sequence
        // at a time.
        let stored = self.stored(sequence, part).map(|range| unsafe { self.states.floats(range) });
        let Some(state) = stored else {
            scratch_state.fill(0.0);
            return self.tokens(sequence, 0..tokens, pending, part, scratch_state, scratch);
        };
        if op.from_zero {
            state.fill(0.0);
        }
        self.tokens(sequence, 0..advance, pending, part, state, scratch);
        if advance < tokens {
            scratch_state.copy_from_slice(state);
            self.tokens(sequence, advance..tokens, pending, part, scratch_state, scratch);
        }
    }

    /// Tokens of a sequence, of which the first `pending` have no output.
    fn tokens(
        &self,
        sequence: &Sequence,
        tokens: Range<usize>,
        pending: usize,
        part: &Part,
        state: &mut [f32],
        scratch: &mut [f32],
    ) {
        let (op, rows, dim) = (self.op, part.rows.len(), self.op.qk_dim);
        let (q, scratch) = scratch.split_at_mut(dim);
        let (k, scratch) = scratch.split_at_mut(dim);
        let (decay, scratch) = scratch.split_at_mut(dim);
        let (values, out) = scratch.split_at_mut(rows);
        let out = &mut out[..rows];
        let decay = &mut decay[..op.head_decays().max(1)];
        decay.fill(1.0);
        for place in tokens {
            let token = sequence.token + place;
            let qk = self.query_and_key(token, part.head, q, k);
            self.v.load(self.simd, token, part.head, part.rows.start, values);
            if let Some(decays) = &self.decays {
                decays.of(self.simd, token, part.head, decay);
                forget(decay, state, dim);
            }
            let beta = self.beta(token, part.head);
            let token_part = Recurrence { q, k, decay, qk, beta, delta: op.delta };
            self.simd.recur(&token_part, values, state, out);
            if place < pending {
                continue;
            }
            if let Some(skip) = self.skip {
                out.iter_mut().zip(&*values).for_each(|(out, value)| *out += skip[part.head] * value);
            }
            // SAFETY: a part of a head of a token is one task's, and rows of
            // D do not overlap.
            unsafe { self.d.of(part.head).store_part(token, part.rows.start, out) };
        }
    }

    /// Factor of a head's update.
    fn beta(&self, token: usize, head: usize) -> f32 {
        match (&self.beta, &self.decays, self.op.beta) {
            (Some(beta), ..) => beta.of(token, head),
            (None, Some(decays), Some(_)) => decays.time_step(self.simd, token, head),
            _ => 1.0,
        }
    }

    /// Loads the scaled query and the key of a head; returns their
    /// product.
    fn query_and_key(&self, token: usize, head: usize, q: &mut [f32], k: &mut [f32]) -> f32 {
        let (op, dim) = (self.op, self.op.qk_dim);
        let key_head = op.key_head(head);
        self.q.load(self.simd, token, key_head, 0, q);
        self.k.load(self.simd, token, key_head, 0, k);
        let dot = |a: &[f32], b: &[f32]| {
            let mut out = [0.0];
            self.simd.match_keys(a, b, dim, &mut out);
            out[0]
        };
        let mut q_scale = op.scale;
        if let Some(epsilon) = op.norm_epsilon {
            let inverse = 1.0 / (dot(k, k) + epsilon).sqrt();
            k.iter_mut().for_each(|k| *k *= inverse);
            q_scale *= 1.0 / (dot(q, q) + epsilon).sqrt();
        }
        q.iter_mut().for_each(|q| *q *= q_scale);
        dot(q, k)
    }
}

/// Values of a head.
struct Part {
    head: usize,
    rows: Range<usize>,
}

/// Makes features with decay 0 zero, even if they are infinite or NaN.
fn forget(decay: &[f32], state: &mut [f32], dim: usize) {
    if !decay.contains(&0.0) {
        return;
    }
    for row in state.chunks_exact_mut(dim) {
        match decay {
            [_] => row.fill(0.0),
            _ => row.iter_mut().zip(decay).filter(|(_, decay)| **decay == 0.0).for_each(|(state, _)| *state = 0.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reset_forgets_what_is_not_finite() {
        let mut state = [f32::NAN, 1.0, f32::INFINITY, 2.0];
        forget(&[0.0, 0.5], &mut state, 2);
        assert_eq!(state, [0.0, 1.0, 0.0, 2.0]);
        forget(&[0.0], &mut state, 2);
        assert_eq!(state, [0.0; 4]);
    }
}
