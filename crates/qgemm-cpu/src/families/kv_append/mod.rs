//! Families of `kv_append`: a single one. A task is a KV
//! head with its query heads (without KV heads, all
//! query heads), for all tokens; or, for many
//! tokens, all heads of tokens whose keys go to certain rows
//! of the cache. No two tasks write the same element,
//! whatever pages a table has.

mod cache;
mod hadamard;
mod head_norm;
mod rotary;

use std::ops::Range;
use std::sync::Arc;

use qgemm_hal::op::attention::{KV_BLOCK, KV_SCALE_BYTES, MOST_HEAD_DIM};
use qgemm_hal::{
    Addressing, CheckedKvAppend, CheckedRotary, Device, DeviceId, DeviceInfo, Families, Family, Geometry, HalError,
    HeadRows, HostStream, Kernel, KernelId, KvAppendConfig, KvAppendLaunch, KvAppendOperand, KvAppendSpec,
    KvAppendStep, KvRows, LaunchSequence, LaunchStep, Operand, Operands, Operation, Paging, RotaryAngles, Spec, Stream,
    Unsupported,
};
use rayon::prelude::*;

use super::attention::keys::{Index, Sequence};
use crate::operand::{absent, host_bytes, read};
use crate::pool::Pool;
use crate::processor::Processor;
use crate::simd::Simd;
use crate::source_hash::SOURCE_HASH;
use cache::{Cache, Written};
use hadamard::hadamard;
use head_norm::{gamma_of, normalize};
use rotary::{cos_sin, turn};

/// Elements below which only the calling thread works, because
/// waking others takes longer.
const SERIAL_ELEMENTS: usize = 1 << 15;
/// Minimum tokens of a task.
const TASK_TOKENS: usize = 8;
/// Maximum pairs of a head.
const MOST_PAIRS: usize = MOST_HEAD_DIM / 2;

/// Families of the CPU.
pub const FAMILIES: Families<CheckedKvAppend> = &[&KV_APPEND];

/// The family `kv_append`.
pub static KV_APPEND: KvAppendFamily = KvAppendFamily;

/// Rotary embedding and KV-cache append, bound by memory.
#[derive(Debug)]
pub struct KvAppendFamily;

impl Family<CheckedKvAppend> for KvAppendFamily {
    fn name(&self) -> &'static str {
        "kv_append"
    }

    fn configs(&self, op: &CheckedKvAppend, info: &DeviceInfo) -> Result<Vec<KvAppendConfig>, Unsupported> {
        let spec = KvAppendSpec { step: KvAppendStep::All, x: op.dtype, kv: op.kv };
        let kernel = KernelId::new(self.name(), None, Spec::KvAppend(spec));
        // Without others to wake, nothing is launched.
        let launches = u32::from(info.units > 1 && elements(op) >= SERIAL_ELEMENTS);
        Ok(vec![KvAppendConfig { kernel, launches, efficiency: 500 }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedKvAppend,
        plan: &KvAppendLaunch,
    ) -> Result<LaunchSequence, HalError> {
        let cpu = Processor::of(device)?;
        let kernel = CpuKvAppend { op: *op, simd: cpu.simd(), pool: cpu.pool().clone() };
        let geometry = Geometry { grid: [op.kv_heads.max(1) as u32, 1, 1], threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<KvAppendOperand>(plan.config.kernel, geometry, Arc::new(kernel));
        let step = step.bind_all(op.operands());
        let name = format!("kv_append_{}_{}", op.dtype, op.kv);
        Ok(LaunchSequence::new::<KvAppendOperand>(name, vec![step]))
    }

    fn source_hash(&self, _: &CheckedKvAppend, _: &KvAppendConfig) -> u64 {
        SOURCE_HASH
    }
}

/// Elements that an operation rotates or writes.
fn elements(op: &CheckedKvAppend) -> usize {
    op.addressing.tokens * (op.heads * op.qk_dim + op.kv_heads * (op.qk_dim + op.v_dim))
}

/// The family's loop, prepared for one operation.
struct CpuKvAppend {
    op: CheckedKvAppend,
    simd: &'static Simd,
    pool: Pool,
}

impl std::fmt::Debug for CpuKvAppend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuKvAppend").field("op", &self.op).finish_non_exhaustive()
    }
}

impl Kernel for CpuKvAppend {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let job = Job::new(&self.op, self.simd, operands)?;
        self.pool.share(elements(&self.op) >= SERIAL_ELEMENTS, |threads| job.run(threads));
        Ok(())
    }
}

/// Angles, as given.
enum Angles<'a> {
    Nothing,
    Frequencies(&'a [u32]),
    Tables { cos: &'a [f32], sin: &'a [f32], positions: usize, row_stride: usize },
}

/// Every `of`-th row of the cache from row `number` on; and
/// every `of`-th token whose key is not cached.
#[derive(Clone, Copy)]
struct Share {
    number: usize,
    of: usize,
}

impl Share {
    fn has(self, row: usize) -> bool {
        row % self.of == self.number
    }
}

/// New keys or values, and their cache.
struct Appended<'a> {
    new: &'a [u8],
    from: HeadRows,
    cache: Cache<'a>,
    to: KvRows,
    factors: Option<&'a [f32]>,
    /// Gamma of the head norm.
    gamma: Option<Vec<f32>>,
    columns: usize,
    is_turned: bool,
    has_hadamard: bool,
}

/// Cosines and sines of a token's pairs, times the amplitudes.
struct Turns {
    cos: [f32; MOST_PAIRS],
    sin: [f32; MOST_PAIRS],
}

/// An operation with bound operands.
struct Job<'a> {
    op: &'a CheckedKvAppend,
    simd: &'static Simd,
    q: Option<Written<'a>>,
    /// Gamma of the norm of query heads.
    q_gamma: Option<Vec<f32>>,
    /// New keys and values. None when heads are rotated in
    /// place alone.
    appended: Option<[Appended<'a>; 2]>,
    index: Index<'a>,
    positions: Option<&'a [u32]>,
    angles: Angles<'a>,
}

impl<'a> Job<'a> {
    fn new(op: &'a CheckedKvAppend, simd: &'static Simd, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use KvAppendOperand as O;
        let Addressing { sequences, tokens, .. } = op.addressing;
        let given = op.operands();
        let mut words = |operand: O, count: usize| match given.contains(&operand) {
            true => read::<u32>(&mut operands, operand, count).map(Some),
            false => Ok(None),
        };
        let index = Index {
            q_offsets: words(O::QOffsets, sequences + 1)?,
            kv_offsets: words(O::KvOffsets, sequences + 1)?,
            lengths: words(O::KvLengths, sequences)?,
            table: words(O::BlockTable, sequences * op.addressing.paging().width)?,
        };
        let positions = words(O::Positions, tokens)?;
        let frequencies = words(O::Frequencies, op.rotary.map_or(0, |rotary| rotary.dim))?;
        let mut floats = |operand: O, count: usize| match given.contains(&operand) {
            true => read::<f32>(&mut operands, operand, count).map(Some),
            false => Ok(None),
        };
        let angles = match op.rotary {
            None => Angles::Nothing,
            Some(CheckedRotary { dim, angles: RotaryAngles::Tables { positions, row_stride }, .. }) => {
                let row_stride = row_stride as usize;
                let len = if positions == 0 { 0 } else { (positions - 1) * row_stride + dim / 2 };
                let (cos, sin) = (floats(O::Cos, len)?.unwrap_or_default(), floats(O::Sin, len)?.unwrap_or_default());
                Angles::Tables { cos, sin, positions, row_stride }
            }
            Some(_) => Angles::Frequencies(frequencies.unwrap_or_default()),
        };
        let q = match op.heads {
            0 => None,
            heads => {
                let end = rows_end(&op.q, tokens, heads, op.qk_dim) * op.dtype.bytes();
                Some(Written::new(operands.take_mut(O::Q), O::Q.name(), end)?)
            }
        };
        let q_gamma = op.head_norm.filter(|_| op.heads > 0);
        let q_gamma = q_gamma.map(|norm| gamma_of(&norm, simd, &mut operands, O::QGamma, op.qk_dim)).transpose()?;
        let appended = match op.appends() {
            true => Some([Appended::keys(op, simd, &mut operands)?, Appended::values(op, &mut operands)?]),
            false => None,
        };
        Ok(Self { op, simd, q, q_gamma, appended, index, positions, angles })
    }

    fn run(&self, threads: usize) {
        let op = self.op;
        let sequences: Vec<Sequence> =
            (0..op.addressing.sequences).map(|sequence| self.index.sequence(&op.addressing, sequence)).collect();
        let parts = op.kv_heads.max(1);
        let of_part = |part: usize| self.task(&sequences, part..part + 1, Share { number: 0, of: 1 });
        if threads == 1 {
            return self.task(&sequences, 0..parts, Share { number: 0, of: 1 });
        }
        // The angles of a token are computed once
        // for all of its heads.
        let shares = (op.addressing.tokens / TASK_TOKENS).min(2 * threads);
        match shares > parts {
            true => (0..shares)
                .into_par_iter()
                .with_max_len(1)
                .for_each(|number| self.task(&sequences, 0..parts, Share { number, of: shares })),
            false => (0..parts).into_par_iter().with_max_len(1).for_each(of_part),
        }
    }

    /// A share of the tokens, for some KV heads and their query
    /// heads; without KV heads, for all query heads.
    fn task(&self, sequences: &[Sequence], parts: Range<usize>, share: Share) {
        let op = self.op;
        let paging = op.addressing.paging();
        let of_parts = op.kv_heads.max(1);
        let heads = parts.start * op.heads / of_parts..parts.end * op.heads / of_parts;
        let mut turns = Turns { cos: [0.0; MOST_PAIRS], sin: [0.0; MOST_PAIRS] };
        let mut values = [0.0; MOST_HEAD_DIM];
        for sequence in sequences {
            for i in 0..sequence.queries {
                // A token before the first key has no key.
                let Some(key) = (sequence.keys + i).checked_sub(sequence.queries) else { continue };
                let token = sequence.token + i;
                let place = self.index.place(paging, sequence, key);
                if !share.has(place.map_or(token, |(page, row)| page * paging.page_size + row)) {
                    continue;
                }
                let position = self.positions.map_or(key as u32, |positions| positions[token]);
                if !self.angles_of(position, &mut turns) {
                    continue;
                }
                if let (Some(q), true) = (&self.q, op.rotates_queries()) {
                    for head in heads.clone() {
                        let element = element(&op.q, token, head);
                        let values = &mut values[..op.qk_dim];
                        // SAFETY: a token's query heads belong to one task each and
                        // do not overlap: no token belongs to two sequences (`Index::sequence`).
                        unsafe { q.load(self.simd, op.dtype, element, values) };
                        self.normalize(self.q_gamma.as_deref(), values);
                        self.rotate(&turns, true, op.rotate_k, values);
                        // SAFETY: as above.
                        unsafe { q.store(op.dtype, element, values) };
                    }
                }
                let (Some(place), Some(both)) = (place, &self.appended) else { continue };
                for kv_head in parts.clone() {
                    for of in both {
                        // SAFETY: a head of a cache row belongs to one task,
                        // and heads do not overlap.
                        unsafe { self.append(of, &turns, (token, kv_head), place, &mut values) };
                    }
                }
            }
        }
    }

    /// Converts a head of a token to the cache.
    ///
    /// # Safety
    /// No other thread may write the same elements.
    unsafe fn append(
        &self,
        of: &Appended<'_>,
        turns: &Turns,
        (token, head): (usize, usize),
        (page, row): (usize, usize),
        values: &mut [f32; MOST_HEAD_DIM],
    ) {
        let (values, dtype) = (&mut values[..of.columns], self.op.dtype);
        self.simd.to_f32(dtype, &of.new[element(&of.from, token, head) * dtype.bytes()..], values);
        self.normalize(of.gamma.as_deref(), values);
        self.rotate(turns, of.is_turned, of.has_hadamard, values);
        let factor = of.factors.map_or(1.0, |factors| factors[head]);
        // SAFETY: guaranteed by the caller.
        unsafe { of.cache.store(at(&of.to, page, row, head), values, factor) };
    }

    /// Norm of a head, if it has a gamma.
    fn normalize(&self, gamma: Option<&[f32]>, values: &mut [f32]) {
        if let Some((norm, gamma)) = self.op.head_norm.zip(gamma) {
            normalize(values, gamma, norm.eps);
        }
    }

    /// Rotary embedding, if the head `is_turned`, and Hadamard
    /// rotation of a head.
    fn rotate(&self, turns: &Turns, is_turned: bool, has_hadamard: bool, values: &mut [f32]) {
        let rotary = self.op.rotary.filter(|_| is_turned);
        let turns_last = self.op.turns_last();
        if let (Some(rotary), false) = (&rotary, turns_last) {
            turn(rotary, &turns.cos, &turns.sin, values);
        }
        if has_hadamard {
            hadamard(values);
        }
        if let (Some(rotary), true) = (&rotary, turns_last) {
            turn(rotary, &turns.cos, &turns.sin, values);
        }
    }

    /// Cosines and sines of a position, times the amplitudes; `false` when
    /// the tables do not have the position.
    fn angles_of(&self, position: u32, Turns { cos, sin }: &mut Turns) -> bool {
        let Some(rotary) = self.op.rotary else { return true };
        let (pairs, amplitude, of_sines) = (rotary.dim / 2, rotary.amplitude, rotary.sine_amplitude());
        let both = cos[..pairs].iter_mut().zip(&mut sin[..pairs]);
        match self.angles {
            Angles::Nothing => {}
            Angles::Frequencies(words) => {
                for ((cos, sin), &[low, high]) in both.zip(words.as_chunks().0) {
                    let turns = (u64::from(high) << 32 | u64::from(low)).wrapping_mul(u64::from(position));
                    (*cos, *sin) = cos_sin(turns);
                    *cos *= amplitude;
                    *sin *= of_sines;
                }
            }
            Angles::Tables { cos: of_cos, sin: of_sin, positions, row_stride } => {
                let position = position as usize;
                if position >= positions {
                    return false;
                }
                let row = position * row_stride..position * row_stride + pairs;
                for ((cos, sin), (of_cos, of_sin)) in both.zip(of_cos[row.clone()].iter().zip(&of_sin[row])) {
                    (*cos, *sin) = (of_cos * amplitude, of_sin * of_sines);
                }
            }
        }
        true
    }
}

impl<'a> Appended<'a> {
    fn keys(op: &CheckedKvAppend, simd: &Simd, operands: &mut Operands<'a>) -> Result<Self, HalError> {
        use KvAppendOperand as O;
        let names = [O::NewK, O::K, O::KScales, O::KFactors];
        let of = Self::of(op, operands, names, (op.new_k, op.k), op.qk_dim)?;
        let gamma = op.head_norm.map(|norm| gamma_of(&norm, simd, operands, O::KGamma, op.qk_dim)).transpose()?;
        Ok(Self { gamma, is_turned: true, has_hadamard: op.rotate_k, ..of })
    }

    fn values(op: &CheckedKvAppend, operands: &mut Operands<'a>) -> Result<Self, HalError> {
        use KvAppendOperand as O;
        let names = [O::NewV, O::V, O::VScales, O::VFactors];
        let of = Self::of(op, operands, names, (op.new_v, op.v), op.v_dim)?;
        Ok(Self { is_turned: false, has_hadamard: op.rotate_v, ..of })
    }

    /// Not rotated.
    fn of(
        op: &CheckedKvAppend,
        operands: &mut Operands<'a>,
        [new, numbers, scales, factors]: [KvAppendOperand; 4],
        (from, to): (HeadRows, KvRows),
        columns: usize,
    ) -> Result<Self, HalError> {
        let (what, end) = (new.name(), rows_end(&from, op.addressing.tokens, op.kv_heads, columns) * op.dtype.bytes());
        let new = host_bytes(operands.take(new).ok_or(absent(what, end))?, what)?;
        if new.len() < end {
            return Err(absent(what, end));
        }
        let factors = match op.kv.has_factors() {
            true => Some(read::<f32>(operands, factors, op.kv_heads)?),
            false => None,
        };
        let Paging { pages, page_size, .. } = op.addressing.paging();
        let end = match pages > 0 && page_size > 0 {
            true => at(&to, pages - 1, page_size - 1, op.kv_heads - 1) + columns,
            false => 0,
        };
        let mut written = |operand: KvAppendOperand, end| Written::new(operands.take_mut(operand), operand.name(), end);
        let numbers = written(numbers, op.kv.bytes_of(end))?;
        let has_scales = op.kv.has_scales();
        let scales = has_scales.then(|| written(scales, end / KV_BLOCK * KV_SCALE_BYTES)).transpose()?;
        let cache = Cache { format: op.kv, numbers, scales };
        Ok(Self { new, from, cache, to, factors, gamma: None, columns, is_turned: false, has_hadamard: false })
    }
}

/// First element of a head of a token.
fn element(rows: &HeadRows, token: usize, head: usize) -> usize {
    token * rows.token_stride as usize + head * rows.head_stride as usize
}

/// Elements up to the end of the last token's last head.
fn rows_end(rows: &HeadRows, tokens: usize, heads: usize, columns: usize) -> usize {
    element(rows, tokens - 1, heads - 1) + columns
}

/// First element of a head of a cached key.
fn at(rows: &KvRows, page: usize, row: usize, head: usize) -> usize {
    page * rows.page_stride as usize + element(&rows.rows, row, head)
}
