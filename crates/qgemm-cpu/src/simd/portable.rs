//! Plain loops over sixteen lanes, which compilers turn into whatever vectors the target always has: all of Advanced SIMD on
//! 64-bit Arm.

use half::f16;
use qgemm_hal::SimdLevel;

use super::vector::{LANES, Vector};
use super::{Simd, level};

#[derive(Clone, Copy)]
struct Portable;

level!(KERNELS, SimdLevel::Scalar, Portable, [1 => 2, 2 => 1, 3 => 1, 4 => 1]);

impl Vector for Portable {
    type Floats = [f32; LANES];
    type Words = [u32; LANES];

    #[inline(always)]
    unsafe fn load(from: *const f32) -> [f32; LANES] {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, floats: [f32; LANES]) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(floats) }
    }
    #[inline(always)]
    unsafe fn splat(number: f32) -> [f32; LANES] {
        [number; LANES]
    }
    #[inline(always)]
    unsafe fn multiply_add(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
        // Without an instruction for it, `mul_add` is a call.
        let fused = cfg!(any(target_arch = "aarch64", target_feature = "fma"));
        std::array::from_fn(|i| if fused { a[i].mul_add(b[i], c[i]) } else { a[i] * b[i] + c[i] })
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u8) -> [u32; LANES] {
        // SAFETY: the caller's promise.
        let words = unsafe { from.cast::<[u32; LANES]>().read_unaligned() };
        words.map(u32::from_le)
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
    unsafe fn to_floats(words: [u32; LANES]) -> [f32; LANES] {
        words.map(|word| word as i32 as f32)
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
}
