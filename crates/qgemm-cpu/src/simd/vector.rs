//! [`Vector`]: sixteen lanes of f32 or of 32-bit words, as one register or several.

use super::kernel::VALUE_BYTE;

/// Lanes of a vector, each of which is a row of W.
pub const LANES: usize = 16;

/// The lane whose code each byte of four quads holds.
pub const QUAD_LANES: [u8; LANES] = {
    let mut lanes = [0; LANES];
    let mut lane = 0;
    while lane < LANES {
        lanes[lane / 4 * 4 + VALUE_BYTE[lane % 4] as usize] = lane as u8;
        lane += 1;
    }
    lanes
};

/// Instructions on sixteen lanes. The functions are inlined into callers that are compiled for the level's instructions.
///
/// # Safety
/// Of every function: the processor has the level's instructions, and pointers may be read or written for sixteen lanes.
pub trait Vector: Copy {
    /// Sixteen f32.
    type Floats: Copy;
    /// Sixteen 32-bit words.
    type Words: Copy;

    /// Loads floats from anywhere.
    unsafe fn load(from: *const f32) -> Self::Floats;
    /// Stores floats anywhere.
    unsafe fn store(to: *mut f32, floats: Self::Floats);
    /// The same number in every lane.
    unsafe fn splat(number: f32) -> Self::Floats;
    /// `a · b`.
    unsafe fn multiply(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a / b`.
    unsafe fn divide(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `then` where `a < b`, `otherwise` elsewhere, also where one of them is NaN.
    unsafe fn where_less(a: Self::Floats, b: Self::Floats, then: Self::Floats, otherwise: Self::Floats)
    -> Self::Floats;
    /// The lower halves of both one after the other, and the upper ones.
    unsafe fn halves(a: Self::Floats, b: Self::Floats) -> [Self::Floats; 2];
    /// `a · b + c`, rounded once where the level has an instruction for it.
    unsafe fn multiply_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// Loads words from anywhere.
    unsafe fn load_words(from: *const u8) -> Self::Words;
    /// Stores words anywhere.
    unsafe fn store_words(to: *mut u8, words: Self::Words);
    /// Loads sixteen 16-bit words from anywhere.
    unsafe fn load_halves(from: *const u8) -> Self::Words;
    /// Loads sixteen bytes from anywhere.
    unsafe fn load_bytes(from: *const u8) -> Self::Words;
    /// The same word in every lane.
    unsafe fn splat_word(word: u32) -> Self::Words;
    /// `words >> by`.
    unsafe fn shift_right(words: Self::Words, by: u32) -> Self::Words;
    /// `words << by`.
    unsafe fn shift_left(words: Self::Words, by: u32) -> Self::Words;
    /// `words & mask`.
    unsafe fn and(words: Self::Words, mask: u32) -> Self::Words;
    /// `a | b`.
    unsafe fn or(a: Self::Words, b: Self::Words) -> Self::Words;
    /// `a ^ b`.
    unsafe fn xor(a: Self::Words, b: Self::Words) -> Self::Words;
    /// `a + b`, wrapping.
    unsafe fn add(a: Self::Words, b: Self::Words) -> Self::Words;
    /// The larger of each, of words below 2³¹.
    unsafe fn largest(a: Self::Words, b: Self::Words) -> Self::Words;
    /// The largest lane, of words below 2³¹.
    unsafe fn largest_lane(words: Self::Words) -> u32;
    /// The sum of all lanes, wrapping.
    unsafe fn sum_of_lanes(words: Self::Words) -> u32;
    /// Stores the lowest bytes of four lanes each as a quad of codes, the byte of a lane where [`VALUE_BYTE`](super::kernel::VALUE_BYTE)
    /// says.
    unsafe fn store_quads(to: &mut [u32; 4], words: Self::Words);
    /// Words as signed numbers.
    unsafe fn to_floats(words: Self::Words) -> Self::Floats;
    /// The bits of floats.
    unsafe fn float_bits(floats: Self::Floats) -> Self::Words;
    /// Words as the bits of f32.
    unsafe fn bits_to_floats(words: Self::Words) -> Self::Floats;
    /// Words below 2¹⁶ as the bits of f16.
    unsafe fn half_bits_to_floats(words: Self::Words) -> Self::Floats;
    /// `table[word]` of words below 16.
    unsafe fn lookup(table: &[f32; 16], words: Self::Words) -> Self::Floats;
    /// `table[byte]` of every byte, each below 16.
    unsafe fn lookup_bytes(table: &[u8; 16], words: Self::Words) -> Self::Words;
}

/// How many sums of two products, of unsigned codes up to `largest` and signed bytes, fit 16 bits together.
#[cfg(target_arch = "x86_64")]
pub fn pairs_in_16_bits(largest: usize) -> usize {
    i16::MAX as usize / (2 * 127 * largest)
}

/// Dot products of the four bytes of every lane, exact: `Σ unsigned · signed` is added to the lane.
///
/// # Safety
/// As of [`Vector`].
pub trait Dot<V: Vector> {
    /// `sums + unsigned · signed`, of every lane.
    unsafe fn dot(sums: V::Words, unsigned: V::Words, signed: V::Words) -> V::Words;

    /// Most quads of unsigned codes up to `largest` whose products [`Dot::begin_run`] and [`Dot::extend_run`] add up exactly; with 0,
    /// there is nothing to gain by that over [`Dot::dot`].
    #[inline(always)]
    fn longest_run(_largest: usize) -> usize {
        0
    }
    /// The products of one quad, as lanes of some width.
    #[inline(always)]
    unsafe fn begin_run(unsigned: V::Words, signed: V::Words) -> V::Words {
        // SAFETY: the caller's promise.
        unsafe { Self::dot(V::splat_word(0), unsigned, signed) }
    }
    /// Those of one more.
    #[inline(always)]
    unsafe fn extend_run(run: V::Words, unsigned: V::Words, signed: V::Words) -> V::Words {
        // SAFETY: the caller's promise.
        unsafe { Self::dot(run, unsigned, signed) }
    }
    /// `sums + run`, of every lane.
    #[inline(always)]
    unsafe fn end_run(sums: V::Words, run: V::Words) -> V::Words {
        // SAFETY: the caller's promise.
        unsafe { V::add(sums, run) }
    }

    /// The same sums, computed before what is computed from later ones: else compilers finish one token before the next, with the codes of
    /// all quads on the stack, where registers are few.
    #[inline(always)]
    unsafe fn now(sums: V::Words) -> V::Words {
        sums
    }

    /// Whether [`Dot::dot_magnitudes`] takes fewer instructions than [`Dot::dot`] for codes with an offset of 128.
    const MAGNITUDES: bool = false;
    /// `sums + Σ magnitude · (unsigned ^ flip)` of every lane, the second factor signed. Where `flip` is 0x80, the factor is the code less 128;
    /// where it is 0x7f, which is for negative bytes, its complement: one less than what a magnitude should be multiplied with.
    /// Magnitudes are 127 at most.
    #[inline(always)]
    unsafe fn dot_magnitudes(
        _sums: V::Words,
        _unsigned: V::Words,
        _magnitudes: V::Words,
        _flips: V::Words,
    ) -> V::Words {
        unreachable!("asked for where `MAGNITUDES` says so")
    }
}
