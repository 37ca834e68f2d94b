//! The vector kernels: packed weights to f32, sixteen rows at a time, and their products with a few tokens. One file a level.

mod kernel;
mod portable;
mod vector;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

use qgemm_formats::Encoding;
use qgemm_formats::prepack::PackedLayout;
use qgemm_hal::SimdLevel;

pub use vector::LANES;

/// Tiles of sixteen rows that are worked on together.
pub const TILES: usize = 4;
/// Their rows, and the sums of a token with them.
pub const BLOCK_ROWS: usize = TILES * LANES;

/// A packed slab of a tile with its scales as numbers.
#[derive(Clone, Copy, Debug)]
pub struct Slab<'a> {
    /// Its layout, of class R.
    pub layout: &'a PackedLayout,
    /// The slab.
    pub bytes: &'a [u8],
    /// `[sub-block][lane]`; none for plain types.
    pub scales: &'a [f32],
    /// The same of the minima.
    pub mins: &'a [f32],
}

/// [`kernel::decode`] of a level.
type Decode = unsafe fn(slab: &Slab<'_>, first: usize, columns: usize, out: &mut [f32]);
/// [`kernel::widen`] of a level.
type Widen = unsafe fn(halves: &[u32; LANES], out: &mut [f32; LANES]);
/// [`kernel::multiply`] of a level, for a fixed number of tokens.
type Multiply = unsafe fn(w: &[f32], x: &[f32], stride: usize, columns: usize, sums: &mut [f32]);

/// The kernels of one level.
#[derive(Debug)]
pub struct Simd {
    level: SimdLevel,
    decode: Decode,
    widen: Widen,
    /// For one token, for two, ….
    multiply: &'static [Multiply],
}

/// Defines the kernels of a level: with how many tokens it takes how many tiles at once, so that all sums are in registers.
macro_rules! level {
    ($name:ident, $level:expr, $vector:ty, $($features:literal,)? [$($tokens:literal => $tiles:literal),*]) => {
        pub static $name: Simd =
            Simd { level: $level, decode, widen, multiply: &[$(multiply::<$tiles, $tokens>),*] };

        /// # Safety
        /// As of `kernel::decode`.
        $(#[target_feature(enable = $features)])?
        unsafe fn decode(slab: &super::Slab<'_>, first: usize, columns: usize, out: &mut [f32]) {
            // SAFETY: the caller's promise.
            unsafe { super::kernel::decode::<$vector>(slab, first, columns, out) }
        }

        /// # Safety
        /// As of `kernel::widen`.
        $(#[target_feature(enable = $features)])?
        unsafe fn widen(halves: &[u32; super::LANES], out: &mut [f32; super::LANES]) {
            // SAFETY: the caller's promise.
            unsafe { super::kernel::widen::<$vector>(halves, out) }
        }

        /// # Safety
        /// As of `kernel::multiply`.
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply<const P: usize, const T: usize>(
            w: &[f32],
            x: &[f32],
            stride: usize,
            columns: usize,
            sums: &mut [f32],
        ) {
            // SAFETY: the caller's promise.
            unsafe { super::kernel::multiply::<$vector, P, T>(w, x, stride, columns, sums) }
        }
    };
}
use level;

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
            SimdLevel::Scalar => Some(&portable::KERNELS),
            SimdLevel::Neon if SimdLevel::detect() == SimdLevel::Neon => Some(&portable::KERNELS),
            _ => None,
        }
    }

    /// The best kernels of this processor.
    pub fn best() -> &'static Self {
        Self::new(SimdLevel::detect()).unwrap_or(&portable::KERNELS)
    }

    /// The level they are written for.
    pub fn level(&self) -> SimdLevel {
        self.level
    }

    /// Most tokens that are multiplied at once.
    pub fn tokens(&self) -> usize {
        self.multiply.len()
    }

    /// Decodes `columns` columns of `slab` from `first` on, both multiples of 32, to `out[column][lane]`.
    pub fn decode(&self, slab: &Slab<'_>, first: usize, columns: usize, out: &mut [f32]) {
        let layout = slab.layout;
        assert!(first.is_multiple_of(32) && columns.is_multiple_of(32), "words are decoded whole");
        assert!(first + columns <= layout.slab_k && slab.bytes.len() >= layout.slab_bytes, "columns lie in the slab");
        assert!(columns * LANES <= out.len(), "values lie in their scratch memory");
        assert!(layout.format().sub_block.is_power_of_two(), "sub-blocks are found by shifts");
        let subs = scaled_sub_blocks(layout) * LANES;
        assert!(subs <= slab.scales.len() && subs <= slab.mins.len(), "every sub-block has its scales");
        // SAFETY: a `Simd` is only to be had from `new`, which checked that the processor has the level; the rest is
        // checked above.
        unsafe { (self.decode)(slab, first, columns, out) }
    }

    /// The f16 whose bits are given.
    pub fn widen(&self, halves: &[u32; LANES], out: &mut [f32; LANES]) {
        // SAFETY: as in `decode`.
        unsafe { (self.widen)(halves, out) }
    }

    /// `sums[token][row] += Σ w[tile][column][lane] · x[token][column]` for `tokens` tokens, at most [`Simd::tokens`], and all
    /// tiles of a block. Rows of `x` are `stride` apart.
    pub fn multiply(&self, tokens: usize, w: &[f32], x: &[f32], stride: usize, columns: usize, sums: &mut [f32]) {
        assert!(BLOCK_ROWS * columns <= w.len(), "tiles lie in their scratch memory");
        assert!((tokens - 1) * stride + columns <= x.len(), "tokens lie in their scratch memory");
        assert!(tokens * BLOCK_ROWS <= sums.len(), "sums lie in their scratch memory");
        // SAFETY: as in `decode`.
        unsafe { (self.multiply[tokens - 1])(w, x, stride, columns, sums) }
    }
}

/// Sub-blocks of a slab that have scales: none of plain types.
pub fn scaled_sub_blocks(layout: &PackedLayout) -> usize {
    match layout.format().encoding {
        Encoding::Plain(_) => 0,
        _ => layout.slab_k / layout.format().sub_block,
    }
}

#[cfg(test)]
mod tests {
    use qgemm_formats::Format;
    use qgemm_formats::prepack::PackClass;

    use super::*;

    const LEVELS: [SimdLevel; 6] = [
        SimdLevel::Scalar,
        SimdLevel::Neon,
        SimdLevel::Avx2,
        SimdLevel::AvxVnni,
        SimdLevel::Avx512,
        SimdLevel::Avx512Vnni,
    ];

    /// Reproducible words.
    fn words(seed: u32) -> impl FnMut() -> u32 {
        let mut state = seed;
        move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        }
    }

    #[test]
    fn every_level_decodes_every_format_as_its_description_says() {
        for format in Format::all() {
            let layout = PackedLayout::new(format, PackClass::R).expect("a layout");
            let mut word = words(7);
            let bytes: Vec<u8> = (0..layout.slab_bytes).map(|_| word() as u8).collect();
            let subs = scaled_sub_blocks(&layout);
            let mut numbers = |len: usize| -> Vec<f32> { (0..len).map(|_| word() as f32 / 1e6 - 8.0).collect() };
            let (scales, mins) = (numbers(subs * LANES), numbers(subs * LANES));
            let slab = Slab { layout: &layout, bytes: &bytes, scales: &scales, mins: &mins };
            for simd in LEVELS.into_iter().filter_map(Simd::new) {
                for first in (0..layout.slab_k).step_by(64) {
                    let mut out = vec![0.0; 64 * LANES];
                    simd.decode(&slab, first, 64, &mut out);
                    for (i, &got) in out.iter().enumerate() {
                        let (column, row) = (first + i / LANES, i % LANES);
                        let number = format.encoding.number(layout.code_at(&bytes, 1, row, column));
                        let sub = column.checked_div(format.sub_block).unwrap_or(0) * LANES + row;
                        let (scale, min) = if subs == 0 { (1.0, 0.0) } else { (scales[sub], mins[sub]) };
                        let expected = f64::from(number) * f64::from(scale) + f64::from(min);
                        let size = (f64::from(number) * f64::from(scale)).abs() + f64::from(min).abs();
                        let close = (f64::from(got) - expected).abs() <= 2e-7 * size;
                        assert!(
                            close || !number.is_finite(),
                            "{format} {:?} {row} {column}: {got} {expected}",
                            simd.level()
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_sum_does_not_depend_on_what_is_computed_beside_it() {
        let (columns, stride) = (64, 80);
        let mut word = words(3);
        let mut numbers =
            |len: usize| -> Vec<f32> { (0..len).map(|_| word() as f32 / (1 << 23) as f32 - 1.0).collect() };
        let (w, x) = (numbers(BLOCK_ROWS * columns), numbers(8 * stride));
        for simd in LEVELS.into_iter().filter_map(Simd::new) {
            let mut single = vec![1.0; simd.tokens() * BLOCK_ROWS];
            for (token, sums) in single.chunks_exact_mut(BLOCK_ROWS).enumerate() {
                simd.multiply(1, &w, &x[token * stride..], stride, columns, sums);
            }
            for tokens in 1..=simd.tokens() {
                let mut sums = vec![1.0; tokens * BLOCK_ROWS];
                simd.multiply(tokens, &w, &x, stride, columns, &mut sums);
                assert_eq!(sums, single[..tokens * BLOCK_ROWS], "{:?}, {tokens} tokens", simd.level());
            }
            for (i, &got) in single.iter().enumerate() {
                let (token, tile, lane) = (i / BLOCK_ROWS, i % BLOCK_ROWS / LANES, i % LANES);
                let products = (0..columns)
                    .map(|k| f64::from(w[(tile * columns + k) * LANES + lane]) * f64::from(x[token * stride + k]));
                let expected = 1.0 + products.sum::<f64>();
                assert!((f64::from(got) - expected).abs() < 1e-4, "{:?}: {got} for {expected}", simd.level());
            }
        }
    }
}
