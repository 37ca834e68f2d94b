//! AVX2 with FMA and F16C: a vector is two registers.

use std::arch::asm;
use std::arch::x86_64::*;

use qgemm_hal::SimdLevel;

use super::vector::{Dot, RunWidth, VALUE_BYTE, Vector};
use super::{Simd, level};

#[derive(Clone, Copy)]
struct Avx2;

level!(
    KERNELS, SimdLevel::Avx2, Avx2, Widened, "avx2,fma,f16c",
    [1 => 4, 2 => 2, 3 => 2, 4 => 1, 5 => 1, 6 => 1], packed [1, 2, 4], unpacked [1 => 1, 2 => 1, 4 => 1], attention 1
);

/// The level with 8-bit dot products.
pub mod vnni {
    use super::*;

    level!(
        KERNELS, SimdLevel::AvxVnni, Avx2, Vnni, "avx2,fma,f16c,avxvnni",
        [1 => 4, 2 => 2, 3 => 2, 4 => 1, 5 => 1, 6 => 1], packed [1, 2, 4], unpacked [1 => 1, 2 => 1, 4 => 1], attention 1
    );
}

impl Vector for Avx2 {
    type Floats = [__m256; 2];
    type Words = [__m256i; 2];

    #[inline(always)]
    unsafe fn load(from: *const f32) -> [__m256; 2] {
        // SAFETY: guaranteed by the caller, as in all functions here.
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(to: *mut f32, [a, b]: [__m256; 2]) {
        // SAFETY: as above.
        unsafe {
            _mm256_storeu_ps(to, a);
            _mm256_storeu_ps(to.add(8), b);
        }
    }
    #[inline(always)]
    unsafe fn splat(number: f32) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_set1_ps(number); 2] }
    }
    #[inline(always)]
    unsafe fn multiply(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn divide(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn where_less(a: [__m256; 2], b: [__m256; 2], then: [__m256; 2], otherwise: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: as above.
        let half =
            |i: usize| unsafe { _mm256_blendv_ps(otherwise[i], then[i], _mm256_cmp_ps::<_CMP_LT_OQ>(a[i], b[i])) };
        [half(0), half(1)]
    }
    #[inline(always)]
    unsafe fn halves(a: [__m256; 2], b: [__m256; 2]) -> [[__m256; 2]; 2] {
        [[a[0], b[0]], [a[1], b[1]]]
    }
    #[inline(always)]
    unsafe fn multiply_add(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u8) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())] }
    }
    #[inline(always)]
    unsafe fn store_words(to: *mut u8, [a, b]: [__m256i; 2]) {
        // SAFETY: as above.
        unsafe {
            _mm256_storeu_si256(to.cast(), a);
            _mm256_storeu_si256(to.add(32).cast(), b);
        }
    }
    #[inline(always)]
    unsafe fn load_halves(from: *const u8) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe {
            let half = |i: usize| _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(16 * i).cast()));
            [half(0), half(1)]
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe {
            let half = |i: usize| _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.add(8 * i).cast()));
            [half(0), half(1)]
        }
    }
    #[inline(always)]
    unsafe fn splat_word(word: u32) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_set1_epi32(word as i32); 2] }
    }
    #[inline(always)]
    unsafe fn shift_right([a, b]: [__m256i; 2], by: u32) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe {
            let by = _mm_cvtsi32_si128(by as i32);
            [_mm256_srl_epi32(a, by), _mm256_srl_epi32(b, by)]
        }
    }
    #[inline(always)]
    unsafe fn shift_left([a, b]: [__m256i; 2], by: u32) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe {
            let by = _mm_cvtsi32_si128(by as i32);
            [_mm256_sll_epi32(a, by), _mm256_sll_epi32(b, by)]
        }
    }
    #[inline(always)]
    unsafe fn and([a, b]: [__m256i; 2], mask: u32) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe {
            let mask = _mm256_set1_epi32(mask as i32);
            [_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)]
        }
    }
    #[inline(always)]
    unsafe fn or(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn xor(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_xor_si256(a[0], b[0]), _mm256_xor_si256(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn add(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn interleave(a: [__m256i; 2], b: [__m256i; 2]) -> [[__m256i; 2]; 2] {
        // SAFETY: as above.
        let half = |i: usize| unsafe {
            let (even, odd) = (_mm256_unpacklo_epi32(a[i], b[i]), _mm256_unpackhi_epi32(a[i], b[i]));
            [_mm256_permute2x128_si256::<0x20>(even, odd), _mm256_permute2x128_si256::<0x31>(even, odd)]
        };
        [half(0), half(1)]
    }
    #[inline(always)]
    unsafe fn largest(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_max_epi32(a[0], b[0]), _mm256_max_epi32(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn largest_lane([a, b]: [__m256i; 2]) -> u32 {
        // SAFETY: as above.
        unsafe {
            let eight = _mm256_max_epi32(a, b);
            let four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
            let two = _mm_max_epi32(four, _mm_shuffle_epi32::<0b00_00_11_10>(four));
            _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32::<1>(two))) as u32
        }
    }
    #[inline(always)]
    unsafe fn sum_of_lanes([a, b]: [__m256i; 2]) -> u32 {
        // SAFETY: as above.
        unsafe {
            let eight = _mm256_add_epi32(a, b);
            let four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
            let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b00_00_11_10>(four));
            _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<1>(two))) as u32
        }
    }
    #[inline(always)]
    unsafe fn store_quads(to: &mut [u32; 4], [a, b]: [__m256i; 2]) {
        // Positions of the lowest bytes of a half's four lanes, for
        // its first and its second word.
        const FIRST: [u8; 16] = quad_of_lanes(0);
        const SECOND: [u8; 16] = quad_of_lanes(4);
        // SAFETY: as above; four words are sixteen bytes.
        unsafe {
            let of = |order: &[u8; 16]| _mm256_broadcastsi128_si256(_mm_loadu_si128(order.as_ptr().cast()));
            let quads = _mm256_or_si256(_mm256_shuffle_epi8(a, of(&FIRST)), _mm256_shuffle_epi8(b, of(&SECOND)));
            let in_order = _mm256_permutevar8x32_epi32(quads, _mm256_setr_epi32(0, 4, 1, 5, 0, 0, 0, 0));
            _mm_storeu_si128(to.as_mut_ptr().cast(), _mm256_castsi256_si128(in_order));
        }
    }
    #[inline(always)]
    unsafe fn to_floats([a, b]: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)] }
    }
    #[inline(always)]
    unsafe fn float_bits([a, b]: [__m256; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_castps_si256(a), _mm256_castps_si256(b)] }
    }
    #[inline(always)]
    unsafe fn bits_to_floats([a, b]: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)] }
    }
    #[inline(always)]
    unsafe fn half_bits_to_floats([a, b]: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe {
            // Packing works within register halves. The
            // permutation restores the order.
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(a, b));
            [_mm256_cvtph_ps(_mm256_castsi256_si128(packed)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(packed))]
        }
    }
    #[inline(always)]
    unsafe fn lookup(table: &[f32; 16], words: [__m256i; 2]) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe {
            let (low, high) = (_mm256_loadu_ps(table.as_ptr()), _mm256_loadu_ps(table.as_ptr().add(8)));
            // A loop instead of `map`, because compilers do not propagate the
            // level's instructions into closures.
            let mut values = [low; 2];
            for (value, words) in values.iter_mut().zip(words) {
                // Bit 3 of a code, moved to the sign,
                // selects the table half.
                let upper = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(words));
                let [low, high] = [_mm256_permutevar8x32_ps(low, words), _mm256_permutevar8x32_ps(high, words)];
                *value = _mm256_blendv_ps(low, high, upper);
            }
            values
        }
    }
    #[inline(always)]
    unsafe fn lookup_bytes(table: &[u8; 16], words: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            let [a, b] = words;
            [_mm256_shuffle_epi8(table, a), _mm256_shuffle_epi8(table, b)]
        }
    }
}

/// Shuffle that collects a quad from four lanes into word
/// `at / 4` of sixteen bytes and zeroes the rest.
const fn quad_of_lanes(at: usize) -> [u8; 16] {
    let mut order = [0x80; 16];
    let mut lane = 0;
    while lane < 4 {
        order[at + VALUE_BYTE[lane] as usize] = 4 * lane as u8;
        lane += 1;
    }
    order
}

/// With AVX-VNNI.
struct Vnni;

impl Dot<Avx2> for Vnni {
    #[inline(always)]
    unsafe fn dot(sums: [__m256i; 2], unsigned: [__m256i; 2], signed: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        let half = |i: usize| unsafe { _mm256_dpbusd_avx_epi32(sums[i], unsigned[i], signed[i]) };
        [half(0), half(1)]
    }
}

/// Without AVX-VNNI: even and odd bytes as 16-bit numbers. Adding byte
/// products in pairs would saturate for bytes above 128.
struct Widened;

impl Dot<Avx2> for Widened {
    #[inline(always)]
    unsafe fn dot(sums: [__m256i; 2], unsigned: [__m256i; 2], signed: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        let half = |i: usize| unsafe {
            let even = _mm256_madd_epi16(
                _mm256_and_si256(unsigned[i], _mm256_set1_epi16(0xff)),
                _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(signed[i])),
            );
            let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(unsigned[i]), _mm256_srai_epi16::<8>(signed[i]));
            _mm256_add_epi32(sums[i], _mm256_add_epi32(even, odd))
        };
        [half(0), half(1)]
    }
    const RUNS: RunWidth = RunWidth::Bits16;
    #[inline(always)]
    unsafe fn begin_run(unsigned: [__m256i; 2], signed: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        let half = |i: usize| unsafe { _mm256_maddubs_epi16(unsigned[i], signed[i]) };
        [half(0), half(1)]
    }
    #[inline(always)]
    unsafe fn extend_run(run: [__m256i; 2], unsigned: [__m256i; 2], signed: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        let half = |i: usize| unsafe { _mm256_add_epi16(run[i], _mm256_maddubs_epi16(unsigned[i], signed[i])) };
        [half(0), half(1)]
    }
    #[inline(always)]
    unsafe fn end_run(sums: [__m256i; 2], run: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        let half = |i: usize| unsafe { _mm256_add_epi32(sums[i], _mm256_madd_epi16(run[i], _mm256_set1_epi16(1))) };
        [half(0), half(1)]
    }

    #[inline(always)]
    unsafe fn now(sums: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: as above.
        unsafe { in_order(sums) }
    }

    /// Two products of 127 and 128 fit in 16 bits: four
    /// instructions instead of nine.
    const MAGNITUDES: bool = true;
    #[inline(always)]
    unsafe fn dot_magnitudes(
        sums: [__m256i; 2],
        unsigned: [__m256i; 2],
        magnitudes: [__m256i; 2],
        flips: [__m256i; 2],
    ) -> [__m256i; 2] {
        // SAFETY: as above.
        let half = |i: usize| unsafe {
            let pairs = _mm256_maddubs_epi16(magnitudes[i], _mm256_xor_si256(unsigned[i], flips[i]));
            _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        };
        [half(0), half(1)]
    }
}

/// Unchanged words, with their origin hidden from the compiler.
///
/// # Safety
/// As for [`Vector`]'s functions.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn in_order([mut a, mut b]: [__m256i; 2]) -> [__m256i; 2] {
    // SAFETY: there is no instruction.
    unsafe {
        asm!("/* {0} {1} */", inout(ymm_reg) a, inout(ymm_reg) b, options(nomem, nostack, preserves_flags));
    }
    [a, b]
}
