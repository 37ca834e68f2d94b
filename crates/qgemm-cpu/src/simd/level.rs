//! `level!`: the kernels of a SIMD level, compiled for its instructions.

/// Defines the kernels of a level. For f32: tiles per kernel
/// for each number of tokens, so that all accumulators are in
/// registers. For packed codes: the supported numbers of tokens. For
/// unpacked codes: tiles for each number of tokens. For attention: vectors
/// of four rows that are accumulated at once.
macro_rules! level {
    ($name:ident, $level:expr, $vector:ty, $dot:ty, $($features:literal,)?
     [$($tokens:literal => $tiles:literal),*], packed [$($packed:literal),*],
     unpacked [$($unpacked:literal => $unpacked_tiles:literal),*], attention $attention:literal) => {
        pub static $name: Simd = Simd {
            level: $level,
            magnitudes: <$dot as crate::simd::vector::Dot<$vector>>::MAGNITUDES,
            decode,
            unpack,
            to_f32,
            quantize,
            finish,
            match_keys,
            load_keys,
            load_values,
            add_products,
            scale_scores,
            exponentials,
            are_finite,
            moments,
            normalize,
            add,
            recur,
            gate,
            convolve,
            multiply: &[$(multiply::<$tiles, $tokens>),*],
            unpack_codes: crate::simd::of_shapes!(unpack_codes []; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21),
            multiply_codes: [
                &[$(($packed, &crate::simd::of_shapes!(
                    multiply_codes [1, $packed]; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21
                ))),*],
                &[$(($unpacked, &crate::simd::of_shapes!(
                    multiply_codes [$unpacked_tiles, $unpacked]; 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36
                ))),*],
            ],
        };

        /// # Safety
        /// As for `kernel::decode`.
        $(#[target_feature(enable = $features)])?
        unsafe fn decode(k_tile: &crate::simd::KTile<'_>, first: usize, columns: usize, out: &mut [f32]) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::kernel::decode::<$vector>(k_tile, first, columns, out) }
        }

        /// # Safety
        /// As for `scales::unpack`.
        $(#[target_feature(enable = $features)])?
        unsafe fn unpack(
            scales: &crate::simd::Scales,
            layout: &qgemm_formats::prepack::PackedLayout,
            k_tiles: &[u8],
            out: &mut [f32],
            mins: &mut [f32],
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::scales::unpack::<$vector>(scales, layout, k_tiles, out, mins) }
        }

        /// # Safety
        /// As for `dense::to_f32`.
        $(#[target_feature(enable = $features)])?
        unsafe fn to_f32(dtype: qgemm_formats::DType, bytes: &[u8], out: &mut [f32]) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::dense::to_f32::<$vector>(dtype, bytes, out) }
        }

        /// # Safety
        /// The CPU must support the level's instructions.
        $(#[target_feature(enable = $features)])?
        unsafe fn quantize(how: &crate::simd::Quantization, values: &[f32], out: &mut [u32]) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::quantize::quantize::<$vector>(how, values, out) }
        }

        /// # Safety
        /// As for `epilogue::finish`.
        $(#[target_feature(enable = $features)])?
        unsafe fn finish(
            how: &crate::simd::Epilogue<'_>,
            token: &crate::simd::OfToken<'_>,
            sums: &mut crate::simd::OfRows,
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::epilogue::finish::<$vector>(how, token, sums) }
        }

        /// # Safety
        /// As for `indexer::match_keys`.
        $(#[target_feature(enable = $features)])?
        unsafe fn match_keys(q: &[f32], k: &[f32], width: usize, out: &mut [f32]) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::indexer::match_keys::<$vector>(q, k, width, out) }
        }

        /// # Safety
        /// As for `attention::exponentials`.
        $(#[target_feature(enable = $features)])?
        unsafe fn exponentials(scores: &mut [f32], most: f32) -> f32 {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::attention::exponentials::<$vector>(scores, most) }
        }

        /// # Safety
        /// As for `kv_tile::load_keys`.
        $(#[target_feature(enable = $features)])?
        unsafe fn load_keys(
            format: qgemm_hal::KvFormat,
            rows: &[crate::simd::KvRow<'_>],
            features: usize,
            out: &mut [f32],
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::kv_tile::load_keys::<$vector>(format, rows, features, out) }
        }

        /// # Safety
        /// As for `kv_tile::load_values`.
        $(#[target_feature(enable = $features)])?
        unsafe fn load_values(
            format: qgemm_hal::KvFormat,
            rows: &[crate::simd::KvRow<'_>],
            features: usize,
            out: &mut [f32],
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::kv_tile::load_values::<$vector>(format, rows, features, out) }
        }

        /// # Safety
        /// As for `attention::add_products`.
        $(#[target_feature(enable = $features)])?
        unsafe fn add_products(
            extent: crate::simd::Extent,
            a: crate::simd::Panel<'_>,
            b: crate::simd::Panel<'_>,
            sums: &mut [f32],
            stride: usize,
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::attention::add_products::<$vector, $attention>(extent, a, b, sums, stride) }
        }

        /// # Safety
        /// As for `attention::scale_scores`.
        $(#[target_feature(enable = $features)])?
        unsafe fn scale_scores(scores: &mut [f32], scale: f32, most: f32) -> f32 {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::attention::scale_scores::<$vector>(scores, scale, most) }
        }

        /// # Safety
        /// As for `attention::are_finite`.
        $(#[target_feature(enable = $features)])?
        unsafe fn are_finite(values: &[f32]) -> bool {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::attention::are_finite::<$vector>(values) }
        }

        /// # Safety
        /// As for `norm::moments`.
        $(#[target_feature(enable = $features)])?
        unsafe fn moments(values: &[f32], scale: f32, mean: f32) -> [f32; 2] {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::norm::moments::<$vector>(values, scale, mean) }
        }

        /// # Safety
        /// As for `norm::normalize`.
        $(#[target_feature(enable = $features)])?
        unsafe fn normalize(how: &crate::simd::Normalization, gamma: &[f32], beta: &[f32], values: &mut [f32]) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::norm::normalize::<$vector>(how, gamma, beta, values) }
        }

        /// # Safety
        /// As for `norm::add`.
        $(#[target_feature(enable = $features)])?
        unsafe fn add(other: &[f32], values: &mut [f32]) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::norm::add::<$vector>(other, values) }
        }

        /// # Safety
        /// As for `recurrence::recur`.
        $(#[target_feature(enable = $features)])?
        unsafe fn recur(
            token: &crate::simd::Recurrence<'_>,
            values: &[f32],
            states: &mut [f32],
            out: &mut [f32],
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::recurrence::recur::<$vector>(token, values, states, out) }
        }

        /// # Safety
        /// As for `gate::gate`.
        $(#[target_feature(enable = $features)])?
        unsafe fn gate(function: qgemm_hal::GateFunction, z: &[f32], values: &mut [f32]) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::gate::gate::<$vector>(function, z, values) }
        }

        /// # Safety
        /// As for `convolution::convolve`.
        $(#[target_feature(enable = $features)])?
        unsafe fn convolve(taps: &crate::simd::Taps<'_>, inputs: &[f32], out: &mut [f32]) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::convolution::convolve::<$vector>(taps, inputs, out) }
        }

        /// # Safety
        /// As for `kernel::multiply`.
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply<const P: usize, const T: usize>(
            w: &[f32],
            x: &[f32],
            stride: usize,
            columns: usize,
            sums: &mut [f32],
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::kernel::multiply::<$vector, P, T>(w, x, stride, columns, sums) }
        }

        /// # Safety
        /// As for `codes::unpack`.
        $(#[target_feature(enable = $features)])?
        unsafe fn unpack_codes<const SHAPE: usize>(
            layout: &qgemm_formats::prepack::PackedLayout,
            k_tiles: &[u8],
            out: &mut [u8],
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::codes::unpack::<$vector, SHAPE>(layout, k_tiles, out) }
        }

        /// # Safety
        /// As for `dot::multiply_codes`.
        $(#[target_feature(enable = $features)])?
        unsafe fn multiply_codes<const SHAPE: usize, const P: usize, const T: usize>(
            at: &crate::simd::Operands<'_>,
            sums: &mut [f32],
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { crate::simd::dot::multiply_codes::<$vector, $dot, SHAPE, P, T>(at, unpack, sums) }
        }
    };
}
pub(super) use level;

/// A kernel for each of these code shapes, with
/// this many tiles and tokens.
///
/// Hundreds of products take minutes to compile. `tests/simd` has their
/// tests, and unit tests have one kernel for all shapes.
macro_rules! of_shapes {
    ($kernel:ident []; $($shape:literal)*) => { [$($kernel::<$shape>),*] };
    ($kernel:ident [$tiles:literal, $tokens:literal]; $($shape:literal)*) => {
        [$($kernel::<{ if cfg!(test) { 0 } else { $shape } }, $tiles, $tokens>),*]
    };
}
pub(super) use of_shapes;
