//! Tiles of a KV cache in f32: keys with a row for each feature, so
//! that lanes are keys; values with a row for each key.

use qgemm_formats::DType;
use qgemm_hal::KvFormat;
use qgemm_hal::op::attention::{KV_BLOCK, KV_SCALE_BYTES};

use super::prefetch::Prefetch;
use super::vector::{LANES, Vector, WORDS};

/// Keys of a tile: whole vectors. Rows of features are
/// as far apart.
pub const TILE_KEYS: usize = 64;

/// A row of a cache: one head of one key.
#[derive(Clone, Copy, Debug, Default)]
pub struct KvRow<'a> {
    /// Its numbers, and readable bytes after them ([`readable`]).
    pub numbers: &'a [u8],
    /// Its f16 scales, for formats with them.
    pub scales: &'a [u8],
    /// The numbers to prefetch: a line for each line read.
    pub prefetch: Prefetch,
}

/// Bytes that are read for a row of `columns`: kernels
/// transpose whole vectors of words.
pub fn readable(format: KvFormat, columns: usize) -> usize {
    format.bytes_of(columns).next_multiple_of(WORDS)
}

/// Numbers of a cache in words, which hold consecutive
/// features, the first lowest.
trait Numbers {
    /// Numbers of a word.
    const PER_WORD: usize;
    /// The factor of a block's scale by which
    /// numbers are multiplied.
    const UNIT: Option<f32> = None;

    /// Bytes of numbers.
    fn bytes_of(numbers: usize) -> usize {
        numbers * size_of::<u32>() / Self::PER_WORD
    }

    /// Vectors of [`Numbers::of_row`], 1 or 2.
    const VECTORS: usize = 1;

    /// Number `i` of every word.
    unsafe fn of_words<V: Vector>(words: V::Words, i: usize) -> V::Floats;
    /// Consecutive numbers from `column` on.
    unsafe fn of_row<V: Vector>(row: *const u8, column: usize) -> [V::Floats; 2];
}

struct F32;
impl Numbers for F32 {
    const PER_WORD: usize = 1;

    #[inline(always)]
    unsafe fn of_words<V: Vector>(words: V::Words, _: usize) -> V::Floats {
        // SAFETY: guaranteed by the caller, as in all functions here.
        unsafe { V::bits_to_floats(words) }
    }
    #[inline(always)]
    unsafe fn of_row<V: Vector>(row: *const u8, column: usize) -> [V::Floats; 2] {
        // SAFETY: as above.
        [unsafe { V::bits_to_floats(V::load_words(row.add(4 * column))) }; 2]
    }
}

struct F16;
impl Numbers for F16 {
    const PER_WORD: usize = 2;

    #[inline(always)]
    unsafe fn of_words<V: Vector>(words: V::Words, i: usize) -> V::Floats {
        // SAFETY: as above.
        unsafe { V::half_bits_to_floats(if i == 0 { V::and(words, 0xffff) } else { V::shift_right(words, 16) }) }
    }
    #[inline(always)]
    unsafe fn of_row<V: Vector>(row: *const u8, column: usize) -> [V::Floats; 2] {
        // SAFETY: as above.
        [unsafe { V::half_bits_to_floats(V::load_halves(row.add(2 * column))) }; 2]
    }
}

struct Bf16;
impl Numbers for Bf16 {
    const PER_WORD: usize = 2;

    #[inline(always)]
    unsafe fn of_words<V: Vector>(words: V::Words, i: usize) -> V::Floats {
        // SAFETY: as above.
        unsafe { V::bits_to_floats(if i == 0 { V::shift_left(words, 16) } else { V::and(words, 0xffff_0000) }) }
    }
    #[inline(always)]
    unsafe fn of_row<V: Vector>(row: *const u8, column: usize) -> [V::Floats; 2] {
        // SAFETY: as above.
        [unsafe { V::bits_to_floats(V::shift_left(V::load_halves(row.add(2 * column)), 16)) }; 2]
    }
}

struct E4m3;
impl E4m3 {
    /// Codes in the lowest byte of each lane.
    #[inline(always)]
    unsafe fn value<V: Vector>(codes: V::Words) -> V::Floats {
        // 2^120 moves E4M3's exponents to those of f32,
        // subnormal numbers included.
        const REBIAS: f32 = f32::from_bits((120 + 127) << 23);
        const LARGEST: f32 = 448.0;
        // SAFETY: as above.
        unsafe {
            let magnitude = V::bits_to_floats(V::shift_left(V::and(codes, 0x7f), 20));
            let magnitude = V::multiply(magnitude, V::splat(REBIAS));
            let magnitude = V::where_less(V::splat(LARGEST), magnitude, V::splat(f32::NAN), magnitude);
            let sign = V::shift_left(V::and(codes, 0x80), 24);
            V::bits_to_floats(V::or(V::float_bits(magnitude), sign))
        }
    }
}
impl Numbers for E4m3 {
    const PER_WORD: usize = 4;

    #[inline(always)]
    unsafe fn of_words<V: Vector>(words: V::Words, i: usize) -> V::Floats {
        // SAFETY: as above.
        unsafe { Self::value::<V>(V::shift_right(words, 8 * i as u32)) }
    }
    #[inline(always)]
    unsafe fn of_row<V: Vector>(row: *const u8, column: usize) -> [V::Floats; 2] {
        // SAFETY: as above.
        [unsafe { Self::value::<V>(V::load_bytes(row.add(column))) }; 2]
    }
}

/// Codes at the top of a word need no sign extension: they
/// are the code times a power of two.
struct Q8;
impl Numbers for Q8 {
    const PER_WORD: usize = 4;
    const UNIT: Option<f32> = Some(f32::from_bits((127 - 24) << 23));

    #[inline(always)]
    unsafe fn of_words<V: Vector>(words: V::Words, i: usize) -> V::Floats {
        // SAFETY: as above.
        unsafe { V::to_floats(V::and(V::shift_left(words, 24 - 8 * i as u32), 0xff00_0000)) }
    }
    #[inline(always)]
    unsafe fn of_row<V: Vector>(row: *const u8, column: usize) -> [V::Floats; 2] {
        // SAFETY: as above.
        [unsafe { V::to_floats(V::shift_left(V::load_bytes(row.add(column)), 24)) }; 2]
    }
}

/// As [`Q8`]. Flipping the highest bit subtracts the offset of 8.
struct Q4;
impl Numbers for Q4 {
    const PER_WORD: usize = 8;
    const VECTORS: usize = 2;
    const UNIT: Option<f32> = Some(f32::from_bits((127 - 28) << 23));

    #[inline(always)]
    unsafe fn of_words<V: Vector>(words: V::Words, i: usize) -> V::Floats {
        // SAFETY: as above.
        unsafe {
            let flipped = V::xor(words, V::splat_word(0x8888_8888));
            V::to_floats(V::and(V::shift_left(flipped, 28 - 4 * i as u32), 0xf000_0000))
        }
    }
    #[inline(always)]
    unsafe fn of_row<V: Vector>(row: *const u8, column: usize) -> [V::Floats; 2] {
        // SAFETY: as above; a block's sixteen bytes are in the row.
        unsafe {
            let bytes = V::xor(V::load_bytes(row.add(column / 2)), V::splat_word(0x88));
            let [a, b] = V::interleave(V::shift_left(bytes, 28), V::and(V::shift_left(bytes, 24), 0xf000_0000));
            [V::to_floats(a), V::to_floats(b)]
        }
    }
}

/// Calls `$kernel` for the numbers of a format.
macro_rules! of_format {
    ($format:expr, $kernel:ident::<$vector:ident>($($arguments:expr),*)) => {
        match $format {
            KvFormat::Plain(DType::F32) => $kernel::<$vector, F32>($($arguments),*),
            KvFormat::Plain(DType::F16) => $kernel::<$vector, F16>($($arguments),*),
            KvFormat::Plain(DType::BF16) => $kernel::<$vector, Bf16>($($arguments),*),
            KvFormat::Q8_0 => $kernel::<$vector, Q8>($($arguments),*),
            KvFormat::Q4_0 => $kernel::<$vector, Q4>($($arguments),*),
            _ => $kernel::<$vector, E4m3>($($arguments),*),
        }
    };
}

/// `out[feature][key]`: keys of whole vectors, features
/// [`TILE_KEYS`] apart.
///
/// # Safety
/// The CPU must support the level's instructions. Rows must have their
/// [`readable`] bytes and their scales, and `out` room for the features.
#[inline(always)]
pub unsafe fn load_keys<V: Vector>(format: KvFormat, rows: &[KvRow<'_>], features: usize, out: &mut [f32]) {
    // SAFETY: guaranteed by the caller.
    unsafe { of_format!(format, transpose::<V>(rows, features, out)) }
}

/// `out[key][feature]`: keys with whole vectors of features.
///
/// # Safety
/// As for [`load_keys`].
#[inline(always)]
pub unsafe fn load_values<V: Vector>(format: KvFormat, rows: &[KvRow<'_>], features: usize, out: &mut [f32]) {
    // SAFETY: guaranteed by the caller.
    unsafe { of_format!(format, copy::<V>(rows, features, out)) }
}

/// # Safety
/// As for [`load_keys`].
#[inline(always)]
unsafe fn transpose<V: Vector, N: Numbers>(rows: &[KvRow<'_>], features: usize, out: &mut [f32]) {
    let words = features.div_ceil(N::PER_WORD);
    for (i, rows) in rows.as_chunks::<LANES>().0.iter().enumerate() {
        // SAFETY: guaranteed by the caller: whole vectors of words are readable,
        // and `out` has a row for each feature.
        unsafe {
            let mut scale = V::splat(1.0);
            for first in (0..words).step_by(LANES) {
                let transposed = transposed::<V>(rows, 4 * first);
                for (word, numbers) in (first..words).zip(transposed) {
                    let feature = word * N::PER_WORD;
                    if let Some(unit) = N::UNIT
                        && feature.is_multiple_of(KV_BLOCK)
                    {
                        scale = V::multiply(scales_of::<V>(rows, feature / KV_BLOCK), V::splat(unit));
                    }
                    for j in 0..N::PER_WORD {
                        let numbers = N::of_words::<V>(numbers, j);
                        let numbers = if N::UNIT.is_some() { V::multiply(numbers, scale) } else { numbers };
                        V::store(out.as_mut_ptr().add((feature + j) * TILE_KEYS + i * LANES), numbers);
                    }
                }
            }
        }
    }
}

/// Sixteen words of sixteen rows from `byte` on: lane `i` of
/// vector `j` is word `j` of row `i`.
///
/// # Safety
/// As for [`load_keys`].
#[inline(always)]
unsafe fn transposed<V: Vector>(rows: &[KvRow<'_>; LANES], byte: usize) -> [V::Words; LANES] {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let mut words = [V::splat_word(0); LANES];
        for (words, row) in words.iter_mut().zip(rows) {
            *words = V::load_words(row.numbers.as_ptr().add(byte));
            row.prefetch.skip(byte).fetch(WORDS);
        }
        // Each step moves a bit of the row to the lane.
        for _ in 0..LANES.ilog2() {
            let before = words;
            for i in 0..LANES / 2 {
                [words[2 * i], words[2 * i + 1]] = V::interleave(before[i], before[i + LANES / 2]);
            }
        }
        words
    }
}

/// Scales of a block of sixteen rows.
///
/// # Safety
/// As for [`load_keys`].
#[inline(always)]
unsafe fn scales_of<V: Vector>(rows: &[KvRow<'_>; LANES], block: usize) -> V::Floats {
    let mut scales = [[0; KV_SCALE_BYTES]; LANES];
    // SAFETY: guaranteed by the caller: rows have the scales of their blocks.
    unsafe {
        for (scale, row) in scales.iter_mut().zip(rows) {
            *scale = row.scales.as_ptr().add(block * KV_SCALE_BYTES).cast::<[u8; KV_SCALE_BYTES]>().read();
        }
        V::half_bits_to_floats(V::load_halves(scales.as_ptr().cast()))
    }
}

/// # Safety
/// As for [`load_values`].
#[inline(always)]
unsafe fn copy<V: Vector, N: Numbers>(rows: &[KvRow<'_>], features: usize, out: &mut [f32]) {
    let width = features.next_multiple_of(LANES);
    for (i, row) in rows.iter().enumerate() {
        row.prefetch.fetch(N::bytes_of(features));
        // SAFETY: guaranteed by the caller: whole vectors are readable.
        unsafe {
            let mut scale = V::splat(1.0);
            for column in (0..width).step_by(N::VECTORS * LANES) {
                if let Some(unit) = N::UNIT
                    && column.is_multiple_of(KV_BLOCK)
                {
                    let bits = row.scales.as_ptr().add(column / KV_BLOCK * KV_SCALE_BYTES).cast::<[u8; 2]>().read();
                    let bits = V::splat_word(u32::from(u16::from_le_bytes(bits)));
                    scale = V::multiply(V::half_bits_to_floats(bits), V::splat(unit));
                }
                let vectors = N::of_row::<V>(row.numbers.as_ptr(), column);
                for (j, numbers) in vectors.into_iter().take(N::VECTORS).enumerate() {
                    let numbers = if N::UNIT.is_some() { V::multiply(numbers, scale) } else { numbers };
                    V::store(out.as_mut_ptr().add(i * width + column + j * LANES), numbers);
                }
            }
        }
    }
}
