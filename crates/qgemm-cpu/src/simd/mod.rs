//! The vector kernels: f32 multiply-adds of a few decoded weight rows with a few tokens. One file a level.
//!
//! A product is kept as [`LANES`] partial sums; column `k` is added to partial sum `k % lanes`, in ascending
//! order, where `lanes` is the register width of the level. [`sum`] adds them up. So its bits depend on the
//! level alone, not on how rows and tokens are blocked.

mod scalar;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use qgemm_hal::SimdLevel;

/// Partial sums kept for a product, and the multiple that rows are padded to.
pub const LANES: usize = 16;
/// Rows of W that are worked on together.
pub const ROWS: usize = 8;
/// Floats of the partial sums of one token with [`ROWS`] rows: `[row][lane]`.
pub const TOKEN_SUMS: usize = ROWS * LANES;

/// Consecutive rows of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Values, from the first of the first row.
    pub values: &'a [f32],
    /// Floats from one row to the next.
    pub stride: usize,
}

impl Rows<'_> {
    /// Checks that `rows` rows have `len` values each.
    fn check(&self, rows: usize, len: usize) {
        assert!((rows - 1) * self.stride + len <= self.values.len(), "rows lie in their scratch memory");
    }
}

/// Adds the products of columns `0..len` of some rows and tokens to their partial sums.
type Accumulate = unsafe fn(w: Rows<'_>, x: Rows<'_>, len: usize, sums: &mut [f32]);

/// The kernels of one level.
#[derive(Debug)]
pub struct Simd {
    level: SimdLevel,
    rows8_tokens1: Accumulate,
    rows4_tokens4: Accumulate,
}

impl Simd {
    /// The kernels for `level`, or `None` when this processor does not have it.
    pub fn new(level: SimdLevel) -> Option<&'static Self> {
        #[cfg(target_arch = "x86_64")]
        {
            let detected = SimdLevel::detect();
            let has_512 = matches!(detected, SimdLevel::Avx512 | SimdLevel::Avx512Vnni);
            match level {
                SimdLevel::Avx512 if has_512 => return Some(&avx512::KERNELS),
                SimdLevel::Avx512Vnni if detected == level => return Some(&avx512::KERNELS),
                SimdLevel::Avx2 if detected >= SimdLevel::Avx2 => return Some(&avx2::KERNELS),
                SimdLevel::AvxVnni if detected == level => return Some(&avx2::KERNELS),
                _ => {}
            }
        }
        match level {
            SimdLevel::Scalar => Some(&scalar::KERNELS),
            // The portable loops compile to Advanced SIMD, which every 64-bit Arm processor has.
            SimdLevel::Neon if SimdLevel::detect() == SimdLevel::Neon => Some(&scalar::KERNELS),
            _ => None,
        }
    }

    /// The best kernels of this processor.
    pub fn best() -> &'static Self {
        Self::new(SimdLevel::detect()).unwrap_or(&scalar::KERNELS)
    }

    /// The level they are written for.
    pub fn level(&self) -> SimdLevel {
        self.level
    }

    /// Adds the products of [`ROWS`] rows and one token over columns `0..len` to `sums[row][lane]`. `len` is a
    /// multiple of [`LANES`].
    pub fn rows8_tokens1(&self, w: Rows<'_>, x: &[f32], len: usize, sums: &mut [f32]) {
        let x = Rows { values: x, stride: 0 };
        check(w, ROWS, x, 1, len, sums);
        // SAFETY: a `Simd` is only to be had from `new`, which checked that the processor has the level; the
        // kernel's demands on the slices are checked above.
        unsafe { (self.rows8_tokens1)(w, x, len, sums) }
    }

    /// Adds the products of four rows and four tokens over columns `0..len` to
    /// `sums[token · TOKEN_SUMS + row · LANES + lane]`. `len` is a multiple of [`LANES`].
    pub fn rows4_tokens4(&self, w: Rows<'_>, x: Rows<'_>, len: usize, sums: &mut [f32]) {
        check(w, 4, x, 4, len, sums);
        // SAFETY: as in `rows8_tokens1`.
        unsafe { (self.rows4_tokens4)(w, x, len, sums) }
    }
}

/// What every kernel relies on.
fn check(w: Rows<'_>, rows: usize, x: Rows<'_>, tokens: usize, len: usize, sums: &[f32]) {
    assert!(len.is_multiple_of(LANES), "rows are padded");
    w.check(rows, len);
    x.check(tokens, len);
    assert!((tokens - 1) * TOKEN_SUMS + rows * LANES <= sums.len(), "sums lie in their scratch memory");
}

/// Adds up the partial sums of one product, as a fixed tree.
pub fn sum(lanes: &[f32; LANES]) -> f32 {
    let mut sums = *lanes;
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEVELS: [SimdLevel; 6] = [
        SimdLevel::Scalar,
        SimdLevel::Neon,
        SimdLevel::Avx2,
        SimdLevel::AvxVnni,
        SimdLevel::Avx512,
        SimdLevel::Avx512Vnni,
    ];

    /// Reproducible values; integers of at most 8 when `exact`.
    fn values(len: usize, seed: u32, exact: bool) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        (0..len)
            .map(|_| if exact { (next() % 17) as f32 - 8.0 } else { next() as f32 / (1 << 23) as f32 - 1.0 })
            .collect()
    }

    fn product(sums: &[f32], token: usize, row: usize) -> f32 {
        sum(sums[token * TOKEN_SUMS + row * LANES..][..LANES].try_into().expect("16 lanes"))
    }

    #[test]
    fn every_level_multiplies_exactly_and_blocks_alike() {
        let (stride, len) = (1024, 528);
        for simd in LEVELS.into_iter().filter_map(Simd::new) {
            for exact in [true, false] {
                let w = values(ROWS * stride, 1, exact);
                let x = values(4 * stride, 2, exact);
                let w_rows = |first: usize| Rows { values: &w[first * stride..], stride };
                let mut single = vec![0.0; 4 * TOKEN_SUMS];
                let mut blocked = vec![0.0; 4 * TOKEN_SUMS];
                // Two calls continue one another, as chunks of K do.
                for (from, to) in [(0, 256), (256, len)] {
                    let w_from = |first: usize| Rows { values: &w_rows(first).values[from..], stride };
                    for token in 0..4 {
                        let sums = &mut single[token * TOKEN_SUMS..];
                        simd.rows8_tokens1(w_from(0), &x[token * stride + from..], to - from, sums);
                    }
                    for first in [0, 4] {
                        let x = Rows { values: &x[from..], stride };
                        simd.rows4_tokens4(w_from(first), x, to - from, &mut blocked[first * LANES..]);
                    }
                }
                assert_eq!(single, blocked, "{:?}", simd.level());
                for (token, row) in (0..4).flat_map(|t| (0..ROWS).map(move |r| (t, r))) {
                    let pairs = w[row * stride..][..len].iter().zip(&x[token * stride..][..len]);
                    let expected: f64 = pairs.clone().map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                    let scale: f64 = pairs.map(|(&a, &b)| (f64::from(a) * f64::from(b)).abs()).sum();
                    let error = (f64::from(product(&single, token, row)) - expected).abs();
                    assert!(error <= if exact { 0.0 } else { scale * 2e-7 }, "{:?}: {error}", simd.level());
                }
            }
        }
    }

    #[test]
    fn the_best_level_is_the_detected_one() {
        assert_eq!(Simd::new(SimdLevel::detect()).map(|s| s.level()), Some(Simd::best().level()));
    }
}
