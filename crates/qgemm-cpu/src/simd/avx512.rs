//! AVX-512: a vector is one register.

use std::arch::x86_64::*;

use qgemm_hal::SimdLevel;

use super::vector::{Dot, QUAD_LANES, RunWidth, Vector};
use super::{Simd, level};

#[derive(Clone, Copy)]
struct Avx512;

level!(
    KERNELS, SimdLevel::Avx512, Avx512, Widened, "avx512f,avx512bw,avx512dq,avx512vl",
    [1 => 4, 2 => 4, 3 => 4, 4 => 4, 5 => 4, 6 => 4], packed [1, 2, 4], unpacked [1 => 2, 2 => 2, 4 => 2], attention 4
);

/// The level with 8-bit dot products.
pub mod vnni {
    use super::*;

    level!(
        KERNELS, SimdLevel::Avx512Vnni, Avx512, Vnni, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni",
        [1 => 4, 2 => 4, 3 => 4, 4 => 4, 5 => 4, 6 => 4], packed [1, 2, 4, 8], unpacked [1 => 2, 2 => 2, 4 => 2, 6 => 2], attention 4
    );
}

impl Vector for Avx512 {
    type Floats = __m512;
    type Words = __m512i;

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: guaranteed by the caller, as in all functions here.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, floats: __m512) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(to, floats) }
    }
    #[inline(always)]
    unsafe fn splat(number: f32) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_set1_ps(number) }
    }
    #[inline(always)]
    unsafe fn multiply(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn divide(a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn where_less(a: __m512, b: __m512, then: __m512, otherwise: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), otherwise, then) }
    }
    #[inline(always)]
    unsafe fn halves(a: __m512, b: __m512) -> [__m512; 2] {
        // SAFETY: as above.
        unsafe { [_mm512_shuffle_f32x4::<0b01_00_01_00>(a, b), _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b)] }
    }
    #[inline(always)]
    unsafe fn multiply_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u8) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn store_words(to: *mut u8, words: __m512i) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_si512(to.cast(), words) }
    }
    #[inline(always)]
    unsafe fn load_halves(from: *const u8) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn splat_word(word: u32) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_set1_epi32(word as i32) }
    }
    #[inline(always)]
    unsafe fn shift_right(words: __m512i, by: u32) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_srl_epi32(words, _mm_cvtsi32_si128(by as i32)) }
    }
    #[inline(always)]
    unsafe fn shift_left(words: __m512i, by: u32) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_sll_epi32(words, _mm_cvtsi32_si128(by as i32)) }
    }
    #[inline(always)]
    unsafe fn and(words: __m512i, mask: u32) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_and_si512(words, _mm512_set1_epi32(mask as i32)) }
    }
    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn xor(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_xor_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn interleave(a: __m512i, b: __m512i) -> [__m512i; 2] {
        // SAFETY: as above.
        unsafe {
            let lower = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let upper = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
            [_mm512_permutex2var_epi32(a, lower, b), _mm512_permutex2var_epi32(a, upper, b)]
        }
    }
    #[inline(always)]
    unsafe fn largest(a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_max_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn largest_lane(words: __m512i) -> u32 {
        // SAFETY: as above.
        unsafe { _mm512_reduce_max_epi32(words) as u32 }
    }
    #[inline(always)]
    unsafe fn sum_of_lanes(words: __m512i) -> u32 {
        // SAFETY: as above.
        unsafe { _mm512_reduce_add_epi32(words) as u32 }
    }
    #[inline(always)]
    unsafe fn store_quads(to: &mut [u32; 4], words: __m512i) {
        // SAFETY: as above; four words are sixteen bytes.
        unsafe {
            let order = _mm_loadu_si128(QUAD_LANES.as_ptr().cast());
            _mm_storeu_si128(to.as_mut_ptr().cast(), _mm_shuffle_epi8(_mm512_cvtepi32_epi8(words), order));
        }
    }
    #[inline(always)]
    unsafe fn to_floats(words: __m512i) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_cvtepi32_ps(words) }
    }
    #[inline(always)]
    unsafe fn float_bits(floats: __m512) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_castps_si512(floats) }
    }
    #[inline(always)]
    unsafe fn bits_to_floats(words: __m512i) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_castsi512_ps(words) }
    }
    #[inline(always)]
    unsafe fn half_bits_to_floats(words: __m512i) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)) }
    }
    #[inline(always)]
    unsafe fn lookup(table: &[f32; 16], words: __m512i) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_permutexvar_ps(words, _mm512_loadu_ps(table.as_ptr())) }
    }
    #[inline(always)]
    unsafe fn lookup_bytes(table: &[u8; 16], words: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), words) }
    }
}

/// With VNNI.
struct Vnni;

impl Dot<Avx512> for Vnni {
    #[inline(always)]
    unsafe fn dot(sums: __m512i, unsigned: __m512i, signed: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_dpbusd_epi32(sums, unsigned, signed) }
    }
}

/// Without VNNI: even and odd bytes as 16-bit numbers. Adding byte
/// products in pairs would saturate for bytes above 128.
struct Widened;

impl Dot<Avx512> for Widened {
    #[inline(always)]
    unsafe fn dot(sums: __m512i, unsigned: __m512i, signed: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe {
            let even = _mm512_madd_epi16(
                _mm512_and_si512(unsigned, _mm512_set1_epi16(0xff)),
                _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(signed)),
            );
            let odd = _mm512_madd_epi16(_mm512_srli_epi16::<8>(unsigned), _mm512_srai_epi16::<8>(signed));
            _mm512_add_epi32(sums, _mm512_add_epi32(even, odd))
        }
    }
    const RUNS: RunWidth = RunWidth::Bits16;
    #[inline(always)]
    unsafe fn begin_run(unsigned: __m512i, signed: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_maddubs_epi16(unsigned, signed) }
    }
    #[inline(always)]
    unsafe fn extend_run(run: __m512i, unsigned: __m512i, signed: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_add_epi16(run, _mm512_maddubs_epi16(unsigned, signed)) }
    }
    #[inline(always)]
    unsafe fn end_run(sums: __m512i, run: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_add_epi32(sums, _mm512_madd_epi16(run, _mm512_set1_epi16(1))) }
    }

    /// As with AVX2.
    const MAGNITUDES: bool = true;
    #[inline(always)]
    unsafe fn dot_magnitudes(sums: __m512i, unsigned: __m512i, magnitudes: __m512i, flips: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe {
            let pairs = _mm512_maddubs_epi16(magnitudes, _mm512_xor_si512(unsigned, flips));
            _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }
}
