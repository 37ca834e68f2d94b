//! The vector kernels, sixteen rows at a time: packed weights to f32, and their products with a few tokens; products of packed codes
//! with a few quantized tokens. One file a level.

mod codes;
mod dense;
mod dot;
mod kernel;
mod portable;
mod prefetch;
mod quantize;
mod scales;
mod vector;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;

use qgemm_formats::prepack::{PackClass, PackedLayout};
use qgemm_formats::{DType, Encoding};
use qgemm_hal::SimdLevel;

use codes::{CodeShape, UNIT};
use dot::{LEAST_SUB_BLOCK, SCALED_COLUMNS};

pub use dot::{Operands, Tile};
pub use prefetch::Prefetch;
pub use quantize::Quantization;
pub use scales::Scales;
pub use vector::LANES;

/// Tiles of sixteen rows that are worked on together.
pub const TILES: usize = 4;
/// Their rows, and the accumulators of a token for them.
pub const BLOCK_ROWS: usize = TILES * LANES;

/// A packed k-tile of a tile with its scales as numbers.
#[derive(Clone, Copy, Debug)]
pub struct KTile<'a> {
    /// Its layout, of `Simd16`.
    pub layout: &'a PackedLayout,
    /// The k-tile.
    pub bytes: &'a [u8],
    /// Where as many bytes begin that are prefetched meanwhile, each line when its counterpart here is decoded: a core that
    /// asks for many at once has to wait for them.
    pub prefetch: Prefetch,
    /// `[sub-block][lane]`; none for plain types.
    pub scales: &'a [f32],
    /// The same of the minima.
    pub mins: &'a [f32],
}

/// [`kernel::decode`] of a level.
type Decode = unsafe fn(k_tile: &KTile<'_>, first: usize, columns: usize, out: &mut [f32]);
/// [`scales::unpack`] of a level.
type Unpack = unsafe fn(scales: &Scales, layout: &PackedLayout, k_tiles: &[u8], out: &mut [f32], mins: &mut [f32]);
/// [`dense::to_f32`] of a level.
type ToF32 = unsafe fn(dtype: DType, bytes: &[u8], out: &mut [f32]);
/// [`quantize::quantize`] of a level.
type Quantize = unsafe fn(how: &Quantization, values: &[f32], out: &mut [u32]);
/// [`kernel::multiply`] of a level, for a fixed number of tokens.
type Multiply = unsafe fn(w: &[f32], x: &[f32], stride: usize, columns: usize, sums: &mut [f32]);
/// [`codes::unpack`] of a level, for a shape of packed codes.
type UnpackCodes = unsafe fn(layout: &PackedLayout, k_tiles: &[u8], out: &mut [u8]);
/// [`dot::multiply_codes`] of a level, for a fixed number of tokens and shape of codes.
type MultiplyCodes = unsafe fn(at: &Operands<'_>, sums: &mut [f32]);

/// The kernels of one level.
#[derive(Debug)]
pub struct Simd {
    level: SimdLevel,
    /// Whether products of codes with an offset of 128 take magnitudes of tokens.
    magnitudes: bool,
    decode: Decode,
    unpack: Unpack,
    to_f32: ToF32,
    quantize: Quantize,
    /// For one token, for two, ….
    multiply: &'static [Multiply],
    /// For every shape of packed codes.
    unpack_codes: [UnpackCodes; CodeShape::PACKED],
    /// Of packed codes and of unpacked ones: for some numbers of quantized tokens, ascending from one, kernels for every shape.
    multiply_codes: [&'static [(usize, &'static [MultiplyCodes])]; 2],
}

/// Defines the kernels of a level: in f32, with how many tokens they take how many tiles at once, so that all accumulators are in registers;
/// of packed codes, for how many tokens there are some; of unpacked codes, with how many they take how many tiles.
macro_rules! level {
    ($name:ident, $level:expr, $vector:ty, $dot:ty, $($features:literal,)?
     [$($tokens:literal => $tiles:literal),*], packed [$($packed:literal),*],
     unpacked [$($unpacked:literal => $unpacked_tiles:literal),*]) => {
        pub static $name: Simd = Simd {
            level: $level,
            magnitudes: <$dot as crate::simd::vector::Dot<$vector>>::MAGNITUDES,
            decode,
            unpack,
            to_f32,
            quantize,
            multiply: &[$(multiply::<$tiles, $tokens>),*],
            unpack_codes: crate::simd::of_shapes!(unpack_codes []; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15),
            multiply_codes: [
                &[$(($packed, &crate::simd::of_shapes!(
                    multiply_codes [1, $packed]; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
                ))),*],
                &[$(($unpacked, &crate::simd::of_shapes!(
                    multiply_codes [$unpacked_tiles, $unpacked]; 16 17 18 19 20 21 22 23 24 25 26 27 28
                ))),*],
            ],
        };

        /// # Safety
        /// As of `kernel::decode`.
        $(#[target_feature(enable = $features)])?
        unsafe fn decode(k_tile: &crate::simd::KTile<'_>, first: usize, columns: usize, out: &mut [f32]) {
            // SAFETY: the caller's promise.
            unsafe { crate::simd::kernel::decode::<$vector>(k_tile, first, columns, out) }
        }

        /// # Safety
        /// As of `scales::unpack`.
        $(#[target_feature(enable = $features)])?
        unsafe fn unpack(
            scales: &crate::simd::Scales,
            layout: &qgemm_formats::prepack::PackedLayout,
            k_tiles: &[u8],
            out: &mut [f32],
            mins: &mut [f32],
        ) {
            // SAFETY: the caller's promise.
            unsafe { crate::simd::scales::unpack::<$vector>(scales, layout, k_tiles, out, mins) }
        }

        /// # Safety
        /// As of `dense::to_f32`.
        $(#[target_feature(enable = $features)])?
        unsafe fn to_f32(dtype: qgemm_formats::DType, bytes: &[u8], out: &mut [f32]) {
            // SAFETY: the caller's promise.
            unsafe { crate::simd::dense::to_f32::<$vector>(dtype, bytes, out) }
        }

        /// # Safety
        /// The processor has the level's instructions.
        $(#[target_feature(enable = $features)])?
        unsafe fn quantize(how: &crate::simd::Quantization, values: &[f32], out: &mut [u32]) {
            crate::simd::quantize::quantize(how, values, out);
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
            unsafe { crate::simd::kernel::multiply::<$vector, P, T>(w, x, stride, columns, sums) }
        }

        /// # Safety
        /// As of `codes::unpack`.
        $(#[target_feature(enable = $features)])?
        unsafe fn unpack_codes<const SHAPE: usize>(
            layout: &qgemm_formats::prepack::PackedLayout,
            k_tiles: &[u8],
            out: &mut [u8],
        ) {
            // SAFETY: the caller's promise.
            unsafe { crate::simd::codes::unpack::<$vector, SHAPE>(layout, k_tiles, out) }
        }

        /// # Safety
        /// As of `dot::multiply_codes`.
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply_codes<const SHAPE: usize, const P: usize, const T: usize>(
            at: &crate::simd::Operands<'_>,
            sums: &mut [f32],
        ) {
            // SAFETY: the caller's promise.
            unsafe { crate::simd::dot::multiply_codes::<$vector, $dot, SHAPE, P, T>(at, unpack, sums) }
        }
    };
}
use level;

/// A kernel for each of these shapes of codes, and for so many tiles and tokens.
macro_rules! of_shapes {
    ($kernel:ident []; $($shape:literal)*) => { [$($kernel::<$shape>),*] };
    ($kernel:ident [$tiles:literal, $tokens:literal]; $($shape:literal)*) => {
        [$($kernel::<$shape, $tiles, $tokens>),*]
    };
}
use of_shapes;

impl Simd {
    /// The kernels for `level`, or `None` when this processor does not have it.
    pub fn new(level: SimdLevel) -> Option<&'static Self> {
        if !level.is_available() {
            return None;
        }
        Some(match level {
            SimdLevel::Scalar => &portable::KERNELS,
            #[cfg(target_arch = "aarch64")]
            SimdLevel::Neon => &neon::KERNELS,
            #[cfg(target_arch = "aarch64")]
            SimdLevel::NeonDotprod => &neon::dotprod::KERNELS,
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => &avx2::KERNELS,
            #[cfg(target_arch = "x86_64")]
            SimdLevel::AvxVnni => &avx2::vnni::KERNELS,
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => &avx512::KERNELS,
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512Vnni => &avx512::vnni::KERNELS,
            _ => return None,
        })
    }

    /// The best kernels of this processor.
    pub fn best() -> &'static Self {
        Self::new(SimdLevel::detect()).unwrap_or(&portable::KERNELS)
    }

    /// The level they are written for.
    pub fn level(&self) -> SimdLevel {
        self.level
    }

    /// How tokens are quantized for these kernels where `how` is for some level.
    pub fn quantization(&self, how: Quantization) -> Quantization {
        how.with_magnitudes(self.magnitudes)
    }

    /// Most tokens that are multiplied at once.
    pub fn tokens(&self) -> usize {
        self.multiply.len()
    }

    /// Most quantized tokens that are multiplied at once, with packed codes or with unpacked ones.
    pub fn quantized_tokens(&self, unpacked: bool) -> usize {
        self.multiply_codes[usize::from(unpacked)].last().map_or(0, |&(tokens, _)| tokens)
    }

    /// Decodes `columns` columns of `k_tile` from `first` on, both multiples of 32, to `out[column][lane]`.
    pub fn decode(&self, k_tile: &KTile<'_>, first: usize, columns: usize, out: &mut [f32]) {
        let layout = k_tile.layout;
        assert!(first.is_multiple_of(32) && columns.is_multiple_of(32), "words are decoded whole");
        assert!(
            first + columns <= layout.k_tile && k_tile.bytes.len() >= layout.k_tile_bytes,
            "columns lie in the k-tile"
        );
        assert!(columns * LANES <= out.len(), "values lie in their scratch memory");
        assert!(layout.format().sub_block.is_power_of_two(), "sub-blocks are found by shifts");
        let subs = scaled_sub_blocks(layout) * LANES;
        assert!(subs <= k_tile.scales.len() && subs <= k_tile.mins.len(), "every sub-block has its scales");
        // SAFETY: a `Simd` is only to be had from `new`, which checked that the processor has the level; the rest is
        // checked above.
        unsafe { (self.decode)(k_tile, first, columns, out) }
    }

    /// Scale and minimum of every sub-block of k-tiles of `layout`, for which `from` was made, to `[sub-block][lane]`; no minima where
    /// `mins` is empty, nothing where `scales` is, too.
    pub fn unpack_scales(
        &self,
        layout: &PackedLayout,
        from: &Scales,
        k_tiles: &[u8],
        scales: &mut [f32],
        mins: &mut [f32],
    ) {
        if scales.is_empty() {
            return;
        }
        assert!(from.is_of(layout), "scales are of the layout");
        let floats = k_tiles.len() / layout.k_tile_bytes * from.count() * LANES;
        assert!(floats <= scales.len(), "scales lie in their scratch memory");
        assert!(mins.is_empty() || floats <= mins.len(), "minima lie in their scratch memory");
        // SAFETY: as in `decode`.
        unsafe { (self.unpack)(from, layout, k_tiles, scales, mins) }
    }

    /// The first `out.len()` values of `bytes`, at any address, as f32.
    ///
    /// # Panics
    /// When `bytes` is shorter than that.
    pub fn to_f32(&self, dtype: DType, bytes: &[u8], out: &mut [f32]) {
        // SAFETY: as in `decode`; the rest is checked by the function.
        unsafe { (self.to_f32)(dtype, bytes, out) }
    }

    /// Quantizes a token to `out`, as [`Row`] says.
    pub fn quantize(&self, how: &Quantization, values: &[f32], out: &mut [u32]) {
        // SAFETY: as in `decode`; the function itself is safe.
        unsafe { (self.quantize)(how, values, out) }
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

    /// Of `tokens` quantized tokens, how many are multiplied at once, with packed codes or with unpacked ones: the words of these
    /// lie side by side.
    pub fn token_groups(&self, unpacked: bool, tokens: usize) -> impl Iterator<Item = usize> {
        self.kernels_of_groups(unpacked, tokens).map(|&(group, _)| group)
    }

    /// The largest groups first.
    fn kernels_of_groups(
        &self,
        unpacked: bool,
        tokens: usize,
    ) -> impl Iterator<Item = &(usize, &'static [MultiplyCodes])> {
        let mut left = tokens;
        self.multiply_codes[usize::from(unpacked)].iter().rev().flat_map(move |kernels| {
            let groups = left / kernels.0;
            left -= groups * kernels.0;
            std::iter::repeat_n(kernels, groups)
        })
    }

    /// The codes of packed k-tiles of `layout`, for which `how` is, as bytes, [`LANES`] a column.
    pub fn unpack_codes(&self, how: &Quantization, layout: &PackedLayout, k_tiles: &[u8], out: &mut [u8]) {
        let columns = check_k_tiles(how, layout, k_tiles.len(), layout.k_tile_bytes);
        assert!(columns * LANES <= out.len(), "codes lie in their scratch memory");
        // SAFETY: as in `decode`.
        unsafe { (self.unpack_codes[how.shapes[0]])(layout, k_tiles, out) }
    }

    /// `sums[token][tile][row] += Σ w[tile][column][row] · x[token][column]` for `tokens` quantized tokens, which lie in groups as
    /// [`Simd::token_groups`] says; accumulators of tokens are [`BLOCK_ROWS`] apart.
    pub fn multiply_codes(&self, tokens: usize, at: &Operands<'_>, sums: &mut [f32]) {
        let Quantization { sub_block, offset, shapes, .. } = *at.how;
        let k_tile_bytes = if at.unpacked { at.layout.k_tile * LANES } else { at.layout.k_tile_bytes };
        let bytes = at.tiles.first().map_or(0, |tile| tile.codes.len());
        let columns = check_k_tiles(at.how, at.layout, bytes, k_tile_bytes);
        let scales = columns / sub_block * LANES;
        if let Some(records) = at.records {
            assert!(records.is_of(at.layout) && !at.unpacked, "scales lie in packed k-tiles of the layout");
        }
        for tile in at.tiles {
            assert!(tile.codes.len() == bytes, "tiles have the same columns");
            if at.records.is_some() {
                continue;
            }
            assert!(scales <= tile.scales.len(), "every sub-block has its scale");
            assert!(offset.is_some() || scales <= tile.mins.len(), "every sub-block has its minimum");
        }
        let row = at.how.row(columns);
        assert!(self.quantization(*at.how) == *at.how, "tokens are quantized for the level");
        assert!(row == at.row && tokens * row.words <= at.x.len(), "tokens lie in their scratch memory");
        assert!((tokens - 1) * BLOCK_ROWS + at.tiles.len() * LANES <= sums.len(), "sums lie in their scratch memory");
        let shape = shapes[usize::from(at.unpacked)];
        let mut first = 0;
        for (group, kernels) in self.kernels_of_groups(at.unpacked, tokens) {
            if at.unpacked {
                // Parts of it, since a core that asks for much at once has to wait.
                let asked = first * at.prefetch_bytes / tokens;
                let bytes = (first + group) * at.prefetch_bytes / tokens - asked;
                at.tiles.iter().for_each(|tile| tile.prefetch.skip(asked).fetch(bytes));
            }
            let x = &at.x[first * row.words..];
            // SAFETY: as in `decode`.
            unsafe { (kernels[shape])(&Operands { x, ..*at }, &mut sums[first * BLOCK_ROWS..]) };
            first += group;
        }
    }
}

/// Columns of whole k-tiles of `layout` in `bytes` bytes, each of `k_tile_bytes`, when products with them can be computed.
fn check_k_tiles(how: &Quantization, layout: &PackedLayout, bytes: usize, k_tile_bytes: usize) -> usize {
    let Quantization { block, span, sub_block, .. } = *how;
    assert!(how.format() == layout.format(), "tokens are quantized for the layout's format");
    assert!(layout.class == PackClass::Simd16 && bytes.is_multiple_of(k_tile_bytes), "k-tiles are whole");
    assert!(block.is_multiple_of(UNIT) && UNIT.is_multiple_of(span), "a block is whole units, a unit whole spans");
    assert!(block.is_power_of_two() && layout.k_tile.is_multiple_of(block), "a k-tile is whole blocks");
    assert!(sub_block.is_power_of_two() && sub_block >= LEAST_SUB_BLOCK, "sub-blocks are found by shifts");
    assert!(SCALED_COLUMNS.is_multiple_of(layout.k_tile), "scales of whole k-tiles are unpacked at once");
    bytes / k_tile_bytes * layout.k_tile
}

/// Sub-blocks of a k-tile that have scales: none of plain types.
pub fn scaled_sub_blocks(layout: &PackedLayout) -> usize {
    match layout.format().encoding {
        Encoding::Plain(_) => 0,
        _ => layout.k_tile / layout.format().sub_block,
    }
}

#[cfg(test)]
mod tests {
    use qgemm_formats::prepack::PackClass;
    use qgemm_formats::{Format, QuantizedActivations, SubScale};

    use super::*;

    /// Every level that this processor has.
    fn levels() -> impl Iterator<Item = &'static Simd> {
        SimdLevel::ALL.into_iter().filter_map(Simd::new)
    }

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
            let layout = PackedLayout::new(format, PackClass::Simd16).expect("a layout");
            let mut word = words(7);
            let bytes: Vec<u8> = (0..layout.k_tile_bytes).map(|_| word() as u8).collect();
            let subs = scaled_sub_blocks(&layout);
            let mut numbers = |len: usize| -> Vec<f32> { (0..len).map(|_| word() as f32 / 1e6 - 8.0).collect() };
            let (scales, mins) = (numbers(subs * LANES), numbers(subs * LANES));
            let prefetch = Prefetch::new(bytes.as_ptr());
            let k_tile = KTile { layout: &layout, bytes: &bytes, prefetch, scales: &scales, mins: &mins };
            for simd in levels() {
                for first in (0..layout.k_tile).step_by(64) {
                    let mut out = vec![0.0; 64 * LANES];
                    simd.decode(&k_tile, first, 64, &mut out);
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
    fn every_level_reads_dense_values_at_any_address() {
        let mut word = words(13);
        let values: Vec<f32> = (0..37).map(|_| word() as f32 / 1e6 - 8.0).chain([1e-7, f32::INFINITY]).collect();
        for dtype in DType::ALL {
            for (simd, shift) in levels().flat_map(|simd| (0..4).map(move |shift| (simd, shift))) {
                let bytes = [vec![0; shift], dtype.encode(&values)].concat();
                let mut out = vec![0.0; values.len()];
                simd.to_f32(dtype, &bytes[shift..], &mut out);
                assert_eq!(out, dtype.decode(&bytes[shift..]), "{dtype} shifted by {shift}, {:?}", simd.level());
            }
        }
    }

    /// Formats whose codes are integers of eight bits.
    fn integer_formats() -> impl Iterator<Item = (PackedLayout, Quantization)> {
        Format::all().filter_map(|format| {
            let layout = PackedLayout::new(format, PackClass::Simd16).expect("a layout");
            Quantization::new(format, format.activation_block()).map(|how| (layout, how))
        })
    }

    #[test]
    fn every_level_reads_the_scales_that_a_format_describes() {
        for format in Format::all().filter(|format| !matches!(format.encoding, Encoding::Plain(_))) {
            let layout = PackedLayout::new(format, PackClass::Simd16).expect("a layout");
            let mut word = words(5);
            // Bytes below 0x70 make no infinities and no NaN of any type.
            let bytes: Vec<u8> = (0..layout.k_tile_bytes).map(|_| word() as u8 % 0x70).collect();
            let scales = Scales::new(&layout);
            let subs = format.block_len / format.sub_block;
            for simd in levels() {
                let mut out = vec![0.0; scales.count() * LANES];
                let mut mins = out.clone();
                simd.unpack_scales(&layout, &scales, &bytes, &mut out, &mut mins);
                let mut without_mins = vec![0.0; out.len()];
                simd.unpack_scales(&layout, &scales, &bytes, &mut without_mins, &mut []);
                assert_eq!(without_mins, out, "{format} {:?}", simd.level());
                for row in 0..LANES {
                    for block in 0..layout.k_tile / format.block_len {
                        let records = format.scale_planes.iter().enumerate().flat_map(|(p, plane)| {
                            let len = plane.bytes * format.block_len / plane.span;
                            layout.records(&bytes, 1, row, 0, p)[block * len..(block + 1) * len].to_vec()
                        });
                        let mut expected = vec![SubScale::default(); subs];
                        format.sub_scales.read(&records.collect::<Vec<_>>(), &mut expected);
                        for (sub, expected) in expected.into_iter().enumerate() {
                            let at = (block * subs + sub) * LANES + row;
                            let got = SubScale { scale: out[at], min: mins[at] };
                            assert_eq!(got, expected, "{format} {:?} row {row} sub-block {sub}", simd.level());
                        }
                    }
                }
            }
        }
    }

    /// Tokens with large, small and no values, and one with what is not finite.
    fn tokens(columns: usize) -> Vec<f32> {
        let mut word = words(9);
        let mut token = |size: f32| -> Vec<f32> {
            (0..columns).map(|i| size * (word() as f32 / (1 << 23) as f32 - 1.0) * (1 + i / 32 % 3) as f32).collect()
        };
        let mut all = [token(1.0), token(3e37), token(1e-39), token(0.0), token(5.0)].concat();
        all[4 * columns + 70] = f32::NEG_INFINITY;
        all
    }

    #[test]
    fn every_level_quantizes_as_the_model_does() {
        for (layout, how) in integer_formats() {
            let columns = 512;
            for (token, values) in tokens(columns).chunks_exact(columns).enumerate() {
                let model = QuantizedActivations::new(values, how.block, how.span);
                for simd in levels() {
                    let how = simd.quantization(how);
                    let row = how.row(columns);
                    let mut out = vec![0; row.words];
                    simd.quantize(&how, values, &mut out);
                    for block in 0..columns / how.block {
                        let factor = f32::from_bits(out[row.factors + block]);
                        let scale = model.scales[block];
                        assert!(factor == scale || (factor.is_nan() && scale.is_nan()), "{factor} {scale}");
                        if scale.is_nan() {
                            continue;
                        }
                        for column in block * how.block..(block + 1) * how.block {
                            let byte = kernel::VALUE_BYTE[column % 4];
                            let byte_of = |first: usize| (out[first + column / 4] >> (8 * byte)) as u8;
                            let code = match (how.magnitudes, byte_of(0)) {
                                (false, code) => code as i8,
                                (true, magnitude) if byte_of(row.flips) == 0x80 => magnitude as i8,
                                (true, magnitude) => {
                                    assert_eq!(byte_of(row.flips), 0x7f, "{} token {token}", layout.format());
                                    -(magnitude as i8)
                                }
                            };
                            assert_eq!(code, model.codes[column], "{} token {token} {column}", layout.format());
                        }
                        for span in block * how.block / how.span..(block + 1) * how.block / how.span {
                            let codes = &model.codes[span * how.span..(span + 1) * how.span];
                            let sum: i32 = codes.iter().map(|&code| i32::from(code)).sum();
                            let negative: i32 = codes.iter().map(|&code| i32::from(code).min(0)).sum();
                            let expected = match how.offset {
                                _ if how.magnitudes => -negative as u32,
                                Some(offset) => (-offset * sum) as u32,
                                None if how.block > how.span => (sum as f32).to_bits(),
                                None => model.sums[span].to_bits(),
                            };
                            assert_eq!(out[row.sums + span], expected, "{} token {token}", layout.format());
                        }
                    }
                }
            }
        }
    }

    /// Values of tokens, quantized in groups.
    fn quantized(simd: &Simd, how: &Quantization, values: &[f32], columns: usize, unpacked: bool) -> Vec<u32> {
        let row = how.row(columns);
        let mut x = Vec::new();
        let mut rows = values.chunks_exact(columns).map(|values| {
            let mut words = vec![0; row.words];
            simd.quantize(how, values, &mut words);
            words
        });
        for group in simd.token_groups(unpacked, values.len() / columns) {
            let group: Vec<_> = rows.by_ref().take(group).collect();
            x.extend((0..row.words).flat_map(|word| group.iter().map(move |row| row[word])));
        }
        x
    }

    #[test]
    fn products_of_codes_are_those_of_their_values() {
        const TOKENS: usize = 27;
        const K_TILES: usize = 2;
        const TILES_AT_ONCE: usize = 3;
        for (layout, how) in integer_formats() {
            let (encoding, columns) = (layout.format().encoding, K_TILES * layout.k_tile);
            let mut word = words(21);
            // The largest codes and the smallest ones, for accumulators of 16 bits have room for no more.
            let bytes = K_TILES * layout.k_tile_bytes;
            let k_tiles = [(0..bytes).map(|_| word() as u8).collect(), vec![0xff; bytes], vec![0; bytes]];
            let subs = columns / how.sub_block * LANES;
            let mut numbers = |len| -> Vec<f32> { (0..len).map(|_| word() as f32 / (1 << 23) as f32 - 1.0).collect() };
            let [scales, mins] = [(); 2].map(|()| [(); TILES_AT_ONCE].map(|()| numbers(subs)));
            let mut values = numbers(TOKENS * columns);
            values[..columns].fill(1.0);
            values[columns..2 * columns].fill(-1.0);
            for simd in levels() {
                let how = simd.quantization(how);
                let unpacked = k_tiles.each_ref().map(|k_tiles| {
                    let mut codes = vec![0; columns * LANES];
                    simd.unpack_codes(&how, &layout, k_tiles, &mut codes);
                    codes
                });
                let sums_of = |values: &[f32], unpacks: bool| {
                    let x = quantized(simd, &how, values, columns, unpacks);
                    let tiles = std::array::from_fn::<_, TILES_AT_ONCE, _>(|tile| Tile {
                        codes: if unpacks { &unpacked[tile] } else { &k_tiles[tile] },
                        prefetch: Prefetch::default(),
                        scales: &scales[tile],
                        mins: &mins[tile],
                    });
                    let at = Operands {
                        how: &how,
                        layout: &layout,
                        unpacked: unpacks,
                        tiles: &tiles,
                        prefetch_bytes: 0,
                        records: None,
                        x: &x,
                        row: how.row(columns),
                    };
                    let tokens = values.len() / columns;
                    let mut sums = vec![1.0; tokens * BLOCK_ROWS];
                    simd.multiply_codes(tokens, &at, &mut sums);
                    sums
                };
                let single: Vec<f32> = values.chunks_exact(columns).flat_map(|values| sums_of(values, false)).collect();
                for tokens in 1..=TOKENS {
                    for unpacks in [false, true] {
                        let sums = sums_of(&values[..tokens * columns], unpacks);
                        let what = format!("{:?}, {tokens} tokens, unpacks: {unpacks}", simd.level());
                        assert_eq!(sums, single[..tokens * BLOCK_ROWS], "{} {what}", layout.format());
                    }
                }
                for (i, &got) in single.iter().enumerate() {
                    let (token, tile, lane) = (i / BLOCK_ROWS, i % BLOCK_ROWS / LANES, i % LANES);
                    if tile >= k_tiles.len() {
                        assert_eq!(got, 1.0, "only the tiles' sums are written");
                        continue;
                    }
                    let values = &values[token * columns..][..columns];
                    let values = QuantizedActivations::new(values, how.block, how.block).dequantize(columns);
                    let product = |column: usize| {
                        let number = encoding.number(layout.code_at(&k_tiles[tile], K_TILES, lane, column));
                        let offset = match encoding {
                            Encoding::IntOffset { offset } => offset as f32,
                            _ => 0.0,
                        };
                        let sub = column / how.sub_block * LANES + lane;
                        let min = if how.offset.is_some() { 0.0 } else { mins[tile][sub] };
                        let weight = f64::from(scales[tile][sub]) * f64::from(number - offset) + f64::from(min);
                        weight * f64::from(values[column])
                    };
                    let (sum, size) = (0..columns).map(product).fold((1.0, 1.0), |(s, a), p| (s + p, a + p.abs()));
                    assert!((f64::from(got) - sum).abs() <= 1e-6 * size, "{} {got} for {sum}", layout.format());
                }
            }
        }
    }

    #[test]
    fn kernels_unpack_scales_as_is_done_before_them() {
        for (layout, how) in integer_formats() {
            // Not a multiple of what is unpacked at once.
            let k_tiles = SCALED_COLUMNS / layout.k_tile + 1;
            let columns = k_tiles * layout.k_tile;
            let mut word = words(17);
            let tile: Vec<u8> = (0..k_tiles * layout.k_tile_bytes).map(|_| word() as u8).collect();
            let values: Vec<f32> = (0..3 * columns).map(|_| word() as f32 / (1 << 23) as f32 - 1.0).collect();
            let records = Scales::new(&layout);
            let subs = columns / how.sub_block * LANES;
            for simd in levels() {
                let how = simd.quantization(how);
                let (mut scales, mut mins) = (vec![0.0; subs], vec![0.0; subs]);
                simd.unpack_scales(&layout, &records, &tile, &mut scales, &mut mins);
                let x = quantized(simd, &how, &values, columns, false);
                let sums_of = |records, scales, mins| {
                    let tiles = [Tile { codes: &tile, prefetch: Prefetch::default(), scales, mins }];
                    let row = how.row(columns);
                    let (how, layout) = (&how, &layout);
                    let at = Operands {
                        how,
                        layout,
                        unpacked: false,
                        tiles: &tiles,
                        prefetch_bytes: 0,
                        records,
                        x: &x,
                        row,
                    };
                    let mut sums = vec![1.0; 3 * BLOCK_ROWS];
                    simd.multiply_codes(3, &at, &mut sums);
                    // Records of any bits hold NaN, too.
                    sums.into_iter().map(|sum| if sum.is_nan() { 0 } else { sum.to_bits() }).collect::<Vec<_>>()
                };
                let (before, within) = (sums_of(None, &scales, &mins), sums_of(Some(&records), &[], &[]));
                assert_eq!(before, within, "{} {:?}", layout.format(), simd.level());
                assert!(before.iter().any(|&sum| sum != 0), "{} has sums", layout.format());
            }
        }
    }

    #[test]
    fn every_format_of_integers_has_kernels() {
        for format in Format::all() {
            let integers = match format.encoding {
                Encoding::Plain(_) | Encoding::E4M3 | Encoding::E5M2 => false,
                Encoding::IntOffset { .. } | Encoding::IntAffine | Encoding::IntZero | Encoding::Codebook(_) => true,
            };
            let quantization = Quantization::new(format, format.activation_block());
            assert_eq!(quantization.is_some(), integers, "{format}");
            if let Some(how) = quantization {
                let shapes = [CodeShape::ALL[how.shapes[0]], CodeShape::ALL[CodeShape::PACKED + how.shapes[1]]];
                assert_eq!(shapes.map(CodeShape::is_centered), [how.offset == Some(128); 2], "{format}");
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
        for simd in levels() {
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
