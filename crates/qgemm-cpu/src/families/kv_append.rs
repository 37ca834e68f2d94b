//! Families of `kv_append`: a single one. A task is a KV
//! head with its query heads, for all tokens; or, for many
//! tokens, all heads of tokens whose keys go to certain rows
//! of the cache. No two tasks write the same element,
//! whatever pages a table has.

use std::f32::consts::TAU;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_formats::float8::f32_to_e4m3;
use qgemm_hal::op::attention::{KV_BLOCK, KV_SCALE_BYTES, MOST_HEAD_DIM};
use qgemm_hal::{
    Addressing, BufferMut, CheckedKvAppend, CheckedRotary, Device, DeviceId, DeviceInfo, Families, Family, Geometry,
    HalError, HeadRows, HostMemory, HostStream, Kernel, KernelId, KvAppendConfig, KvAppendLaunch, KvAppendOperand,
    KvAppendSpec, KvAppendStep, KvFormat, KvRows, LaunchSequence, LaunchStep, Operand, Operands, Operation, Paging,
    RotaryAngles, RotaryPairs, Spec, Stream, Unsupported,
};
use rayon::prelude::*;

use super::attention::keys::{Index, Sequence};
use super::attention::read;
use crate::convert;
use crate::operand::{absent, host_bytes};
use crate::pool::Pool;
use crate::processor::Processor;
use crate::simd::Simd;
use crate::source_hash::SOURCE_HASH;

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

    fn configs(&self, op: &CheckedKvAppend, _: &DeviceInfo) -> Result<Vec<KvAppendConfig>, Unsupported> {
        let spec = KvAppendSpec { step: KvAppendStep::All, x: op.dtype, kv: op.kv };
        let kernel = KernelId::new(self.name(), None, Spec::KvAppend(spec));
        Ok(vec![KvAppendConfig { kernel, launches: 1, efficiency: 500 }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedKvAppend,
        plan: &KvAppendLaunch,
    ) -> Result<LaunchSequence, HalError> {
        let cpu = Processor::of(device)?;
        let kernel = CpuKvAppend { op: *op, simd: cpu.simd(), pool: cpu.pool().clone() };
        let geometry = Geometry { grid: [op.kv_heads as u32, 1, 1], threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<KvAppendOperand>(plan.config.kernel, geometry, Arc::new(kernel));
        let step = op.operands().into_iter().fold(step, |step, operand| step.bind(operand, operand));
        let name = format!("kv_append_{}_{}", op.dtype, op.kv);
        Ok(LaunchSequence::new::<KvAppendOperand>(name, vec![step]))
    }

    fn source_hash(&self, _: &CheckedKvAppend, _: &KvAppendConfig) -> u64 {
        SOURCE_HASH
    }
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
        let CheckedKvAppend { heads, kv_heads, qk_dim, v_dim, .. } = self.op;
        let elements = self.op.addressing.tokens * (heads * qk_dim + kv_heads * (qk_dim + v_dim));
        self.pool.share(elements >= SERIAL_ELEMENTS, |threads| job.run(threads));
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

/// An operation with bound operands.
struct Job<'a> {
    op: &'a CheckedKvAppend,
    simd: &'static Simd,
    q: Option<Written<'a>>,
    new_k: &'a [u8],
    new_v: &'a [u8],
    k: Cache<'a>,
    v: Cache<'a>,
    k_factors: Option<&'a [f32]>,
    v_factors: Option<&'a [f32]>,
    index: Index<'a>,
    positions: Option<&'a [u32]>,
    angles: Angles<'a>,
}

impl<'a> Job<'a> {
    fn new(op: &'a CheckedKvAppend, simd: &'static Simd, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use KvAppendOperand as O;
        let Addressing { sequences, tokens, .. } = op.addressing;
        let mut rows = |operand: O, rows: &HeadRows, columns: usize| -> Result<&'a [u8], HalError> {
            let (what, end) = (operand.name(), rows_end(rows, tokens, op.kv_heads, columns) * op.dtype.bytes());
            let bytes = host_bytes(operands.take(operand).ok_or(absent(what, end))?, what)?;
            if bytes.len() < end { Err(absent(what, end)) } else { Ok(bytes) }
        };
        let (new_k, new_v) = (rows(O::NewK, &op.new_k, op.qk_dim)?, rows(O::NewV, &op.new_v, op.v_dim)?);
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
        let (k_factors, v_factors) = (floats(O::KFactors, op.kv_heads)?, floats(O::VFactors, op.kv_heads)?);
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
        let Paging { pages, page_size, .. } = op.addressing.paging();
        let has_rows = pages > 0 && page_size > 0;
        let cache_end = |rows: &KvRows, columns: usize| match has_rows {
            true => at(rows, pages - 1, page_size - 1, op.kv_heads - 1) + columns,
            false => 0,
        };
        let q_end = if op.heads > 0 { rows_end(&op.q, tokens, op.heads, op.qk_dim) } else { 0 };
        let mut written = |operand: O, end: usize| Written::new(operands.take_mut(operand), operand.name(), end);
        let mut cache = |operand: O, scales: O, end: usize| -> Result<Cache<'a>, HalError> {
            let numbers = written(operand, op.kv.bytes_of(end))?;
            let has_scales = op.kv.has_scales();
            let scales = has_scales.then(|| written(scales, end / KV_BLOCK * KV_SCALE_BYTES)).transpose()?;
            Ok(Cache { format: op.kv, numbers, scales })
        };
        let k = cache(O::K, O::KScales, cache_end(&op.k, op.qk_dim))?;
        let v = cache(O::V, O::VScales, cache_end(&op.v, op.v_dim))?;
        let q = if op.heads > 0 { Some(written(O::Q, q_end * op.dtype.bytes())?) } else { None };
        Ok(Self { op, simd, q, new_k, new_v, k, v, k_factors, v_factors, index, positions, angles })
    }

    fn run(&self, threads: usize) {
        let op = self.op;
        let sequences: Vec<Sequence> =
            (0..op.addressing.sequences).map(|sequence| self.index.sequence(&op.addressing, sequence)).collect();
        let of_head = |head: usize| self.task(&sequences, head..head + 1, Share { number: 0, of: 1 });
        if threads == 1 {
            return self.task(&sequences, 0..op.kv_heads, Share { number: 0, of: 1 });
        }
        // The angles of a token are computed once
        // for all of its heads.
        let shares = (op.addressing.tokens / TASK_TOKENS).min(2 * threads);
        match shares > op.kv_heads {
            true => (0..shares)
                .into_par_iter()
                .with_max_len(1)
                .for_each(|number| self.task(&sequences, 0..op.kv_heads, Share { number, of: shares })),
            false => (0..op.kv_heads).into_par_iter().with_max_len(1).for_each(of_head),
        }
    }

    /// A share of the tokens, for some KV heads
    /// and their query heads.
    fn task(&self, sequences: &[Sequence], kv_heads: Range<usize>, share: Share) {
        let op = self.op;
        let paging = op.addressing.paging();
        let heads = kv_heads.start * op.heads / op.kv_heads..kv_heads.end * op.heads / op.kv_heads;
        let (mut cos, mut sin) = ([0.0; MOST_PAIRS], [0.0; MOST_PAIRS]);
        let mut values = [0.0; MOST_HEAD_DIM];
        let width = op.dtype.bytes();
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
                if !self.angles_of(position, &mut cos, &mut sin) {
                    continue;
                }
                if let (Some(q), Some(rotary)) = (&self.q, &op.rotary) {
                    for head in heads.clone() {
                        let element = element(&op.q, token, head);
                        let values = &mut values[..op.qk_dim];
                        // SAFETY: a token's query heads belong to one task each and
                        // do not overlap: no token belongs to two sequences (`Index::sequence`).
                        unsafe { q.load(self.simd, op.dtype, element, values) };
                        turn(rotary, &cos, &sin, values);
                        // SAFETY: as above.
                        unsafe { q.store(op.dtype, element, values) };
                    }
                }
                let Some((page, row)) = place else { continue };
                for kv_head in kv_heads.clone() {
                    let keys = &mut values[..op.qk_dim];
                    self.simd.to_f32(op.dtype, &self.new_k[element(&op.new_k, token, kv_head) * width..], keys);
                    if let Some(rotary) = &op.rotary {
                        turn(rotary, &cos, &sin, keys);
                    }
                    let factor = |factors: Option<&[f32]>| factors.map_or(1.0, |factors| factors[kv_head]);
                    // SAFETY: a head of a cache row belongs to one task,
                    // and heads do not overlap.
                    unsafe { self.k.store(at(&op.k, page, row, kv_head), keys, factor(self.k_factors)) };
                    let of_value = &mut values[..op.v_dim];
                    self.simd.to_f32(op.dtype, &self.new_v[element(&op.new_v, token, kv_head) * width..], of_value);
                    // SAFETY: as above.
                    unsafe { self.v.store(at(&op.v, page, row, kv_head), of_value, factor(self.v_factors)) };
                }
            }
        }
    }

    /// Cosines and sines of a position, times the amplitude; `false` when
    /// the tables do not have the position.
    fn angles_of(&self, position: u32, cos: &mut [f32; MOST_PAIRS], sin: &mut [f32; MOST_PAIRS]) -> bool {
        let Some(CheckedRotary { dim, amplitude, .. }) = self.op.rotary else { return true };
        let pairs = dim / 2;
        let both = cos[..pairs].iter_mut().zip(&mut sin[..pairs]);
        match self.angles {
            Angles::Nothing => {}
            Angles::Frequencies(words) => {
                for ((cos, sin), &[low, high]) in both.zip(words.as_chunks().0) {
                    let turns = (u64::from(high) << 32 | u64::from(low)).wrapping_mul(u64::from(position));
                    (*cos, *sin) = cos_sin(turns);
                    *cos *= amplitude;
                    *sin *= amplitude;
                }
            }
            Angles::Tables { cos: of_cos, sin: of_sin, positions, row_stride } => {
                let position = position as usize;
                if position >= positions {
                    return false;
                }
                let row = position * row_stride..position * row_stride + pairs;
                for ((cos, sin), (of_cos, of_sin)) in both.zip(of_cos[row.clone()].iter().zip(&of_sin[row])) {
                    (*cos, *sin) = (of_cos * amplitude, of_sin * amplitude);
                }
            }
        }
        true
    }
}

/// Cosine and sine of a fraction of a
/// turn, in units of 2⁻⁶⁴.
fn cos_sin(turns: u64) -> (f32, f32) {
    // Signed, in units of 2^-32: at most half a turn. f32
    // keeps 24 bits where sine and cosine are steep.
    let nearest = (turns.wrapping_add(1 << 31) >> 32) as u32;
    let quarter = nearest.wrapping_add(1 << 29) >> 30;
    let rest = nearest.wrapping_sub(quarter << 30) as i32;
    let angle = rest as f32 * (TAU / 4_294_967_296.0);
    // Taylor series to the last bit of f32: an angle is at most an eighth
    // of a turn.
    let square = angle * angle;
    let series = |terms: [f32; 5]| terms.iter().fold(0.0, |sum, term| (sum + term) * square);
    let sin = angle + angle * series([0.0, 1.0 / 362_880.0, -1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0]);
    let cos = 1.0 + series([-1.0 / 3_628_800.0, 1.0 / 40_320.0, -1.0 / 720.0, 1.0 / 24.0, -0.5]);
    let (cos, sin) = if quarter & 1 == 0 { (cos, sin) } else { (-sin, cos) };
    if quarter & 2 == 0 { (cos, sin) } else { (-cos, -sin) }
}

/// Rotates the pairs of a head.
fn turn(rotary: &CheckedRotary, cos: &[f32], sin: &[f32], values: &mut [f32]) {
    let pairs = rotary.dim / 2;
    let angles = cos[..pairs].iter().zip(sin);
    let turned = |a: f32, b: f32, (cos, sin): (&f32, &f32)| (a * cos - b * sin, b * cos + a * sin);
    match rotary.pairs {
        RotaryPairs::Neox => {
            let (first, second) = values[..rotary.dim].split_at_mut(pairs);
            let both = first.iter_mut().zip(second).zip(angles);
            both.for_each(|((a, b), angle)| (*a, *b) = turned(*a, *b, angle));
        }
        RotaryPairs::Interleaved => {
            let both = values[..rotary.dim].as_chunks_mut().0.iter_mut().zip(angles);
            both.for_each(|([a, b], angle)| (*a, *b) = turned(*a, *b, angle));
        }
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

/// An operand that threads write concurrently.
struct Written<'a> {
    start: *mut u8,
    len: usize,
    bytes: PhantomData<&'a mut [u8]>,
}

// SAFETY: a `Written` is a `&mut [u8]` whose only accesses are
// `load` and `store`, unsafe methods whose callers must leave
// every element to one thread.
unsafe impl Sync for Written<'_> {}

impl<'a> Written<'a> {
    /// # Errors
    /// [`HalError::OutOfBounds`] when it has fewer than `end` bytes.
    fn new(view: Option<BufferMut<'a>>, what: &'static str, end: usize) -> Result<Self, HalError> {
        let bytes = HostMemory::of_device_mut(DeviceId::CPU, view.ok_or(absent(what, end))?, what)?;
        if bytes.len() < end {
            return Err(absent(what, end));
        }
        Ok(Self { start: bytes.as_mut_ptr(), len: bytes.len(), bytes: PhantomData })
    }

    /// Reads elements of `dtype` from `element` on.
    ///
    /// # Safety
    /// No other thread may write the same elements.
    ///
    /// # Panics
    /// When the range exceeds the operand.
    unsafe fn load(&self, simd: &Simd, dtype: DType, element: usize, out: &mut [f32]) {
        // SAFETY: guaranteed by the caller.
        simd.to_f32(dtype, unsafe { self.bytes(element * dtype.bytes(), out.len() * dtype.bytes()) }, out);
    }

    /// Writes `values` from `element` on, rounded to `dtype`.
    ///
    /// # Safety
    /// No other thread may write the same elements.
    ///
    /// # Panics
    /// When the range exceeds the operand.
    unsafe fn store(&self, dtype: DType, element: usize, values: &[f32]) {
        // SAFETY: guaranteed by the caller.
        let to = unsafe { self.bytes(element * dtype.bytes(), values.len() * dtype.bytes()) };
        convert::from_f32(dtype, values, to);
    }

    /// `len` bytes from byte `first` on.
    ///
    /// # Safety
    /// While the slice exists, no other slice of the same bytes may.
    ///
    /// # Panics
    /// When the range exceeds the operand.
    #[expect(clippy::mut_from_ref, reason = "threads have disjoint ranges of a shared operand")]
    unsafe fn bytes(&self, first: usize, len: usize) -> &mut [u8] {
        assert!(first <= self.len && len <= self.len - first, "rows lie in the operand");
        // SAFETY: the range was just asserted to be in the operand, which `self` borrows
        // mutably; the caller guarantees that nobody else has these bytes.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), len) }
    }
}

/// Keys or values of the cache.
struct Cache<'a> {
    format: KvFormat,
    numbers: Written<'a>,
    /// Block scales, if the format has them.
    scales: Option<Written<'a>>,
}

impl Cache<'_> {
    /// Writes `values` from `element` on in the cache's
    /// format, with this head factor.
    ///
    /// # Safety
    /// No other thread may write the same elements.
    ///
    /// # Panics
    /// When the range exceeds the cache.
    unsafe fn store(&self, element: usize, values: &[f32], factor: f32) {
        if let KvFormat::Plain(dtype) = self.format {
            // SAFETY: guaranteed by the caller.
            return unsafe { self.numbers.store(dtype, element, values) };
        }
        // SAFETY: guaranteed by the caller.
        let codes = unsafe { self.numbers.bytes(self.format.bytes_of(element), self.format.bytes_of(values.len())) };
        if let Some(scales) = &self.scales {
            let mut of_blocks = [0.0; MOST_HEAD_DIM / KV_BLOCK];
            let of_blocks = &mut of_blocks[..values.len() / KV_BLOCK];
            let blocks = values.chunks_exact(KV_BLOCK).zip(codes.chunks_exact_mut(self.format.bytes_of(KV_BLOCK)));
            for (scale, (values, codes)) in of_blocks.iter_mut().zip(blocks) {
                *scale = quantize_block(self.format, values, codes);
            }
            // SAFETY: guaranteed by the caller. The scale of element `i` is
            // scale `i / KV_BLOCK`, and heads are whole blocks.
            unsafe { scales.store(DType::F16, element / KV_BLOCK, of_blocks) };
        } else {
            let inverse = 1.0 / factor;
            codes.iter_mut().zip(values).for_each(|(code, value)| *code = f32_to_e4m3(value * inverse));
        }
    }
}

/// Quantizes a block and returns its scale. Each step is one
/// f32 operation, so every backend gets the same bits.
fn quantize_block(format: KvFormat, values: &[f32], codes: &mut [u8]) -> f32 {
    let (high, low) = extremes(values);
    let magnitude = high.max(-low);
    if magnitude == 0.0 {
        codes.fill(if format == KvFormat::Q4_0 { 0x88 } else { 0 });
        return 0.0;
    }
    if format == KvFormat::Q4_0 {
        // The value of the largest magnitude becomes -8.
        let furthest = if high > -low { high } else { low };
        let inverse = -8.0 * (1.0 / furthest);
        let code = |value: f32| ((value * inverse + 8.5) as u8).min(15);
        let pairs = values.as_chunks().0.iter();
        codes.iter_mut().zip(pairs).for_each(|(byte, &[first, second])| *byte = code(first) | code(second) << 4);
        return furthest * -0.125;
    }
    let inverse = 127.0 * (1.0 / magnitude);
    codes.iter_mut().zip(values).for_each(|(byte, value)| {
        *byte = (nearest(value * inverse) as i8).cast_unsigned();
    });
    magnitude * (1.0 / 127.0)
}

/// Nearest integer of a number below 2²², ties to even. Without
/// SSE4.1, `round_ties_even` is a function call.
fn nearest(number: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    (number + ROUND) - ROUND
}

/// The largest and the smallest value, and zero.
fn extremes(values: &[f32]) -> (f32, f32) {
    const LANES: usize = 8;
    let (mut high, mut low) = ([0f32; LANES], [0f32; LANES]);
    let (eights, rest) = values.as_chunks::<LANES>();
    for values in eights {
        for (i, value) in values.iter().enumerate() {
            (high[i], low[i]) = (high[i].max(*value), low[i].min(*value));
        }
    }
    let high = high.iter().chain(rest).copied().fold(0.0, f32::max);
    (high, low.iter().chain(rest).copied().fold(0.0, f32::min))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_turns_have_their_cosines_and_sines() {
        for i in 0..1000u64 {
            let turns = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let (sin, cos) = (turns as f64 / 2f64.powi(64) * std::f64::consts::TAU).sin_cos();
            let (got_cos, got_sin) = cos_sin(turns);
            assert!((f64::from(got_cos) - cos).abs() < 2e-7 && (f64::from(got_sin) - sin).abs() < 2e-7, "{i}");
        }
        assert_eq!(cos_sin(1 << 62), (0.0, 1.0));
    }
}
