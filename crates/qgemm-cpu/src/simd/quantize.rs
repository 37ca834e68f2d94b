//! INT8 activations: their quantization for a format's products, and
//! the row layout that kernels read.

use qgemm_formats::{Encoding, Format};

use super::codes::{CodeShape, TABLE_OFFSET};
use super::vector::{LANES, Vector};

/// Supported lengths of blocks and spans.
const LENGTHS: [(usize, usize); 4] = [(32, 32), (32, 16), (256, 32), (256, 16)];

/// Quantization of activations for a format's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    /// Columns that share a factor.
    pub block: usize,
    /// Columns of a span, whose code sum is stored: a sub-block
    /// of W, at most [`Quantization::MOST_SPAN`].
    pub span: usize,
    /// Columns that share scale and minimum of W.
    pub sub_block: usize,
    /// Offset of the unsigned codes of W; `None` when
    /// sub-blocks have minimums instead.
    pub offset: Option<i32>,
    /// Whether tokens are stored as magnitudes and signs, which some
    /// levels need for an offset of 128.
    pub magnitudes: bool,
    /// Index of the [`CodeShape`] of W's packed codes,
    /// and of its unpacked codes.
    pub shapes: [usize; 2],
    format: Format,
}

impl Quantization {
    /// Supported block lengths, longest first.
    pub const BLOCKS: [usize; 2] = [256, 32];

    /// Maximum columns whose products are summed before scales apply.
    pub const MOST_SPAN: usize = 32;

    /// Quantization for weights of `format`, with a factor for every `block`
    /// columns of a token. `None` when codes are not integers of
    /// up to 8 bits, or no kernel supports such blocks.
    pub fn new(format: Format, block: usize) -> Option<Self> {
        let offset = match format.encoding {
            Encoding::IntOffset { offset } => Some(offset),
            Encoding::IntAffine | Encoding::IntZero => None,
            Encoding::Codebook(_) => Some(TABLE_OFFSET),
            Encoding::E4M3 | Encoding::E5M2 | Encoding::Plain(_) => return None,
        };
        let sub_block = format.sub_block;
        let span = sub_block.min(Self::MOST_SPAN);
        let planes = [0, 1].map(|plane| format.code_planes.get(plane).map_or(0, |&bits| bits.into()));
        if !LENGTHS.contains(&(block, span)) {
            return None;
        }
        let shape = CodeShape::new(format.encoding, planes, span, block > span);
        let shapes = [shape.number()?, shape.unpacked().number()? - CodeShape::PACKED];
        Some(Self { block, span, sub_block, offset, magnitudes: false, shapes, format })
    }

    /// Adapts it to a level whose products need
    /// `magnitudes` for an offset of 128.
    pub fn with_magnitudes(self, magnitudes: bool) -> Self {
        Self { magnitudes: magnitudes && self.offset == Some(TABLE_OFFSET), ..self }
    }

    /// Format of the weights.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Writes the row of an already quantized token to `out`. The
    /// row has `columns` columns (a multiple of a block and of
    /// a quad) from `codes`, zero-padded, and `factor` returns the
    /// factor of the block at a column.
    pub fn arrange(&self, columns: usize, codes: &[u8], factor: impl Fn(usize) -> f32, out: &mut [u32]) {
        let row = self.row(columns);
        let (words, rest) = out[..row.words].split_at_mut(row.flips);
        let (flips, rest) = rest.split_at_mut(row.factors - row.flips);
        let (factors, sums) = rest.split_at_mut(row.sums - row.factors);
        words.fill(0);
        let (quads, last) = codes.as_chunks::<4>();
        for (word, &[a, b, c, d]) in words.iter_mut().zip(quads) {
            *word = u32::from_le_bytes([a, c, b, d]);
        }
        if let (Some(word), false) = (words.get_mut(quads.len()), last.is_empty()) {
            let of = |i: usize| last.get(i).copied().unwrap_or(0);
            *word = u32::from_le_bytes([of(0), of(2), of(1), of(3)]);
        }
        for (block, to) in factors.iter_mut().enumerate() {
            *to = factor(block * self.block).to_bits();
        }
        for (span, (words, sum)) in words.chunks_exact(self.span / 4).zip(&mut *sums).enumerate() {
            let code_sum = |word: &u32| word.to_le_bytes().iter().map(|&byte| i32::from(byte as i8)).sum::<i32>();
            let total: i32 = words.iter().map(code_sum).sum();
            *sum = match self.offset {
                Some(offset) => total.wrapping_mul(-offset) as u32,
                None if self.block == self.span => (total as f32 * f32::from_bits(factors[span])).to_bits(),
                None => (total as f32).to_bits(),
            };
        }
        if self.magnitudes {
            let quads = self.span / 4;
            for ((words, flips), sum) in words.chunks_exact_mut(quads).zip(flips.chunks_exact_mut(quads)).zip(sums) {
                *sum = take_signs(words, flips);
            }
        }
    }

    /// Row layout for `columns` columns.
    pub fn row(&self, columns: usize) -> Row {
        let flips = columns / 4;
        let factors = if self.magnitudes { 2 * flips } else { flips };
        let sums = factors + columns / self.block;
        Row { flips, factors, sums, words: sums + columns / self.span }
    }
}

/// Row layout of a quantized token, in 32-bit words:
///
/// - codes, in quads of columns in the order of packed weights;
/// - the factor of every block;
/// - a sum for every span: `−offset · Σ codes` as an
///   integer. When W has minimums, it is `Σ codes` as f32,
///   times the factor if blocks are no longer than spans.
///
/// With [`Quantization::magnitudes`], codes are magnitudes. They are
/// followed by as many words of flips: bytes of 0x80, or
/// 0x7f for negative codes. The integer is then the sum of
/// the negative codes' magnitudes. Words of tokens that are
/// multiplied at once are interleaved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// First word of the flips, if any.
    pub flips: usize,
    /// First word of the factors.
    pub factors: usize,
    /// First word of the sums.
    pub sums: usize,
    /// Words of a row.
    pub words: usize,
}

/// Quantizes a token, a multiple of a k-tile long, to the
/// [`Row::words`] words of `out`.
///
/// A block's factor is its largest magnitude over 127.
/// Codes are rounded to nearest even. A block with NaN or
/// infinity has a NaN factor.
///
/// # Safety
/// The CPU must support the level's instructions.
#[inline(always)]
pub unsafe fn quantize<V: Vector>(how: &Quantization, values: &[f32], out: &mut [u32]) {
    // Compile-time lengths, because divisions by run-time lengths took a third
    // of the time. SAFETY: guaranteed by the caller.
    unsafe {
        match (how.block, how.span) {
            (32, 32) => quantize_blocks::<V, 2, 2>(how, values, out),
            (32, 16) => quantize_blocks::<V, 2, 1>(how, values, out),
            (256, 32) => quantize_blocks::<V, 16, 2>(how, values, out),
            (256, 16) => quantize_blocks::<V, 16, 1>(how, values, out),
            other => unreachable!("{other:?} is none of {LENGTHS:?}"),
        }
    }
}

/// [`quantize`] with blocks of `BLOCK` vectors and spans of `SPAN` vectors.
///
/// # Safety
/// As for [`quantize`].
#[inline(always)]
unsafe fn quantize_blocks<V: Vector, const BLOCK: usize, const SPAN: usize>(
    how: &Quantization,
    values: &[f32],
    out: &mut [u32],
) {
    let row = how.row(values.len());
    let (codes, rest) = out[..row.words].split_at_mut(row.flips);
    let (flips, rest) = rest.split_at_mut(row.factors - row.flips);
    let (factors, sums) = rest.split_at_mut(row.sums - row.factors);
    let vectors = values.as_chunks::<LANES>().0.as_chunks::<BLOCK>().0;
    let quads = codes.as_chunks_mut::<4>().0.as_chunks_mut::<BLOCK>().0;
    for (vectors, factor) in vectors.iter().zip(&mut *factors) {
        // SAFETY: guaranteed by the caller.
        *factor = unsafe { largest_magnitude::<V>(vectors) };
    }
    // Divisions of several blocks vectorize. The memory of
    // the sums, which are computed later and are at least as
    // many, holds the inverses.
    for (factor, inverse) in factors.iter_mut().zip(&mut *sums) {
        let d = (f32::from_bits(*factor) / 127.0).max(f32::MIN_POSITIVE);
        let finite = *factor < f32::INFINITY.to_bits();
        *inverse = if finite { (1.0 / d).to_bits() } else { 0 };
        *factor = if finite { d } else { f32::NAN }.to_bits();
    }
    // From the last block on, so that a block's sums only
    // overwrite used inverses.
    for (block, ((vectors, quads), &mut factor)) in vectors.iter().zip(quads).zip(factors).enumerate().rev() {
        let (d, inverse) = (f32::from_bits(factor), f32::from_bits(sums[block]));
        let spans = vectors.as_chunks::<SPAN>().0.iter().zip(quads.as_chunks_mut::<SPAN>().0);
        for ((vectors, quads), sum) in spans.zip(&mut sums[block * (BLOCK / SPAN)..]) {
            // SAFETY: guaranteed by the caller.
            let total = unsafe { quantize_span::<V>(vectors, inverse, quads) };
            *sum = match how.offset {
                Some(offset) => total.wrapping_mul(-offset) as u32,
                None if BLOCK == SPAN => (total as f32 * d).to_bits(),
                None => (total as f32).to_bits(),
            };
        }
    }
    if how.magnitudes {
        let quads = how.span / 4;
        for ((codes, flips), sum) in codes.chunks_exact_mut(quads).zip(flips.chunks_exact_mut(quads)).zip(sums) {
            *sum = take_signs(codes, flips);
        }
    }
}

/// Splits codes into magnitudes and flips. Returns the sum of
/// the negative codes' magnitudes.
#[inline(always)]
fn take_signs(codes: &mut [u32], flips: &mut [u32]) -> u32 {
    let mut sum = 0;
    for (codes, flips) in codes.iter_mut().zip(flips) {
        let ones = *codes >> 7 & 0x0101_0101;
        let negative = ones * 0xff;
        *codes = (*codes ^ negative) + ones;
        *flips = negative ^ 0x8080_8080;
        sum += (*codes & negative).to_le_bytes().iter().map(|&magnitude| u32::from(magnitude)).sum::<u32>();
    }
    sum
}

/// Bits of the largest magnitude. Bits are in the
/// order of the magnitudes.
///
/// # Safety
/// The CPU must support the level's instructions.
#[inline(always)]
unsafe fn largest_magnitude<V: Vector>(vectors: &[[f32; LANES]]) -> u32 {
    // SAFETY: guaranteed by the caller; arrays have sixteen lanes.
    unsafe {
        let mut largest = V::splat_word(0);
        for values in vectors {
            largest = V::largest(largest, V::and(V::float_bits(V::load(values.as_ptr())), 0x7fff_ffff));
        }
        V::largest_lane(largest)
    }
}

/// Writes the codes of a span and returns their sum. NaN
/// yields unspecified codes, which do not matter.
///
/// # Safety
/// The CPU must support the level's instructions.
#[inline(always)]
unsafe fn quantize_span<V: Vector>(vectors: &[[f32; LANES]], inverse: f32, quads: &mut [[u32; 4]]) -> i32 {
    // Adding this moves integers below 2²² into the lower
    // bits, rounded to nearest even.
    const ROUND: f32 = 12_582_912.0;
    // SAFETY: guaranteed by the caller; arrays have sixteen lanes.
    let sum = unsafe {
        let (inverse, one, round) = (V::splat(inverse), V::splat(1.0), V::splat(ROUND));
        let mut sums = V::splat_word(0);
        for (values, quads) in vectors.iter().zip(quads) {
            let scaled = V::multiply(V::load(values.as_ptr()), inverse);
            let words = V::float_bits(V::multiply_add(scaled, one, round));
            V::store_quads(quads, words);
            sums = V::add(sums, words);
        }
        V::sum_of_lanes(sums)
    };
    let rounds = ROUND.to_bits().wrapping_mul((vectors.len() * LANES) as u32);
    sum.wrapping_sub(rounds) as i32
}
