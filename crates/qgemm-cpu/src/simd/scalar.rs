//! Portable loops, which compilers turn into whatever vectors the target always has.

use qgemm_hal::SimdLevel;

use super::{LANES, ROWS, Rows, Simd, TOKEN_SUMS};

pub static KERNELS: Simd =
    Simd { level: SimdLevel::Scalar, rows8_tokens1: accumulate::<ROWS, 1>, rows4_tokens4: accumulate::<4, 4> };

fn accumulate<const R: usize, const T: usize>(w: Rows<'_>, x: Rows<'_>, len: usize, sums: &mut [f32]) {
    for token in 0..T {
        let x = &x.values[token * x.stride..][..len];
        for row in 0..R {
            let w = &w.values[row * w.stride..][..len];
            let sums = &mut sums[token * TOKEN_SUMS + row * LANES..][..LANES];
            let mut lanes = [0.0; LANES];
            lanes.copy_from_slice(sums);
            for (w, x) in w.chunks_exact(LANES).zip(x.chunks_exact(LANES)) {
                for ((lane, &w), &x) in lanes.iter_mut().zip(w).zip(x) {
                    *lane += w * x;
                }
            }
            sums.copy_from_slice(&lanes);
        }
    }
}
