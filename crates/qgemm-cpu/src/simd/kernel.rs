//! Kernels for all SIMD levels: dequantization of packed k-tiles to f32,
//! and products with tokens.
//!
//! An accumulator is one chain of multiply-adds over ascending columns, independent
//! of other work. Its bits depend only on the level.

use qgemm_formats::{DType, Encoding};

use super::vector::{LANES, VALUE_BYTE, Vector, WORDS};
use super::{BLOCK_ROWS, KTile, TILES};

/// Unscaled values of codes with up to eight bits.
trait Number {
    /// # Safety
    /// As for the functions of [`Vector`].
    unsafe fn of<V: Vector>(&self, codes: V::Words) -> V::Floats;
}

struct Integer;
impl Number for Integer {
    #[inline(always)]
    unsafe fn of<V: Vector>(&self, codes: V::Words) -> V::Floats {
        // SAFETY: the caller's promise.
        unsafe { V::to_floats(codes) }
    }
}

struct Table([f32; 16]);
impl Number for Table {
    #[inline(always)]
    unsafe fn of<V: Vector>(&self, codes: V::Words) -> V::Floats {
        // SAFETY: the caller's promise; codes of a table have at most four bits.
        unsafe { V::lookup(&self.0, codes) }
    }
}

struct E4M3;
impl Number for E4M3 {
    #[inline(always)]
    unsafe fn of<V: Vector>(&self, codes: V::Words) -> V::Floats {
        // SAFETY: the caller's promise.
        unsafe { e4m3::<V>(codes) }
    }
}

/// Decodes E4M3, with NaN.
///
/// # Safety
/// As for the functions of [`Vector`].
#[inline(always)]
pub unsafe fn e4m3<V: Vector>(codes: V::Words) -> V::Floats {
    // SAFETY: the caller's promise.
    unsafe {
        let sign = V::shift_left(V::and(codes, 0x80), 24);
        let magnitude = V::shift_left(V::and(codes, 0x7f), 20);
        // The bits are an f32 with an exponent that is 120 too small.
        let number = V::multiply(V::bits_to_floats(V::or(sign, magnitude)), V::splat(2f32.powi(120)));
        // The NaN code decodes to 480, which overflows to infinity here; 448 stays finite.
        // Infinity times 0 is NaN.
        V::multiply_add(V::multiply(number, V::splat(1.125 * 2f32.powi(119))), V::splat(0.0), number)
    }
}

/// E5M2: the upper byte of an f16.
struct E5M2;
impl Number for E5M2 {
    #[inline(always)]
    unsafe fn of<V: Vector>(&self, codes: V::Words) -> V::Floats {
        // SAFETY: the caller's promise.
        unsafe { V::half_bits_to_floats(V::shift_left(codes, 8)) }
    }
}

/// Dequantizes `columns` columns of `k_tile` from `first` on, both multiples of
/// 32, to `out[column][lane]`.
///
/// # Safety
/// As for the functions of [`Vector`]. `out` holds as many floats, and the k-tile
/// has its planes and scales.
#[inline(always)]
pub unsafe fn decode<V: Vector>(k_tile: &KTile<'_>, first: usize, columns: usize, out: &mut [f32]) {
    let bits = |plane: usize| k_tile.layout.codes.get(plane).map_or(0, |p| p.bits);
    if first == 0 {
        k_tile.prefetch.fetch_records(k_tile.layout);
    }
    // SAFETY: the caller's promise.
    unsafe {
        match (k_tile.layout.format().encoding, bits(0), bits(1)) {
            (Encoding::Plain(dtype), ..) => decode_plain::<V>(k_tile, dtype, first, columns, out),
            (Encoding::Codebook(table), 4, _) => {
                decode_codes::<V, 4, 0>(&Table(table.map(f32::from)), k_tile, first, columns, out);
            }
            (Encoding::Codebook(table), 1, _) => {
                decode_codes::<V, 1, 0>(&Table(table.map(f32::from)), k_tile, first, columns, out);
            }
            (Encoding::Codebook(table), ..) => {
                decode_codes::<V, 2, 1>(&Table(table.map(f32::from)), k_tile, first, columns, out);
            }
            (Encoding::E4M3, ..) => decode_codes::<V, 8, 0>(&E4M3, k_tile, first, columns, out),
            (Encoding::E5M2, ..) => decode_codes::<V, 8, 0>(&E5M2, k_tile, first, columns, out),
            (_, 8, _) => decode_codes::<V, 8, 0>(&Integer, k_tile, first, columns, out),
            (_, 4, 0) => decode_codes::<V, 4, 0>(&Integer, k_tile, first, columns, out),
            (_, 4, 1) => decode_codes::<V, 4, 1>(&Integer, k_tile, first, columns, out),
            (_, 4, _) => decode_codes::<V, 4, 2>(&Integer, k_tile, first, columns, out),
            (_, _, 0) => decode_codes::<V, 2, 0>(&Integer, k_tile, first, columns, out),
            (..) => decode_codes::<V, 2, 1>(&Integer, k_tile, first, columns, out),
        }
    }
}

/// Codes of a plane of `LOW` bits and a plane of `HIGH` bits above them.
#[inline(always)]
unsafe fn decode_codes<V: Vector, const LOW: usize, const HIGH: usize>(
    number: &impl Number,
    k_tile: &KTile<'_>,
    first: usize,
    columns: usize,
    out: &mut [f32],
) {
    let sub_block = k_tile.layout.format().sub_block;
    let low = k_tile.layout.codes[0].offset;
    let high = k_tile.layout.codes.get(1).map_or(0, |plane| plane.offset);
    let mut out = out.as_mut_ptr();
    // Shifts, because a division costs as much as decoding four vectors.
    let sub_shift = sub_block.trailing_zeros();
    let span = sub_block.min(columns);
    let mut start = first;
    while start < first + columns {
        let sub = (start >> sub_shift) * LANES;
        // SAFETY: the scales include the sub-block, its quads lie in the k-tile,
        // and their columns in `out`.
        unsafe {
            let scale = V::load(k_tile.scales.as_ptr().add(sub));
            let min = V::load(k_tile.mins.as_ptr().add(sub));
            for quad in start / 4..(start + span) / 4 {
                let word = |plane: usize, bits: usize| {
                    let at = plane + quad / (8 / bits) * WORDS;
                    if quad.is_multiple_of(8 / bits) {
                        k_tile.prefetch.skip(at).fetch(WORDS);
                    }
                    V::shift_right(V::load_words(k_tile.bytes.as_ptr().add(at)), (quad % (8 / bits) * bits) as u32)
                };
                let low = word(low, LOW);
                let high = if HIGH > 0 { word(high, HIGH) } else { low };
                for byte in VALUE_BYTE {
                    let mut code = V::and(V::shift_right(low, 8 * byte), (1 << LOW) - 1);
                    if HIGH > 0 {
                        let upper = V::and(V::shift_right(high, 8 * byte), (1 << HIGH) - 1);
                        code = V::or(code, V::shift_left(upper, LOW as u32));
                    }
                    V::store(out, V::multiply_add(number.of::<V>(code), scale, min));
                    out = out.add(LANES);
                }
            }
        }
        start += span;
    }
}

#[inline(always)]
unsafe fn decode_plain<V: Vector>(k_tile: &KTile<'_>, dtype: DType, first: usize, columns: usize, out: &mut [f32]) {
    let per_word = 4 / dtype.bytes();
    for (i, column) in (first..first + columns).enumerate() {
        if column.is_multiple_of(per_word) {
            k_tile.prefetch.skip(column / per_word * WORDS).fetch(WORDS);
        }
        // SAFETY: the column lies in the k-tile, and in `out`.
        unsafe {
            let words = |at: usize| V::load_words(k_tile.bytes.as_ptr().add(at * WORDS));
            let half = |column: usize| V::shift_right(words(column / 2), 16 * (column % 2) as u32);
            let value = match dtype {
                DType::F32 => V::bits_to_floats(words(column)),
                DType::F16 => V::half_bits_to_floats(V::and(half(column), 0xffff)),
                DType::BF16 => V::bits_to_floats(V::shift_left(half(column), 16)),
            };
            V::store(out.as_mut_ptr().add(i * LANES), value);
        }
    }
}

/// `sums[token][row] += Σ w[tile][column][lane] · x[token][column]` for `T` tokens and
/// all tiles of a block, `P` tiles at a time.
///
/// # Safety
/// As for the functions of [`Vector`]. `w` holds [`TILES`] tiles of
/// `columns` columns, `x` rows of `stride` floats with as many, and `sums`
/// [`BLOCK_ROWS`] floats for each token.
#[inline(always)]
pub unsafe fn multiply<V: Vector, const P: usize, const T: usize>(
    w: &[f32],
    x: &[f32],
    stride: usize,
    columns: usize,
    sums: &mut [f32],
) {
    for first in (0..TILES).step_by(P) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut acc = [[V::splat(0.0); P]; T];
            for (token, acc) in acc.iter_mut().enumerate() {
                for (tile, acc) in acc.iter_mut().enumerate() {
                    *acc = V::load(sums.as_ptr().add(token * BLOCK_ROWS + (first + tile) * LANES));
                }
            }
            let w = w.as_ptr().add(first * columns * LANES);
            for column in 0..columns {
                let mut w_column = [V::splat(0.0); P];
                for (tile, w_column) in w_column.iter_mut().enumerate() {
                    *w_column = V::load(w.add((tile * columns + column) * LANES));
                }
                for (token, acc) in acc.iter_mut().enumerate() {
                    let x = V::splat(*x.as_ptr().add(token * stride + column));
                    for (acc, &w) in acc.iter_mut().zip(&w_column) {
                        *acc = V::multiply_add(w, x, *acc);
                    }
                }
            }
            for (token, acc) in acc.iter().enumerate() {
                for (tile, &acc) in acc.iter().enumerate() {
                    V::store(sums.as_mut_ptr().add(token * BLOCK_ROWS + (first + tile) * LANES), acc);
                }
            }
        }
    }
}
