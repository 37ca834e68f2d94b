//! Dot products of packed or unpacked tiles with a few quantized tokens.
//!
//! Products of codes are summed exactly, one span of columns at a time. The scaled
//! sums form one chain of f32 operations over the spans in ascending order. The bits
//! therefore depend neither on other work in the same call nor on the SIMD level,
//! except for fused multiply-adds.

use std::marker::PhantomData;
use std::ptr;

use qgemm_formats::prepack::PackedLayout;

use super::codes::{CodeShape, Planes, UNIT, each, unsigned_table};
use super::quantize::{Quantization, Row};
use super::vector::{Dot, LANES, Vector};
use super::{BLOCK_ROWS, Prefetch, Scales, Unpack};

/// Operands of a product: consecutive k-tiles of some tiles, and the same
/// columns of quantized tokens.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a> {
    /// Quantization of tokens.
    pub how: &'a Quantization,
    /// `Simd16` layout of the k-tiles.
    pub layout: &'a PackedLayout,
    /// Whether codes are unpacked.
    pub unpacked: bool,
    /// The tiles.
    pub tiles: &'a [Tile<'a>],
    /// Bytes to prefetch for every tile; for packed k-tiles, their size.
    pub prefetch_bytes: usize,
    /// Addresses of the scales, if kernels unpack them from packed k-tiles (reading memory
    /// in order). Otherwise unpacked scales are in the tiles.
    pub records: Option<&'a Scales>,
    /// The tokens' columns, with the layout of [`Row`].
    pub x: &'a [u32],
    /// Offsets of the parts of a row.
    pub row: Row,
}

/// Consecutive k-tiles of a tile.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tile<'a> {
    /// Packed k-tiles, or their unpacked codes.
    pub codes: &'a [u8],
    /// Start of the k-tiles to prefetch.
    pub prefetch: Prefetch,
    /// Scales of the k-tiles, `[sub-block][lane]`, unless kernels unpack them.
    pub scales: &'a [f32],
    /// Minimums of the k-tiles, `[sub-block][lane]`; empty when codes have an offset.
    pub mins: &'a [f32],
}

/// Columns whose scales kernels unpack at once: whole k-tiles.
/// Smaller values are slower.
pub const SCALED_COLUMNS: usize = 256;
/// Columns of the shortest sub-blocks.
pub const LEAST_SUB_BLOCK: usize = 16;
/// Scales (or minimums) of these columns.
const SCALES: usize = SCALED_COLUMNS / LEAST_SUB_BLOCK * LANES;

/// `sums[token][tile][row] += Σ w[tile][column][row] · x[token][column]` for `T`
/// tokens and up to `P` tiles at a time. Accumulators of tokens are [`BLOCK_ROWS`]
/// apart. `SHAPE` is the index of the codes' [`CodeShape`], and `unpack` the level's
/// [`super::scales::unpack`].
///
/// # Safety
/// As for [`Vector`]'s functions; the operands must hold their k-tiles, scales and `T`
/// tokens, and `sums` must be large enough.
#[inline(always)]
pub unsafe fn multiply_codes<V: Vector, D: Dot<V>, const SHAPE: usize, const P: usize, const T: usize>(
    at: &Operands<'_>,
    unpack: Unpack,
    sums: &mut [f32],
) {
    let (together, rest) = at.tiles.as_chunks();
    let mut own = at.records.map(|_| [[[0.0; SCALES]; 2]; P]);
    let mut own = own.as_mut().map(|own| &mut own[..]);
    // SAFETY: guaranteed by the caller.
    unsafe {
        for (i, tiles) in together.iter().enumerate() {
            let own = own.as_deref_mut();
            multiply_tiles::<V, D, SHAPE, P, T>(at, unpack, tiles, own, &mut sums[i * P * LANES..]);
        }
        if P > 1 {
            for (i, tile) in rest.iter().enumerate() {
                let first = (together.len() * P + i) * LANES;
                let (tile, own) = (std::array::from_ref(tile), own.as_deref_mut());
                multiply_tiles::<V, D, SHAPE, 1, T>(at, unpack, tile, own, &mut sums[first..]);
            }
        }
    }
}

/// Constants of a kernel. As constants of a type, unlike variables, they keep the compiler
/// from generating code that no kernel of the shape runs.
struct Kernel<V, D, const SHAPE: usize>(PhantomData<(V, D)>);

impl<V: Vector, D: Dot<V>, const SHAPE: usize> Kernel<V, D, SHAPE> {
    const CODES: CodeShape = CodeShape::ALL[SHAPE];
    const SPAN: usize = Self::CODES.span;
    const WIDE: bool = Self::CODES.wide;
    const MINIMA: bool = Self::CODES.minima;
    const UNPACKED: bool = Self::CODES.unpacked;
    const MAGNITUDES: bool = D::MAGNITUDES && Self::CODES.is_centered();
    /// Quads whose products are added together before they are added to the span's: a
    /// power of two, or 0 without runs.
    const RUN: usize = {
        let (longest, all) = (D::RUNS.longest((1 << Self::CODES.bits) - 1), Self::SPAN / 4);
        match if longest < all { longest } else { all } {
            0 => 0,
            longest => 1 << longest.ilog2(),
        }
    };
    const HAS_RUNS: bool = Self::RUN > 0;
    const QUADS: usize = if Self::HAS_RUNS { Self::RUN } else { 1 };
    /// Runs, which need the registers, end before code offsets are added.
    const OFFSETS_LAST: bool = !Self::MINIMA && Self::RUN > 1;
}

/// [`multiply_codes`] for `P` tiles.
///
/// Loops initialize its arrays: the hundreds of kernels would take
/// twice as long to compile with `array::from_fn` and `map`.
///
/// # Safety
/// As for [`multiply_codes`].
#[inline(always)]
unsafe fn multiply_tiles<V: Vector, D: Dot<V>, const SHAPE: usize, const P: usize, const T: usize>(
    at: &Operands<'_>,
    unpack: Unpack,
    tiles: &[Tile<'_>; P],
    mut own: Option<&mut [[[f32; SCALES]; 2]]>,
    sums: &mut [f32],
) {
    let layout = at.layout;
    let table = unsigned_table(layout.format().encoding);
    // Shifts, because a division takes as long as several vector instructions.
    let (block_shift, sub_shift) = (at.how.block.trailing_zeros(), at.how.sub_block.trailing_zeros());
    let mut column = 0usize;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let sums = sums.as_mut_ptr();
        // Words of a token group are interleaved.
        let x_at = |token: usize, word: usize| at.x.as_ptr().add(word * T + token);
        let sum_at = |token: usize, tile: usize| sums.add(token * BLOCK_ROWS + tile * LANES);
        // Sums of a block if a factor covers several spans, otherwise of all columns.
        let mut totals = [[V::splat(0.0); P]; T];
        if !Kernel::<V, D, SHAPE>::WIDE {
            for (token, totals) in totals.iter_mut().enumerate() {
                for (tile, total) in totals.iter_mut().enumerate() {
                    *total = V::load(sum_at(token, tile));
                }
            }
        }
        // Scales and minimums of the sub-blocks from column `scaled_from` on; in `own`
        // if they are unpacked here.
        let mut scales_at = [[ptr::null(); 2]; P];
        for (at, tile) in scales_at.iter_mut().zip(tiles) {
            *at = [tile.scales.as_ptr(), tile.mins.as_ptr()];
        }
        let mut scaled_from = 0;
        let min_floats = if Kernel::<V, D, SHAPE>::MINIMA { SCALES } else { 0 };
        let k_tile_bytes = if Kernel::<V, D, SHAPE>::UNPACKED { layout.k_tile * LANES } else { layout.k_tile_bytes };
        let scaled_bytes = (SCALED_COLUMNS >> layout.k_tile.trailing_zeros()) * k_tile_bytes;
        let mut first_byte = 0;
        while first_byte < tiles[0].codes.len() {
            let mut k_tiles = [&[][..]; P];
            for (k_tiles, tile) in k_tiles.iter_mut().zip(tiles) {
                *k_tiles = tile.codes.get_unchecked(first_byte..);
            }
            if !Kernel::<V, D, SHAPE>::UNPACKED
                && let (Some(records), Some(own)) = (at.records, own.as_deref_mut())
                && column.is_multiple_of(SCALED_COLUMNS)
            {
                for ((k_tiles, [scales, mins]), scales_at) in k_tiles.iter().zip(own).zip(&mut scales_at) {
                    let bytes = k_tiles.len().min(scaled_bytes);
                    unpack(
                        records,
                        layout,
                        k_tiles.get_unchecked(..bytes),
                        scales,
                        mins.get_unchecked_mut(..min_floats),
                    );
                    *scales_at = [scales.as_ptr(), mins.as_ptr()];
                }
                scaled_from = column;
            }
            let mut planes = [Planes::<V, SHAPE, true>::new(layout, k_tiles[0], tiles[0].prefetch.skip(first_byte)); P];
            for tile in 1..P {
                planes[tile] = Planes::new(layout, k_tiles[tile], tiles[tile].prefetch.skip(first_byte));
            }
            for _ in 0..layout.k_tile / UNIT {
                let factor = |token: usize| {
                    V::splat(f32::from_bits(x_at(token, at.row.factors + (column >> block_shift)).read()))
                };
                each!(PART in 0 1 => {
                    if const { PART < UNIT / Kernel::<V, D, SHAPE>::SPAN } {
                        let span = column / Kernel::<V, D, SHAPE>::SPAN + PART;
                        let sum_of = |token: usize| x_at(token, at.row.sums + span).read();
                        let mut products = [[V::splat_word(0); P]; T];
                        if !Kernel::<V, D, SHAPE>::MINIMA && !Kernel::<V, D, SHAPE>::OFFSETS_LAST {
                            for (token, products) in products.iter_mut().enumerate() {
                                *products = [V::splat_word(sum_of(token)); P];
                            }
                        }
                        let mut run = [[V::splat_word(0); P]; T];
                        let x = [x_at(0, column / 4), x_at(0, at.row.flips + column / 4)];
                        each!(Q in 0 1 2 3 4 5 6 7 => {
                            if const { Q * 4 / Kernel::<V, D, SHAPE>::SPAN == PART } {
                                add_quad::<V, D, SHAPE, Q, P, T>(&mut planes, &table, x, &mut run, &mut products);
                            }
                        });
                        if Kernel::<V, D, SHAPE>::OFFSETS_LAST {
                            for (token, products) in products.iter_mut().enumerate() {
                                let offset = V::splat_word(sum_of(token));
                                for product in products {
                                    *product = V::add(*product, offset);
                                }
                            }
                        }
                        let sub = ((column - scaled_from + PART * Kernel::<V, D, SHAPE>::SPAN) >> sub_shift) * LANES;
                        for (tile, [scales, _]) in scales_at.iter().enumerate() {
                            let scale = V::load(scales.add(sub));
                            for (token, totals) in totals.iter_mut().enumerate() {
                                let product = V::to_floats(products[token][tile]);
                                totals[tile] = if Kernel::<V, D, SHAPE>::WIDE {
                                    V::multiply_add(product, scale, totals[tile])
                                } else {
                                    V::multiply_add(V::multiply(product, scale), factor(token), totals[tile])
                                };
                            }
                        }
                        if Kernel::<V, D, SHAPE>::MINIMA {
                            for (tile, [_, mins]) in scales_at.iter().enumerate() {
                                let min = V::load(mins.add(sub));
                                for (token, totals) in totals.iter_mut().enumerate() {
                                    let sum = V::splat(f32::from_bits(sum_of(token)));
                                    totals[tile] = V::multiply_add(min, sum, totals[tile]);
                                }
                            }
                        }
                    }
                });
                let last_of_block = (column + UNIT) & (at.how.block - 1) == 0;
                if Kernel::<V, D, SHAPE>::WIDE && last_of_block {
                    for (token, totals) in totals.iter_mut().enumerate() {
                        for (tile, total) in totals.iter_mut().enumerate() {
                            let sum = sum_at(token, tile);
                            V::store(sum, V::multiply_add(*total, factor(token), V::load(sum)));
                            *total = V::splat(0.0);
                        }
                    }
                }
                column += UNIT;
            }
            // Scale records follow the codes. Requesting memory out of order is slower.
            if !Kernel::<V, D, SHAPE>::UNPACKED {
                for tile in tiles {
                    tile.prefetch.skip(first_byte).fetch_records(layout);
                }
            }
            first_byte += k_tile_bytes;
        }
        if !Kernel::<V, D, SHAPE>::WIDE {
            for (token, totals) in totals.into_iter().enumerate() {
                for (tile, total) in totals.into_iter().enumerate() {
                    V::store(sum_at(token, tile), total);
                }
            }
        }
    }
}

/// Adds the products of quad `Q` of a unit to `run[token][tile]`, or to
/// `products[token][tile]`, to which finished runs are added. The tokens' codes start
/// at `x`, followed by their flips.
///
/// # Safety
/// As for [`multiply_codes`].
#[inline(always)]
unsafe fn add_quad<V: Vector, D: Dot<V>, const SHAPE: usize, const Q: usize, const P: usize, const T: usize>(
    planes: &mut [Planes<V, SHAPE, true>; P],
    table: &[u8; 16],
    x: [*const u32; 2],
    run: &mut [[V::Words; P]; T],
    products: &mut [[V::Words; P]; T],
) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        // A loop instead of `each_mut` and `map`, with which compilers
        // keep all planes in memory.
        let mut codes = [V::splat_word(0); P];
        for (planes, codes) in planes.iter_mut().zip(&mut codes) {
            *codes = planes.quad::<Q>(table);
        }
        for token in 0..T {
            let (x, flips) = (x[0].add(Q * T + token), x[1].add(Q * T + token));
            let x = V::splat_word(x.read());
            for (tile, &codes) in codes.iter().enumerate() {
                let (run, product) = (&mut run[token][tile], &mut products[token][tile]);
                if !Kernel::<V, D, SHAPE>::HAS_RUNS {
                    if Kernel::<V, D, SHAPE>::MAGNITUDES {
                        *product = D::dot_magnitudes(*product, codes, x, V::splat_word(flips.read()));
                        if T > 1 {
                            *product = D::now(*product);
                        }
                    } else {
                        *product = D::dot(*product, codes, x);
                    }
                    continue;
                }
                if const { Q.is_multiple_of(Kernel::<V, D, SHAPE>::QUADS) } {
                    *run = D::begin_run(codes, x);
                } else {
                    *run = D::extend_run(*run, codes, x);
                }
                if const { (Q + 1).is_multiple_of(Kernel::<V, D, SHAPE>::QUADS) } {
                    *product = D::end_run(*product, *run);
                } else if T > 1 {
                    *run = D::now(*run);
                }
            }
        }
    }
}
