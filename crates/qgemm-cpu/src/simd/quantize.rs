//! Activations of eight bits: how a format's products quantize them, and the rows of words that kernels read.

use qgemm_formats::{Encoding, Format};

use super::codes::{CodeShape, TABLE_OFFSET};
use super::vector::{LANES, Vector};

/// Columns of blocks and of spans that there are kernels for.
const LENGTHS: [(usize, usize); 4] = [(32, 32), (32, 16), (256, 32), (256, 16)];

/// How the activations of a format's products are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    /// Columns that share a factor.
    pub block: usize,
    /// Columns of a span, whose sum of codes is kept: those of a sub-block of W, [`Quantization::MOST_SPAN`] at most.
    pub span: usize,
    /// Columns that share scale and minimum of W.
    pub sub_block: usize,
    /// What is subtracted from every unsigned code of W; `None` where sub-blocks have minima instead.
    pub offset: Option<i32>,
    /// Whether tokens are magnitudes and signs, as some levels' products want them where the offset is 128.
    pub magnitudes: bool,
    /// Numbers of the [`CodeShape`] of W's codes, among those of packed codes and among those of unpacked ones.
    pub shapes: [usize; 2],
    format: Format,
}

impl Quantization {
    /// Columns that may share a factor, longest first.
    pub const BLOCKS: [usize; 2] = [256, 32];

    /// Columns whose products are added up before scales act on them, where sub-blocks are longer.
    pub const MOST_SPAN: usize = 32;

    /// For weights of `format`, with a factor for every `block` columns of a token; `None` where codes are no integers of eight bits, or
    /// no kernel takes such blocks.
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

    /// The same for a level whose products take `magnitudes` where the offset is 128.
    pub fn with_magnitudes(self, magnitudes: bool) -> Self {
        Self { magnitudes: magnitudes && self.offset == Some(TABLE_OFFSET), ..self }
    }

    /// The weights' format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Writes to `out` the first words of a token of `columns` columns, a multiple of a block and of a quad, that is quantized already: to
    /// `codes`, zeros behind them, with the factor of the block that begins with a column.
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

    /// Where the parts of a row of `columns` columns are.
    pub fn row(&self, columns: usize) -> Row {
        let flips = columns / 4;
        let factors = if self.magnitudes { 2 * flips } else { flips };
        let sums = factors + columns / self.block;
        Row { flips, factors, sums, words: sums + columns / self.span }
    }
}

/// A quantized token in memory of 32-bit words: its codes, quads of columns in the order of packed weights, then the factor of
/// every block, then for every span `−offset · Σ codes` as an integer, or, where W has minima, `Σ codes` as f32 (times the factor
/// where that is of no longer blocks). With [`Quantization::magnitudes`], codes are magnitudes, the factors come behind as many words
/// of flips, bytes of 0x80 and for negative codes 0x7f, and the integer is the sum of the magnitudes of these. The same words of
/// tokens that are multiplied at once lie side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Word at which the flips begin, if there are any.
    pub flips: usize,
    /// Word at which the factors begin.
    pub factors: usize,
    /// Word at which the sums begin.
    pub sums: usize,
    /// Words of a row.
    pub words: usize,
}

/// Quantizes a token, a multiple of a k-tile long, to `out`, [`Row::words`] words.
///
/// A block's factor is its largest magnitude over 127, codes are rounded to nearest even. Of a block with NaN or infinity the
/// factor is NaN.
///
/// # Safety
/// The processor has the level's instructions.
#[inline(always)]
pub unsafe fn quantize<V: Vector>(how: &Quantization, values: &[f32], out: &mut [u32]) {
    // Lengths that the compiler knows: divisions by others took a third of the time.
    // SAFETY: the caller's promise.
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

/// [`quantize`], with blocks of `BLOCK` vectors and spans of `SPAN`.
///
/// # Safety
/// As of [`quantize`].
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
        // SAFETY: the caller's promise.
        *factor = unsafe { largest_magnitude::<V>(vectors) };
    }
    // Divisions of several blocks at once are vectors. Sums are made later, and there are at least as many.
    for (factor, inverse) in factors.iter_mut().zip(&mut *sums) {
        let d = (f32::from_bits(*factor) / 127.0).max(f32::MIN_POSITIVE);
        let finite = *factor < f32::INFINITY.to_bits();
        *inverse = if finite { (1.0 / d).to_bits() } else { 0 };
        *factor = if finite { d } else { f32::NAN }.to_bits();
    }
    // From the last block on: a block's sums overwrite only inverses that were used.
    for (block, ((vectors, quads), &mut factor)) in vectors.iter().zip(quads).zip(factors).enumerate().rev() {
        let (d, inverse) = (f32::from_bits(factor), f32::from_bits(sums[block]));
        let spans = vectors.as_chunks::<SPAN>().0.iter().zip(quads.as_chunks_mut::<SPAN>().0);
        for ((vectors, quads), sum) in spans.zip(&mut sums[block * (BLOCK / SPAN)..]) {
            // SAFETY: the caller's promise.
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

/// Makes codes magnitudes, whose signs are kept as flips; returns the sum of those of negative codes.
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

/// The bits of the largest magnitude: magnitudes are in the order of their bits.
///
/// # Safety
/// The processor has the level's instructions.
#[inline(always)]
unsafe fn largest_magnitude<V: Vector>(vectors: &[[f32; LANES]]) -> u32 {
    // SAFETY: the caller's promise; arrays have sixteen lanes.
    unsafe {
        let mut largest = V::splat_word(0);
        for values in vectors {
            largest = V::largest(largest, V::and(V::float_bits(V::load(values.as_ptr())), 0x7fff_ffff));
        }
        V::largest_lane(largest)
    }
}

/// Writes the codes of a span, and returns their sum. Those of a NaN, which do not count, are some bytes.
///
/// # Safety
/// The processor has the level's instructions.
#[inline(always)]
unsafe fn quantize_span<V: Vector>(vectors: &[[f32; LANES]], inverse: f32, quads: &mut [[u32; 4]]) -> i32 {
    // Adding this brings integers below 2²² into the lower bits, rounded to nearest even.
    const ROUND: f32 = 12_582_912.0;
    // SAFETY: the caller's promise; arrays have sixteen lanes.
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
