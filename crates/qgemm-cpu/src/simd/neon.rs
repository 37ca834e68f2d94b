//! Advanced SIMD of 64-bit Arm: a vector is four registers.

use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;

use qgemm_hal::SimdLevel;

use super::vector::{Dot, QUAD_LANES, RunWidth, Vector};
use super::{Simd, level};

#[derive(Clone, Copy)]
struct Neon;

level!(
    KERNELS, SimdLevel::Neon, Neon, Widened, "neon",
    [1 => 4, 2 => 2, 3 => 1, 4 => 1, 5 => 1, 6 => 1], packed [1, 2], unpacked [1 => 1, 2 => 1], attention 1
);

/// The level with 8-bit dot products.
pub mod dotprod {
    use super::*;

    level!(
        KERNELS, SimdLevel::NeonDotprod, Neon, Sdot, "neon,dotprod",
        [1 => 4, 2 => 2, 3 => 1, 4 => 1, 5 => 1, 6 => 1], packed [1, 2, 3], unpacked [1 => 1, 2 => 1, 3 => 1], attention 1
    );
}

impl Vector for Neon {
    type Floats = [float32x4_t; 4];
    type Words = [uint32x4_t; 4];

    #[inline(always)]
    unsafe fn load(from: *const f32) -> [float32x4_t; 4] {
        // SAFETY: guaranteed by the caller, as in all functions here.
        from_fn(|i| unsafe { vld1q_f32(from.add(4 * i)) })
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, floats: [float32x4_t; 4]) {
        for (i, floats) in floats.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { vst1q_f32(to.add(4 * i), floats) }
        }
    }
    #[inline(always)]
    unsafe fn splat(number: f32) -> [float32x4_t; 4] {
        // SAFETY: as above.
        [unsafe { vdupq_n_f32(number) }; 4]
    }
    #[inline(always)]
    unsafe fn multiply(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: as above.
        from_fn(|i| unsafe { vmulq_f32(a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn divide(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: as above.
        from_fn(|i| unsafe { vdivq_f32(a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn where_less(
        a: [float32x4_t; 4],
        b: [float32x4_t; 4],
        then: [float32x4_t; 4],
        otherwise: [float32x4_t; 4],
    ) -> [float32x4_t; 4] {
        // SAFETY: as above.
        from_fn(|i| unsafe { vbslq_f32(vcltq_f32(a[i], b[i]), then[i], otherwise[i]) })
    }
    #[inline(always)]
    unsafe fn halves(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [[float32x4_t; 4]; 2] {
        [[a[0], a[1], b[0], b[1]], [a[2], a[3], b[2], b[3]]]
    }
    #[inline(always)]
    unsafe fn multiply_add(a: [float32x4_t; 4], b: [float32x4_t; 4], c: [float32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: as above.
        from_fn(|i| unsafe { vfmaq_f32(c[i], a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u8) -> [uint32x4_t; 4] {
        // SAFETY: as above; loads of bytes need no alignment.
        from_fn(|i| unsafe { vreinterpretq_u32_u8(vld1q_u8(from.add(16 * i))) })
    }
    #[inline(always)]
    unsafe fn store_words(to: *mut u8, words: [uint32x4_t; 4]) {
        for (i, words) in words.into_iter().enumerate() {
            // SAFETY: as above; stores of bytes need no alignment.
            unsafe { vst1q_u8(to.add(16 * i), vreinterpretq_u8_u32(words)) }
        }
    }
    #[inline(always)]
    unsafe fn load_halves(from: *const u8) -> [uint32x4_t; 4] {
        // SAFETY: as above.
        from_fn(|i| unsafe { vmovl_u16(vreinterpret_u16_u8(vld1_u8(from.add(8 * i)))) })
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> [uint32x4_t; 4] {
        // SAFETY: as above.
        unsafe {
            let bytes = vld1q_u8(from);
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
            [vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)]
        }
    }
    #[inline(always)]
    unsafe fn splat_word(word: u32) -> [uint32x4_t; 4] {
        // SAFETY: as above.
        [unsafe { vdupq_n_u32(word) }; 4]
    }
    #[inline(always)]
    unsafe fn shift_right(words: [uint32x4_t; 4], by: u32) -> [uint32x4_t; 4] {
        // SAFETY: as above.
        words.map(|words| unsafe { vshlq_u32(words, vdupq_n_s32(-(by as i32))) })
    }
    #[inline(always)]
    unsafe fn shift_left(words: [uint32x4_t; 4], by: u32) -> [uint32x4_t; 4] {
        // SAFETY: as above.
        words.map(|words| unsafe { vshlq_u32(words, vdupq_n_s32(by as i32)) })
    }
    #[inline(always)]
    unsafe fn and(words: [uint32x4_t; 4], mask: u32) -> [uint32x4_t; 4] {
        // SAFETY: as above.
        words.map(|words| unsafe { vandq_u32(words, vdupq_n_u32(mask)) })
    }
    #[inline(always)]
    unsafe fn or(a: [uint32x4_t; 4], b: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
        // SAFETY: as above.
        from_fn(|i| unsafe { vorrq_u32(a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn xor(a: [uint32x4_t; 4], b: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
        // SAFETY: as above.
        from_fn(|i| unsafe { veorq_u32(a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn add(a: [uint32x4_t; 4], b: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
        // SAFETY: as above.
        from_fn(|i| unsafe { vaddq_u32(a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn interleave(a: [uint32x4_t; 4], b: [uint32x4_t; 4]) -> [[uint32x4_t; 4]; 2] {
        // SAFETY: as above.
        let pair = |i: usize| unsafe { [vzip1q_u32(a[i], b[i]), vzip2q_u32(a[i], b[i])] };
        let ([p, q], [r, s], [t, u], [v, w]) = (pair(0), pair(1), pair(2), pair(3));
        [[p, q, r, s], [t, u, v, w]]
    }
    #[inline(always)]
    unsafe fn largest(a: [uint32x4_t; 4], b: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
        // SAFETY: as above.
        from_fn(|i| unsafe { vmaxq_u32(a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn largest_lane([a, b, c, d]: [uint32x4_t; 4]) -> u32 {
        // SAFETY: as above.
        unsafe { vmaxvq_u32(vmaxq_u32(vmaxq_u32(a, b), vmaxq_u32(c, d))) }
    }
    #[inline(always)]
    unsafe fn sum_of_lanes([a, b, c, d]: [uint32x4_t; 4]) -> u32 {
        // SAFETY: as above.
        unsafe { vaddvq_u32(vaddq_u32(vaddq_u32(a, b), vaddq_u32(c, d))) }
    }
    #[inline(always)]
    unsafe fn store_quads(to: &mut [u32; 4], words: [uint32x4_t; 4]) {
        // SAFETY: as above; four words are sixteen bytes.
        unsafe {
            let [a, b, c, d] = words.map(|words| vmovn_u32(words));
            let bytes = vcombine_u8(vmovn_u16(vcombine_u16(a, b)), vmovn_u16(vcombine_u16(c, d)));
            vst1q_u8(to.as_mut_ptr().cast(), vqtbl1q_u8(bytes, vld1q_u8(QUAD_LANES.as_ptr())));
        }
    }
    #[inline(always)]
    unsafe fn to_floats(words: [uint32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: as above.
        words.map(|words| unsafe { vcvtq_f32_s32(vreinterpretq_s32_u32(words)) })
    }
    #[inline(always)]
    unsafe fn float_bits(floats: [float32x4_t; 4]) -> [uint32x4_t; 4] {
        // SAFETY: as above.
        floats.map(|floats| unsafe { vreinterpretq_u32_f32(floats) })
    }
    #[inline(always)]
    unsafe fn bits_to_floats(words: [uint32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: as above.
        words.map(|words| unsafe { vreinterpretq_f32_u32(words) })
    }
    #[inline(always)]
    unsafe fn half_bits_to_floats(words: [uint32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: as above.
        words.map(|words| unsafe { half_to_f32(vmovn_u32(words)) })
    }
    #[inline(always)]
    unsafe fn lookup(table: &[f32; 16], words: [uint32x4_t; 4]) -> [float32x4_t; 4] {
        // SAFETY: as above.
        unsafe {
            let bytes = table.as_ptr().cast::<u8>();
            let table = uint8x16x4_t(
                vld1q_u8(bytes),
                vld1q_u8(bytes.add(16)),
                vld1q_u8(bytes.add(32)),
                vld1q_u8(bytes.add(48)),
            );
            words.map(|words| {
                // Bytes 4w to 4w + 3 of the table,
                // for every word w.
                let places = vmlaq_n_u32(vdupq_n_u32(0x0302_0100), words, 0x0404_0404);
                vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(places)))
            })
        }
    }
    #[inline(always)]
    unsafe fn lookup_bytes(table: &[u8; 16], words: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
        // SAFETY: as above.
        unsafe {
            let table = vld1q_u8(table.as_ptr());
            words.map(|words| vreinterpretq_u32_u8(vqtbl1q_u8(table, vreinterpretq_u8_u32(words))))
        }
    }
}

/// Byte products as 16-bit numbers, which are added in pairs.
struct Widened;

impl Dot<Neon> for Widened {
    #[inline(always)]
    unsafe fn dot(sums: [uint32x4_t; 4], unsigned: [uint32x4_t; 4], signed: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
        // SAFETY: as above.
        from_fn(|i| unsafe {
            let (unsigned, signed) = (vreinterpretq_u8_u32(unsigned[i]), vreinterpretq_s8_u32(signed[i]));
            let low = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(unsigned))), vmovl_s8(vget_low_s8(signed)));
            let high = vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8(unsigned)), vmovl_high_s8(signed));
            let sum = vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
            vaddq_u32(sums[i], vreinterpretq_u32_s32(sum))
        })
    }
}

/// With signed dot-product instructions.
struct Sdot;

impl Dot<Neon> for Sdot {
    #[inline(always)]
    unsafe fn dot(sums: [uint32x4_t; 4], unsigned: [uint32x4_t; 4], signed: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
        // SAFETY: as above.
        from_fn(|i| unsafe {
            // u = (u − 128) + 64 + 64, each of
            // them a signed byte.
            let sum = sdot(sums[i], veorq_u32(unsigned[i], vdupq_n_u32(0x8080_8080)), signed[i]);
            let half = vdupq_n_u32(0x4040_4040);
            sdot(sdot(sum, half, signed[i]), half, signed[i])
        })
    }
    /// Runs have 32-bit sums, and bytes may be above 127.
    const RUNS: RunWidth = RunWidth::SignedBytes;
    #[inline(always)]
    unsafe fn begin_run(unsigned: [uint32x4_t; 4], signed: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
        // SAFETY: as above.
        from_fn(|i| unsafe { sdot(vdupq_n_u32(0), unsigned[i], signed[i]) })
    }
    #[inline(always)]
    unsafe fn extend_run(run: [uint32x4_t; 4], unsigned: [uint32x4_t; 4], signed: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
        // SAFETY: as above.
        from_fn(|i| unsafe { sdot(run[i], unsigned[i], signed[i]) })
    }
}

/// f16 bits to f32. The compiler's intrinsic requires a newer
/// compiler than the oldest supported one.
///
/// # Safety
/// The CPU must support Advanced SIMD.
#[inline(always)]
unsafe fn half_to_f32(halves: uint16x4_t) -> float32x4_t {
    let floats;
    // SAFETY: the instruction only accesses the named registers; every
    // CPU with Advanced SIMD has it.
    unsafe {
        asm!(
            "fcvtl {floats:v}.4s, {halves:v}.4h",
            floats = lateout(vreg) floats,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    floats
}

/// `sums + a · b` of signed bytes. The compiler's
/// intrinsic is not stable yet.
///
/// # Safety
/// The CPU must support the extension `dotprod`.
#[inline(always)]
unsafe fn sdot(mut sums: uint32x4_t, a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
    // SAFETY: the instruction only accesses the named
    // registers; the CPU has it.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {sums:v}.4s, {a:v}.16b, {b:v}.16b",
            sums = inout(vreg) sums,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}
