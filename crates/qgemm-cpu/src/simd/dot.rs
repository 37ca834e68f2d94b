//! Dot products of a packed tile with a few quantized tokens.
//!
//! Products of codes are added up exactly, a span of columns at a time; what scales make of such sums is one chain of f32
//! operations over the spans in ascending order. So bits depend neither on what is computed beside them nor on the level, but
//! for fused multiply-adds.

use qgemm_formats::prepack::PackedLayout;

use super::codes::{CodeShape, Planes, UNIT, unsigned_table};
use super::quantize::{Quantization, Row};
use super::vector::{Dot, LANES, Vector};
use super::{Ahead, BLOCK_ROWS};

/// The operands of a product: consecutive slabs of a tile, and rows of quantized tokens.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a> {
    /// How the tokens are quantized.
    pub how: &'a Quantization,
    /// The layout of the slabs, of class R.
    pub layout: &'a PackedLayout,
    /// The slabs.
    pub slabs: &'a [u8],
    /// Where as many bytes begin that are brought from memory meanwhile.
    pub ahead: Ahead,
    /// Scales of the slabs, `[sub-block][lane]`.
    pub scales: &'a [f32],
    /// The same of the minima; none where codes have an offset.
    pub mins: &'a [f32],
    /// The tokens, of the first one of this product on.
    pub x: &'a [u32],
    /// Where their parts are.
    pub row: Row,
    /// The slabs' first column.
    pub first: usize,
}

/// `sums[token][row] += Σ w[column][row] · x[token][column]` for `T` tokens, whose sums are [`BLOCK_ROWS`] apart; `SHAPE` is the
/// number of the format's [`CodeShape`].
///
/// # Safety
/// As of [`Vector`]'s functions; the operands hold their slabs, scales and `T` tokens, and `sums` has room.
#[inline(always)]
pub unsafe fn multiply_codes<V: Vector, D: Dot<V>, const SHAPE: usize, const T: usize>(
    at: &Operands<'_>,
    sums: &mut [f32],
) {
    let shape = const { CodeShape::ALL[SHAPE] };
    let layout = at.layout;
    let table = unsigned_table(layout.format().encoding);
    // Shifts, for divisions take as long as several vectors.
    let (block_shift, sub_shift) = (at.how.block.trailing_zeros(), at.how.sub_block.trailing_zeros());
    let mut column = at.first;
    // SAFETY: the caller's promise.
    unsafe {
        let x_at = |token: usize, word: usize| at.x.as_ptr().add(token * at.row.words + word);
        let mut totals: [V::Floats; T] = std::array::from_fn(|token| V::load(sums.as_ptr().add(token * BLOCK_ROWS)));
        // Where a factor is for several spans, their sums.
        let mut of_block = [V::splat(0.0); T];
        for (i, slab) in at.slabs.chunks_exact(layout.slab_bytes).enumerate() {
            let ahead = at.ahead.skip(i * layout.slab_bytes);
            let mut planes = Planes::<V>::new(layout, slab, ahead);
            for _ in 0..layout.slab_k / UNIT {
                let factor = |token: usize| {
                    V::splat(f32::from_bits(x_at(token, at.row.factors + (column >> block_shift)).read()))
                };
                for part in 0..UNIT / shape.span {
                    let span = column / shape.span + part;
                    let sum_of = |token: usize| x_at(token, at.row.sums + span).read();
                    let mut products: [V::Words; T] =
                        std::array::from_fn(|token| V::splat_word(if shape.minima { 0 } else { sum_of(token) }));
                    for i in 0..shape.span / 4 {
                        let quad = part * (shape.span / 4) + i;
                        let codes = planes.quad(shape, &table, quad);
                        for (token, product) in products.iter_mut().enumerate() {
                            let x = V::splat_word(x_at(token, column / 4 + quad).read());
                            *product = if shape.is_below_128() {
                                D::dot_below_128(*product, codes, x)
                            } else {
                                D::dot(*product, codes, x)
                            };
                        }
                    }
                    let sub = ((column - at.first + part * shape.span) >> sub_shift) * LANES;
                    let scale = V::load(at.scales.as_ptr().add(sub));
                    let acc = if shape.wide { &mut of_block } else { &mut totals };
                    for (token, acc) in acc.iter_mut().enumerate() {
                        let product = V::to_floats(products[token]);
                        *acc = if shape.wide {
                            V::multiply_add(product, scale, *acc)
                        } else {
                            V::multiply_add(V::multiply(product, scale), factor(token), *acc)
                        };
                    }
                    if shape.minima {
                        let min = V::load(at.mins.as_ptr().add(sub));
                        for (token, acc) in acc.iter_mut().enumerate() {
                            *acc = V::multiply_add(min, V::splat(f32::from_bits(sum_of(token))), *acc);
                        }
                    }
                }
                let last_of_block = (column + UNIT) & (at.how.block - 1) == 0;
                if shape.wide && last_of_block {
                    for (token, total) in totals.iter_mut().enumerate() {
                        *total = V::multiply_add(of_block[token], factor(token), *total);
                    }
                    of_block = [V::splat(0.0); T];
                }
                column += UNIT;
            }
            // Records lie behind codes. Memory that is asked for in another order than it lies comes more slowly.
            ahead.fetch_records(layout);
        }
        for (token, total) in totals.into_iter().enumerate() {
            V::store(sums.as_mut_ptr().add(token * BLOCK_ROWS), total);
        }
    }
}
