//! Activations of eight bits: how a format's products quantize them, and the rows of words that kernels read.

use qgemm_formats::{Encoding, Format};

use super::codes::{CodeShape, TABLE_OFFSET};
use super::kernel::VALUE_BYTE;

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
#[inline(always)]
pub fn quantize(how: &Quantization, values: &[f32], out: &mut [u32]) {
    let row = how.row(values.len());
    let (codes, rest) = out[..row.words].split_at_mut(row.flips);
    let (flips, rest) = rest.split_at_mut(row.factors - row.flips);
    let (factors, sums) = rest.split_at_mut(row.sums - row.factors);
    let blocks = values.chunks_exact(how.block).zip(codes.chunks_exact_mut(how.block / 4));
    let sums_of_blocks = sums.chunks_exact_mut(how.block / how.span);
    for (((values, codes), factor), sums) in blocks.zip(factors).zip(sums_of_blocks) {
        // Magnitudes are in the order of their bits.
        let largest = values.iter().fold(0, |largest, v| largest.max(v.to_bits() & 0x7fff_ffff));
        let mut d = (f32::from_bits(largest) / 127.0).max(f32::MIN_POSITIVE);
        let mut inverse = 1.0 / d;
        if largest >= f32::INFINITY.to_bits() {
            (d, inverse) = (f32::NAN, 0.0);
        }
        *factor = d.to_bits();
        for (values, codes) in values.as_chunks::<16>().0.iter().zip(codes.as_chunks_mut::<4>().0) {
            *codes = quantize_16(values, inverse);
        }
        for (sum, codes) in sums.iter_mut().zip(codes.chunks_exact(how.span / 4)) {
            let total: i32 = codes.iter().map(|&quad| quad_sum(quad)).sum();
            *sum = match how.offset {
                Some(offset) => (-offset * total) as u32,
                None if how.block == how.span => (total as f32 * d).to_bits(),
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

/// The codes of sixteen values.
#[inline(always)]
fn quantize_16(values: &[f32; 16], inverse: f32) -> [u32; 4] {
    // Adding this brings integers below 2²² into the lower bits, rounded to nearest even, without a conversion that would have
    // to be checked. A NaN, whose code does not count, stays some byte.
    const ROUND: f32 = 12_582_912.0;
    let bits = values.map(|v| (v * inverse + ROUND).to_bits() & 0xff);
    std::array::from_fn(|quad| (0..4).fold(0, |word, i| word | bits[4 * quad + i] << (8 * VALUE_BYTE[i])))
}

#[inline(always)]
fn quad_sum(quad: u32) -> i32 {
    quad.to_le_bytes().iter().map(|&code| i32::from(code as i8)).sum()
}
