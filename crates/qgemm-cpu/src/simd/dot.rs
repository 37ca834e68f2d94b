//! The kernels for activations of eight bits: codes of a packed slab to bytes, and their dot products with quantized tokens.
//!
//! Products of codes are added up exactly, a span of columns at a time; what scales make of such sums is one chain of f32
//! operations over the spans in ascending order. So bits depend neither on what is computed beside them nor on the level, but
//! for fused multiply-adds.

use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{Encoding, Format};

use super::kernel::{VALUE_BYTE, WORDS};
use super::vector::{Dot, LANES, Vector};
use super::{Ahead, BLOCK_ROWS, Scales, Slab, scales};

/// What codes of tables are offset by, so that they are unsigned.
const TABLE_OFFSET: i32 = 128;

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
}

impl Quantization {
    /// Columns whose products are added up before scales act on them, where sub-blocks are longer.
    pub const MOST_SPAN: usize = 32;

    /// For weights of `format`; `None` where codes are no integers of eight bits.
    pub fn new(format: Format) -> Option<Self> {
        let offset = match format.encoding {
            Encoding::IntOffset { offset } => Some(offset),
            Encoding::IntAffine | Encoding::IntZero => None,
            Encoding::Codebook(_) => Some(TABLE_OFFSET),
            Encoding::E4M3 | Encoding::E5M2 | Encoding::Plain(_) => return None,
        };
        let sub_block = format.sub_block;
        Some(Self { block: format.activation_block(), span: sub_block.min(Self::MOST_SPAN), sub_block, offset })
    }

    /// Whether a factor is for more than one span, so that it acts on their scaled sums.
    pub fn is_wide(&self) -> bool {
        self.block > self.span
    }

    /// Where the parts of a row of `columns` columns are.
    pub fn row(&self, columns: usize) -> Row {
        let factors = columns / 4;
        let sums = factors + columns / self.block;
        Row { factors, sums, floats: sums + columns / self.span }
    }
}

/// A quantized token in memory of 32-bit words: its codes, quads of columns in the order of packed weights, then the factor of
/// every block, then for every span `−offset · Σ codes` as an integer, or, where W has minima, `Σ codes` as f32 (times the factor
/// where that is of no longer blocks).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Word at which the factors begin.
    pub factors: usize,
    /// Word at which the sums begin.
    pub sums: usize,
    /// Words of a row.
    pub floats: usize,
}

/// Quantizes a token, a multiple of a slab long, to `out`, [`Row::floats`] words.
///
/// A block's factor is its largest magnitude over 127, codes are rounded to nearest even. Of a block with NaN or infinity the
/// factor is NaN.
#[inline(always)]
pub fn quantize(how: &Quantization, values: &[f32], out: &mut [u32]) {
    let row = how.row(values.len());
    let (codes, rest) = out[..row.floats].split_at_mut(row.factors);
    let (factors, sums) = rest.split_at_mut(row.sums - row.factors);
    let blocks = values.chunks_exact(how.block).zip(codes.chunks_exact_mut(how.block / 4));
    let sums = sums.chunks_exact_mut(how.block / how.span);
    for (((values, codes), factor), sums) in blocks.zip(factors).zip(sums) {
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

/// The unsigned codes of all columns of `slab`, to `out[quad][lane]`, four columns a word.
///
/// # Safety
/// As of [`Vector`]'s functions; `out` holds as many words, and the slab its planes.
#[inline(always)]
unsafe fn decode_bytes<V: Vector>(slab: &Slab<'_>, out: &mut [u32]) {
    let bits = |plane: usize| slab.layout.codes.get(plane).map_or(0, |p| p.bits);
    let table = match slab.layout.format().encoding {
        Encoding::Codebook(table) => Some(table.map(|number| (i32::from(number) + TABLE_OFFSET) as u8)),
        _ => None,
    };
    // SAFETY: the caller's promise.
    unsafe {
        match (table, bits(0), bits(1)) {
            (Some(table), ..) => bytes::<V, 4, 0>(slab, out, |codes| V::lookup_bytes(&table, codes)),
            (_, 8, _) => bytes::<V, 8, 0>(slab, out, |codes| codes),
            (_, 4, 0) => bytes::<V, 4, 0>(slab, out, |codes| codes),
            (_, 4, 1) => bytes::<V, 4, 1>(slab, out, |codes| codes),
            (_, 4, _) => bytes::<V, 4, 2>(slab, out, |codes| codes),
            (_, _, 0) => bytes::<V, 2, 0>(slab, out, |codes| codes),
            (..) => bytes::<V, 2, 1>(slab, out, |codes| codes),
        }
    }
}

/// Codes of a plane of `LOW` bits and, above them, one of `HIGH`, four at a time.
///
/// # Safety
/// As of [`decode_bytes`].
#[inline(always)]
unsafe fn bytes<V: Vector, const LOW: usize, const HIGH: usize>(
    slab: &Slab<'_>,
    out: &mut [u32],
    number: impl Fn(V::Words) -> V::Words,
) {
    let low = slab.layout.codes[0].offset;
    let high = slab.layout.codes.get(1).map_or(0, |plane| plane.offset);
    let mask = |bits: usize| ((1u32 << bits) - 1) * 0x0101_0101;
    let mut out = out.as_mut_ptr().cast::<u8>();
    // The quads of a word of the narrowest plane.
    const { assert!(LOW == 2 || LOW == 4 || LOW == 8) };
    let group = 8 / if HIGH > 0 { HIGH } else { LOW };
    for first in (0..slab.layout.slab_k / 4).step_by(group) {
        // SAFETY: the quads lie in the slab, and in `out`.
        unsafe {
            let word = |plane: usize, bits: usize, quad: usize| {
                let at = plane + quad / (8 / bits) * WORDS;
                if quad.is_multiple_of(8 / bits) {
                    slab.ahead.skip(at).fetch(WORDS);
                }
                V::load_words(slab.bytes.as_ptr().add(at))
            };
            let upper = if HIGH > 0 { word(high, HIGH, first) } else { V::splat_word(0) };
            for quad in first..first + group {
                let lower = V::shift_right(word(low, LOW, quad), (quad % (8 / LOW) * LOW) as u32);
                let mut codes = if LOW == 8 { lower } else { V::and(lower, mask(LOW)) };
                if HIGH > 0 {
                    let part = V::and(V::shift_right(upper, ((quad - first) * HIGH) as u32), mask(HIGH));
                    codes = V::or(codes, V::shift_left(part, LOW as u32));
                }
                V::store_words(out, number(codes));
                out = out.add(WORDS);
            }
        }
    }
}

/// Consecutive slabs of a tile.
#[derive(Clone, Copy, Debug)]
pub struct Slabs<'a> {
    /// Their layout, of class R.
    pub layout: &'a PackedLayout,
    /// Where its scales are.
    pub scales: &'a Scales,
    /// The slabs.
    pub bytes: &'a [u8],
    /// Where as many bytes begin that are brought from memory while these are unpacked.
    pub ahead: Ahead,
}

/// Memory for what slabs are unpacked to.
#[derive(Debug)]
pub struct Unpacked<'a> {
    /// `[quad][lane]`: four unsigned codes a word, in packed order.
    pub codes: &'a mut [u32],
    /// `[sub-block][lane]`.
    pub scales: &'a mut [f32],
    /// The same of the minima.
    pub mins: &'a mut [f32],
}

/// Unpacks slabs.
///
/// # Safety
/// As of [`decode_bytes`] and of [`scales::unpack`].
#[inline(always)]
pub unsafe fn unpack_bytes<V: Vector>(from: &Slabs<'_>, to: Unpacked<'_>) {
    let layout = from.layout;
    let (quads, subs) = (layout.slab_k / 4 * LANES, from.scales.count() * LANES);
    for (i, bytes) in from.bytes.chunks_exact(layout.slab_bytes).enumerate() {
        let ahead = from.ahead.skip(i * layout.slab_bytes);
        let slab = Slab { layout, bytes, ahead, scales: &[], mins: &[] };
        // SAFETY: the caller's promise.
        unsafe {
            decode_bytes::<V>(&slab, &mut to.codes[i * quads..]);
            slab.fetch_records();
            scales::unpack::<V>(from.scales, bytes, &mut to.scales[i * subs..], &mut to.mins[i * subs..]);
        }
    }
}

/// The operands of a product: tiles of rows, and rows of quantized tokens.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a> {
    /// How the tokens are quantized.
    pub how: &'a Quantization,
    /// Tiles: one, or all of a block.
    pub tiles: usize,
    /// `[tile][quad][lane]`, as [`decode_bytes`] makes it.
    pub w: &'a [u32],
    /// `[tile][sub-block][lane]`.
    pub scales: &'a [f32],
    /// The same of the minima.
    pub mins: &'a [f32],
    /// Columns of the tiles.
    pub columns: usize,
    /// The tokens, of the first one of this product on.
    pub x: &'a [u32],
    /// Where their parts are.
    pub row: Row,
    /// The tiles' first column.
    pub first: usize,
}

/// `sums[token][row] += Σ w[tile][column][lane] · x[token][column]` for `T` tokens and all tiles of the operands, `P` tiles at a time,
/// `WIDE` is [`Quantization::is_wide`].
///
/// # Safety
/// As of [`Vector`]'s functions; the operands hold their tiles, a multiple of `P`, and `T` tokens, and `sums` [`BLOCK_ROWS`] floats for each token.
#[inline(always)]
#[expect(
    clippy::needless_range_loop,
    reason = "a scale serves all tokens: iterating over those first took half as long again"
)]
pub unsafe fn multiply_bytes<V: Vector, D: Dot<V>, const P: usize, const T: usize, const WIDE: bool>(
    at: &Operands<'_>,
    sums: &mut [f32],
) {
    let Quantization { block, span, sub_block, offset } = *at.how;
    // Quads at a time. With many sums, compilers would load many of them ahead and keep them in memory.
    let unroll = if P * T <= 4 { 4 } else { 1 };
    let (quads, sub_blocks) = (at.columns / 4, at.columns / sub_block);
    for first_tile in (0..at.tiles).step_by(P) {
        // SAFETY: the caller's promise.
        unsafe {
            let w_at =
                |tile: usize, quad: usize| at.w.as_ptr().add(((first_tile + tile) * quads + quad) * LANES).cast();
            let scale_at = |tile: usize, sub: usize| ((first_tile + tile) * sub_blocks + sub) * LANES;
            let x_at = |token: usize, word: usize| at.x.as_ptr().add(token * at.row.floats + word);
            for first in (0..at.columns).step_by(block) {
                let mut totals = [[V::splat(0.0); P]; T];
                for start in (first..first + block).step_by(span) {
                    let (sub, column) = (start / sub_block, at.first + start);
                    let sum_of = |token: usize| x_at(token, at.row.sums + column / span).read();
                    let mut products = [[V::splat_word(0); P]; T];
                    if offset.is_some() {
                        for (token, products) in products.iter_mut().enumerate() {
                            *products = [V::splat_word(sum_of(token)); P];
                        }
                    }
                    for first_quad in (0..span / 4).step_by(unroll) {
                        for i in first_quad..first_quad + unroll {
                            let mut w = [V::splat_word(0); P];
                            for (tile, w) in w.iter_mut().enumerate() {
                                *w = V::load_words(w_at(tile, start / 4 + i));
                            }
                            for (token, products) in products.iter_mut().enumerate() {
                                let x = V::splat_word(x_at(token, column / 4 + i).read());
                                for (product, &w) in products.iter_mut().zip(&w) {
                                    *product = D::dot(*product, w, x);
                                }
                            }
                        }
                    }
                    for tile in 0..P {
                        let scale = V::load(at.scales.as_ptr().add(scale_at(tile, sub)));
                        for token in 0..T {
                            let product = V::to_floats(products[token][tile]);
                            totals[token][tile] = if WIDE {
                                V::multiply_add(product, scale, totals[token][tile])
                            } else {
                                let factor = f32::from_bits(x_at(token, at.row.factors + column / block).read());
                                V::multiply_add(V::multiply(product, scale), V::splat(factor), totals[token][tile])
                            };
                        }
                    }
                    if offset.is_none() {
                        for tile in 0..P {
                            let min = V::load(at.mins.as_ptr().add(scale_at(tile, sub)));
                            for token in 0..T {
                                let sum = V::splat(f32::from_bits(sum_of(token)));
                                totals[token][tile] = V::multiply_add(min, sum, totals[token][tile]);
                            }
                        }
                    }
                }
                for (token, totals) in totals.iter().enumerate() {
                    let factor = x_at(token, at.row.factors + (at.first + first) / block).read();
                    for (tile, &total) in totals.iter().enumerate() {
                        let to = sums.as_mut_ptr().add(token * BLOCK_ROWS + (first_tile + tile) * LANES);
                        let factor = V::splat(if WIDE { f32::from_bits(factor) } else { 1.0 });
                        V::store(to, V::multiply_add(total, factor, V::load(to)));
                    }
                }
            }
        }
    }
}
