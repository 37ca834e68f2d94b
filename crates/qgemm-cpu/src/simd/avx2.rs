//! AVX2 and FMA: 8 floats a register. Only the first 8 partial sums are used; the others stay 0.

use std::arch::x86_64::{_mm256_fmadd_ps, _mm256_loadu_ps, _mm256_setzero_ps, _mm256_storeu_ps};

use qgemm_hal::SimdLevel;

use super::{LANES, ROWS, Rows, Simd, TOKEN_SUMS};

pub static KERNELS: Simd = Simd { level: SimdLevel::Avx2, rows8_tokens1, rows4_tokens4 };

const WIDTH: usize = 8;

/// # Safety
/// The processor has AVX2 and FMA, and `super::check` has passed for 8 rows and 1 token.
unsafe fn rows8_tokens1(w: Rows<'_>, x: Rows<'_>, len: usize, sums: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe { accumulate::<ROWS, 1>(w, x, len, sums) }
}

/// # Safety
/// The processor has AVX2 and FMA, and `super::check` has passed for 4 rows and 4 tokens.
unsafe fn rows4_tokens4(w: Rows<'_>, x: Rows<'_>, len: usize, sums: &mut [f32]) {
    // Two passes of 4 × 2: 4 × 4 sums would fill all 16 registers.
    for pair in [0, 2] {
        let x = Rows { values: &x.values[pair * x.stride..], stride: x.stride };
        // SAFETY: the caller's promise, for half of the tokens.
        unsafe { accumulate::<4, 2>(w, x, len, &mut sums[pair * TOKEN_SUMS..]) }
    }
}

/// # Safety
/// `super::check` has passed for `R` rows and `T` tokens.
#[target_feature(enable = "avx2,fma")]
unsafe fn accumulate<const R: usize, const T: usize>(w: Rows<'_>, x: Rows<'_>, len: usize, sums: &mut [f32]) {
    let at = |token: usize, row: usize| token * TOKEN_SUMS + row * LANES;
    let mut acc = [[_mm256_setzero_ps(); R]; T];
    for (token, acc) in acc.iter_mut().enumerate() {
        for (row, acc) in acc.iter_mut().enumerate() {
            // SAFETY: sums hold LANES floats from `at` for each of R rows and T tokens, by `check`.
            *acc = unsafe { _mm256_loadu_ps(sums.as_ptr().add(at(token, row))) };
        }
    }
    for k in (0..len).step_by(WIDTH) {
        let mut w_k = [_mm256_setzero_ps(); R];
        for (row, w_k) in w_k.iter_mut().enumerate() {
            // SAFETY: rows 0..R of `w` and 0..T of `x` hold `len` floats, by `check`, and k + 8 <= len because
            // `len` is a multiple of 16.
            *w_k = unsafe { _mm256_loadu_ps(w.values.as_ptr().add(row * w.stride + k)) };
        }
        for (token, acc) in acc.iter_mut().enumerate() {
            // SAFETY: as above.
            let x_k = unsafe { _mm256_loadu_ps(x.values.as_ptr().add(token * x.stride + k)) };
            for (acc, &w_k) in acc.iter_mut().zip(&w_k) {
                *acc = _mm256_fmadd_ps(w_k, x_k, *acc);
            }
        }
    }
    for (token, acc) in acc.iter().enumerate() {
        for (row, &acc) in acc.iter().enumerate() {
            // SAFETY: as for the loads.
            unsafe { _mm256_storeu_ps(sums.as_mut_ptr().add(at(token, row)), acc) };
        }
    }
}
