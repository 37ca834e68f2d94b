//! Written operands: queries in place, and rows of a cache in its format.

use std::marker::PhantomData;

use qgemm_formats::DType;
use qgemm_formats::float8::f32_to_e4m3;
use qgemm_hal::op::attention::{KV_BLOCK, MOST_HEAD_DIM};
use qgemm_hal::{BufferMut, DeviceId, HalError, HostMemory, KvFormat};

use crate::convert;
use crate::operand::absent;
use crate::simd::Simd;

/// An operand that threads write concurrently.
pub(super) struct Written<'a> {
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
    pub fn new(view: Option<BufferMut<'a>>, what: &'static str, end: usize) -> Result<Self, HalError> {
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
    pub unsafe fn load(&self, simd: &Simd, dtype: DType, element: usize, out: &mut [f32]) {
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
    pub unsafe fn store(&self, dtype: DType, element: usize, values: &[f32]) {
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
pub(super) struct Cache<'a> {
    pub format: KvFormat,
    pub numbers: Written<'a>,
    /// Block scales, if the format has them.
    pub scales: Option<Written<'a>>,
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
    pub unsafe fn store(&self, element: usize, values: &[f32], factor: f32) {
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
