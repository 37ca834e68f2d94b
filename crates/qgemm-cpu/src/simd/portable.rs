//! Portable loops over sixteen lanes, which compilers
//! vectorize for the target's baseline.

use half::f16;
use qgemm_hal::SimdLevel;

use super::vector::{Dot, LANES, QUAD_LANES, Vector};
use super::{Simd, level};

#[derive(Clone, Copy)]
struct Portable;

level!(
    KERNELS, SimdLevel::Scalar, Portable, Bytes,
    [1 => 2, 2 => 1, 3 => 1, 4 => 1], packed [1, 2], unpacked [1 => 1, 2 => 1], attention 1
);

impl Vector for Portable {
    type Floats = [f32; LANES];
    type Words = [u32; LANES];

    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; LANES] {
        // SAFETY: guaranteed by the caller.
        unsafe { from.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, floats: [f32; LANES]) {
        // SAFETY: guaranteed by the caller.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(floats) }
    }
    #[inline(always)]
    unsafe fn splat(number: f32) -> [f32; LANES] {
        [number; LANES]
    }
    #[inline(always)]
    unsafe fn multiply(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn divide(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn where_less(
        a: [f32; LANES],
        b: [f32; LANES],
        then: [f32; LANES],
        otherwise: [f32; LANES],
    ) -> [f32; LANES] {
        std::array::from_fn(|i| if a[i] < b[i] { then[i] } else { otherwise[i] })
    }
    #[inline(always)]
    unsafe fn halves(a: [f32; LANES], b: [f32; LANES]) -> [[f32; LANES]; 2] {
        const HALF: usize = LANES / 2;
        let of = |first: usize| std::array::from_fn(|i| if i < HALF { a[first + i] } else { b[first + i - HALF] });
        [of(0), of(HALF)]
    }
    #[inline(always)]
    unsafe fn multiply_add(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
        // Without an FMA instruction, `mul_add` is a function call.
        let fused = cfg!(any(target_arch = "aarch64", target_feature = "fma"));
        std::array::from_fn(|i| if fused { a[i].mul_add(b[i], c[i]) } else { a[i] * b[i] + c[i] })
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u8) -> [u32; LANES] {
        // SAFETY: guaranteed by the caller.
        let words = unsafe { from.cast::<[u32; LANES]>().read_unaligned() };
        words.map(u32::from_le)
    }
    #[inline(always)]
    unsafe fn store_words(to: *mut u8, words: [u32; LANES]) {
        // SAFETY: guaranteed by the caller.
        unsafe { to.cast::<[u32; LANES]>().write_unaligned(words.map(u32::to_le)) }
    }
    #[inline(always)]
    unsafe fn load_halves(from: *const u8) -> [u32; LANES] {
        // SAFETY: guaranteed by the caller.
        let halves = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        halves.map(|half| u32::from(u16::from_le(half)))
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> [u32; LANES] {
        // SAFETY: guaranteed by the caller.
        unsafe { from.cast::<[u8; LANES]>().read_unaligned() }.map(u32::from)
    }
    #[inline(always)]
    unsafe fn splat_word(word: u32) -> [u32; LANES] {
        [word; LANES]
    }
    #[inline(always)]
    unsafe fn shift_right(words: [u32; LANES], by: u32) -> [u32; LANES] {
        words.map(|word| word >> by)
    }
    #[inline(always)]
    unsafe fn shift_left(words: [u32; LANES], by: u32) -> [u32; LANES] {
        words.map(|word| word << by)
    }
    #[inline(always)]
    unsafe fn and(words: [u32; LANES], mask: u32) -> [u32; LANES] {
        words.map(|word| word & mask)
    }
    #[inline(always)]
    unsafe fn or(a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        std::array::from_fn(|i| a[i] | b[i])
    }
    #[inline(always)]
    unsafe fn xor(a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        std::array::from_fn(|i| a[i] ^ b[i])
    }
    #[inline(always)]
    unsafe fn add(a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        std::array::from_fn(|i| a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    unsafe fn interleave(a: [u32; LANES], b: [u32; LANES]) -> [[u32; LANES]; 2] {
        let of = |first: usize| std::array::from_fn(|i| if i % 2 == 0 { a[first + i / 2] } else { b[first + i / 2] });
        [of(0), of(LANES / 2)]
    }
    #[inline(always)]
    unsafe fn largest(a: [u32; LANES], b: [u32; LANES]) -> [u32; LANES] {
        std::array::from_fn(|i| a[i].max(b[i]))
    }
    #[inline(always)]
    unsafe fn largest_lane(words: [u32; LANES]) -> u32 {
        words.into_iter().fold(0, u32::max)
    }
    #[inline(always)]
    unsafe fn sum_of_lanes(words: [u32; LANES]) -> u32 {
        words.into_iter().fold(0, u32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn store_quads(to: &mut [u32; 4], words: [u32; LANES]) {
        let bytes = QUAD_LANES.map(|lane| words[usize::from(lane)] as u8);
        *to = std::array::from_fn(|quad| u32::from_le_bytes(std::array::from_fn(|byte| bytes[4 * quad + byte])));
    }
    #[inline(always)]
    unsafe fn to_floats(words: [u32; LANES]) -> [f32; LANES] {
        words.map(|word| word as i32 as f32)
    }
    #[inline(always)]
    unsafe fn float_bits(floats: [f32; LANES]) -> [u32; LANES] {
        floats.map(f32::to_bits)
    }
    #[inline(always)]
    unsafe fn bits_to_floats(words: [u32; LANES]) -> [f32; LANES] {
        words.map(f32::from_bits)
    }
    #[inline(always)]
    unsafe fn half_bits_to_floats(words: [u32; LANES]) -> [f32; LANES] {
        words.map(|word| f16::from_bits(word as u16).to_f32())
    }
    #[inline(always)]
    unsafe fn lookup(table: &[f32; 16], words: [u32; LANES]) -> [f32; LANES] {
        words.map(|word| table[word as usize % table.len()])
    }
    #[inline(always)]
    unsafe fn lookup_bytes(table: &[u8; 16], words: [u32; LANES]) -> [u32; LANES] {
        words.map(|word| u32::from_le_bytes(word.to_le_bytes().map(|byte| table[usize::from(byte) % table.len()])))
    }
}

/// Byte products, one by one.
struct Bytes;

impl Dot<Portable> for Bytes {
    #[inline(always)]
    unsafe fn dot(sums: [u32; LANES], unsigned: [u32; LANES], signed: [u32; LANES]) -> [u32; LANES] {
        let product = |i: usize, byte: u32| {
            (unsigned[i] >> (8 * byte) & 0xff).wrapping_mul((signed[i] >> (8 * byte)) as i8 as u32)
        };
        std::array::from_fn(|i| (0..4).fold(sums[i], |sum, byte| sum.wrapping_add(product(i, byte))))
    }
}
