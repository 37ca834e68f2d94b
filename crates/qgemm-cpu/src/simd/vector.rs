//! [`Vector`]: sixteen lanes of f32 or 32-bit words, in one or several registers.

/// Lanes of a vector. Each lane is a row of W.
pub const LANES: usize = 16;

/// Byte of a word that holds value `i` of four neighbours (`qgemm-formats`, `prepack.rs`).
pub const VALUE_BYTE: [u32; 4] = [0, 2, 1, 3];
/// Bytes of a word of sixteen rows.
pub const WORDS: usize = LANES * 4;

/// Lane of each byte of four quads.
pub const QUAD_LANES: [u8; LANES] = {
    let mut lanes = [0; LANES];
    let mut lane = 0;
    while lane < LANES {
        lanes[lane / 4 * 4 + VALUE_BYTE[lane % 4] as usize] = lane as u8;
        lane += 1;
    }
    lanes
};

/// Instructions on sixteen lanes. The functions are inlined into callers
/// that are compiled for the level's instructions.
///
/// # Safety
/// For every function: the CPU must support the level's instructions, and
/// pointers must be valid for sixteen lanes.
pub trait Vector: Copy {
    /// Sixteen f32.
    type Floats: Copy;
    /// Sixteen 32-bit words.
    type Words: Copy;

    /// Loads floats without alignment.
    unsafe fn load(from: *const f32) -> Self::Floats;
    /// Stores floats without alignment.
    unsafe fn store(to: *mut f32, floats: Self::Floats);
    /// Broadcast of a number.
    unsafe fn splat(number: f32) -> Self::Floats;
    /// `a · b`.
    unsafe fn multiply(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a / b`.
    unsafe fn divide(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `then` where `a < b`, otherwise `otherwise`, also for NaN.
    unsafe fn where_less(a: Self::Floats, b: Self::Floats, then: Self::Floats, otherwise: Self::Floats)
    -> Self::Floats;
    /// The lower halves of both, and the upper halves of both.
    unsafe fn halves(a: Self::Floats, b: Self::Floats) -> [Self::Floats; 2];
    /// `a · b + c`, rounded once if the level has
    /// an FMA instruction.
    unsafe fn multiply_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// Loads words without alignment.
    unsafe fn load_words(from: *const u8) -> Self::Words;
    /// Stores words without alignment.
    unsafe fn store_words(to: *mut u8, words: Self::Words);
    /// Loads sixteen 16-bit words without alignment.
    unsafe fn load_halves(from: *const u8) -> Self::Words;
    /// Loads sixteen bytes without alignment.
    unsafe fn load_bytes(from: *const u8) -> Self::Words;
    /// Broadcast of a word.
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
    /// Lanes of both in turns: those of the lower
    /// halves, and those of the upper halves.
    unsafe fn interleave(a: Self::Words, b: Self::Words) -> [Self::Words; 2];
    /// Lanewise maximum of words below 2³¹.
    unsafe fn largest(a: Self::Words, b: Self::Words) -> Self::Words;
    /// Largest lane, of words below 2³¹.
    unsafe fn largest_lane(words: Self::Words) -> u32;
    /// Sum of all lanes, wrapping.
    unsafe fn sum_of_lanes(words: Self::Words) -> u32;
    /// Stores the lowest byte of each lane, in quads of four
    /// lanes: a lane's byte is at its
    /// [`VALUE_BYTE`].
    unsafe fn store_quads(to: &mut [u32; 4], words: Self::Words);
    /// Converts words as signed integers to f32.
    unsafe fn to_floats(words: Self::Words) -> Self::Floats;
    /// Bits of floats.
    unsafe fn float_bits(floats: Self::Floats) -> Self::Words;
    /// Words as f32 bits.
    unsafe fn bits_to_floats(words: Self::Words) -> Self::Floats;
    /// Words below 2¹⁶ as f16 bits, converted to f32.
    unsafe fn half_bits_to_floats(words: Self::Words) -> Self::Floats;
    /// `table[word]` for words below 16.
    unsafe fn lookup(table: &[f32; 16], words: Self::Words) -> Self::Floats;
    /// `table[byte]` for every byte, each below 16.
    unsafe fn lookup_bytes(table: &[u8; 16], words: Self::Words) -> Self::Words;
}

/// Width of a [`Dot`]'s runs, whose products are summed exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunWidth {
    /// No runs: [`Dot::dot`] is as fast.
    None,
    /// Pairwise sums of products in 16 bits.
    #[cfg(all(feature = "simd", target_arch = "x86_64"))]
    Bits16,
    /// Sums in 32 bits of products of signed bytes.
    #[cfg(all(feature = "simd", target_arch = "aarch64"))]
    SignedBytes,
}

impl RunWidth {
    /// Maximum quads of unsigned codes up to `largest` in a run.
    #[cfg_attr(
        not(all(feature = "simd", any(target_arch = "x86_64", target_arch = "aarch64"))),
        expect(unused_variables, reason = "only vectors have runs")
    )]
    pub const fn longest(self, largest: usize) -> usize {
        match self {
            Self::None => 0,
            #[cfg(all(feature = "simd", target_arch = "x86_64"))]
            Self::Bits16 => i16::MAX as usize / (2 * 127 * largest),
            #[cfg(all(feature = "simd", target_arch = "aarch64"))]
            Self::SignedBytes => {
                if largest < 128 {
                    usize::MAX
                } else {
                    0
                }
            }
        }
    }
}

/// Exact dot products of the four bytes of every lane: adds
/// `Σ unsigned · signed` to the lane.
///
/// # Safety
/// As for [`Vector`].
pub trait Dot<V: Vector> {
    /// `sums + unsigned · signed` in every lane.
    unsafe fn dot(sums: V::Words, unsigned: V::Words, signed: V::Words) -> V::Words;

    /// Runs of [`Dot::begin_run`] and [`Dot::extend_run`].
    const RUNS: RunWidth = RunWidth::None;
    /// Products of one quad, in lanes of some width.
    #[inline(always)]
    unsafe fn begin_run(unsigned: V::Words, signed: V::Words) -> V::Words {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::dot(V::splat_word(0), unsigned, signed) }
    }
    /// Adds the products of one more quad.
    #[inline(always)]
    unsafe fn extend_run(run: V::Words, unsigned: V::Words, signed: V::Words) -> V::Words {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::dot(run, unsigned, signed) }
    }
    /// `sums + run` in every lane.
    #[inline(always)]
    unsafe fn end_run(sums: V::Words, run: V::Words) -> V::Words {
        // SAFETY: guaranteed by the caller.
        unsafe { V::add(sums, run) }
    }

    /// Unchanged sums, computed before any later code. Otherwise compilers
    /// with few registers finish one token before the next, with the
    /// codes of all quads on the stack.
    #[inline(always)]
    unsafe fn now(sums: V::Words) -> V::Words {
        sums
    }

    /// Whether [`Dot::dot_magnitudes`] takes fewer instructions than
    /// [`Dot::dot`] for codes with an offset of 128.
    const MAGNITUDES: bool = false;
    /// `sums + Σ magnitude · (unsigned ^ flip)` in every lane;
    /// the second factor is signed.
    ///
    /// With `flip` 0x80 that factor is the code minus 128. With
    /// 0x7f, for negative bytes, it is the complement, which is one
    /// less than the required factor. Magnitudes are at most 127.
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
