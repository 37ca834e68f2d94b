//! Safe wrappers of a level's kernels, which check all accesses.

use qgemm_formats::DType;
use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_hal::op::attention::{KV_BLOCK, KV_SCALE_BYTES};
use qgemm_hal::{GateFunction, KvFormat, SimdLevel};

use super::codes::UNIT;
use super::dot::{LEAST_SUB_BLOCK, SCALED_COLUMNS};
#[cfg(all(feature = "simd", target_arch = "aarch64"))]
use super::neon;
use super::portable;
use super::vector::LANES;
use super::{
    BLOCK_ROWS, Epilogue, Extent, KTile, KvRow, MultiplyCodes, Normalization, OfRows, OfToken, Operands, Panel,
    Quantization, Recurrence, Scales, Simd, TILE_KEYS, Taps, readable, scaled_sub_blocks,
};
#[cfg(all(feature = "simd", target_arch = "x86_64"))]
use super::{avx2, avx512};

impl Simd {
    /// The kernels for `level`, or `None` when this CPU does not
    /// support it or the feature `simd` is off.
    pub fn new(level: SimdLevel) -> Option<&'static Self> {
        if !level.is_available() {
            return None;
        }
        Some(match level {
            SimdLevel::Scalar => &portable::KERNELS,
            #[cfg(all(feature = "simd", target_arch = "aarch64"))]
            SimdLevel::Neon => &neon::KERNELS,
            #[cfg(all(feature = "simd", target_arch = "aarch64"))]
            SimdLevel::NeonDotprod => &neon::dotprod::KERNELS,
            #[cfg(all(feature = "simd", target_arch = "x86_64"))]
            SimdLevel::Avx2 => &avx2::KERNELS,
            #[cfg(all(feature = "simd", target_arch = "x86_64"))]
            SimdLevel::AvxVnni => &avx2::vnni::KERNELS,
            #[cfg(all(feature = "simd", target_arch = "x86_64"))]
            SimdLevel::Avx512 => &avx512::KERNELS,
            #[cfg(all(feature = "simd", target_arch = "x86_64"))]
            SimdLevel::Avx512Vnni => &avx512::vnni::KERNELS,
            _ => return None,
        })
    }

    /// The best kernels of this CPU and build.
    pub fn best() -> &'static Self {
        Self::new(SimdLevel::detect()).unwrap_or(&portable::KERNELS)
    }

    /// The SIMD level.
    pub fn level(&self) -> SimdLevel {
        self.level
    }

    /// Adapts the quantization `how` to this level's kernels.
    pub fn quantization(&self, how: Quantization) -> Quantization {
        how.with_magnitudes(self.magnitudes)
    }

    /// Maximum tokens of a kernel call.
    pub fn tokens(&self) -> usize {
        self.multiply.len()
    }

    /// Maximum quantized tokens of a kernel call, with
    /// packed or unpacked codes.
    pub fn quantized_tokens(&self, unpacked: bool) -> usize {
        self.multiply_codes[usize::from(unpacked)].last().map_or(0, |&(tokens, _)| tokens)
    }

    /// Decodes `columns` columns of `k_tile` from `first` on (both
    /// multiples of 32) to `out[column][lane]`.
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
        // SAFETY: a `Simd` only comes from `new`, which checked that the
        // CPU supports the level. The rest is checked above.
        unsafe { (self.decode)(k_tile, first, columns, out) }
    }

    /// Unpacks scale and minimum of every sub-block of k-tiles of `layout`,
    /// for which `from` was made, to `[sub-block][lane]`. No minimums when
    /// `mins` is empty, and nothing when `scales` is empty, too.
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

    /// The first `out.len()` values of `bytes` as f32.
    /// No alignment is needed.
    ///
    /// # Panics
    /// When `bytes` is shorter than that.
    pub fn to_f32(&self, dtype: DType, bytes: &[u8], out: &mut [f32]) {
        // SAFETY: as in `decode`; the function checks the rest.
        unsafe { (self.to_f32)(dtype, bytes, out) }
    }

    /// Quantizes a token to `out`, with the layout of
    /// [`Row`](super::quantize::Row).
    pub fn quantize(&self, how: &Quantization, values: &[f32], out: &mut [u32]) {
        // SAFETY: as in `decode`; the function itself is safe.
        unsafe { (self.quantize)(how, values, out) }
    }

    /// Epilogue of a token's accumulators for a block of rows. For
    /// a gated pair there are half as many outputs.
    pub fn finish(&self, how: &Epilogue<'_>, token: &OfToken<'_>, sums: &mut OfRows) {
        // SAFETY: as in `decode`; the array types guarantee the lengths.
        unsafe { (self.finish)(how, token, sums) }
    }

    /// `out[row][key] = q[row] · k[key]`, with rows of `width`
    /// columns, which are whole vectors.
    pub fn match_keys(&self, q: &[f32], k: &[f32], width: usize, out: &mut [f32]) {
        assert!(width > 0 && width.is_multiple_of(LANES), "rows are whole vectors");
        assert!(q.len().is_multiple_of(width) && k.len().is_multiple_of(width), "rows are whole");
        assert_eq!(out.len(), q.len() / width * (k.len() / width), "every query has a product with every key");
        // SAFETY: as in `decode`.
        unsafe { (self.match_keys)(q, k, width, out) }
    }

    /// Keys of whole vectors as `out[feature][key]` in f32, features
    /// [`TILE_KEYS`] apart.
    pub fn load_keys(&self, format: KvFormat, rows: &[KvRow<'_>], features: usize, out: &mut [f32]) {
        assert!(rows.len() <= TILE_KEYS && rows.len().is_multiple_of(LANES), "keys are whole vectors of a tile");
        assert!(features.next_multiple_of(8) * TILE_KEYS <= out.len(), "features have their rows");
        check_rows(format, rows, features);
        // SAFETY: as in `decode`.
        unsafe { (self.load_keys)(format, rows, features, out) }
    }

    /// Values as `out[key][feature]` in f32, rows padded to whole vectors.
    pub fn load_values(&self, format: KvFormat, rows: &[KvRow<'_>], features: usize, out: &mut [f32]) {
        assert!(rows.len() * features.next_multiple_of(LANES) <= out.len(), "values have their rows");
        check_rows(format, rows, features);
        // SAFETY: as in `decode`.
        unsafe { (self.load_values)(format, rows, features, out) }
    }

    /// `sums += A · B`, with rows of sums `stride` apart. Each sum adds
    /// its products in the order of the depth.
    pub fn add_products(&self, extent: Extent, a: Panel<'_>, b: Panel<'_>, sums: &mut [f32], stride: usize) {
        let Extent { rows, depth, columns } = extent;
        assert!(columns.is_multiple_of(LANES), "columns are whole vectors");
        let end = |rows: usize, stride: usize, columns: usize| match rows.checked_sub(1) {
            Some(last) if columns > 0 => last * stride + columns,
            _ => 0,
        };
        assert!(end(rows, a.stride, depth) <= a.values.len(), "A lies in its scratch memory");
        assert!(end(depth, b.stride, columns) <= b.values.len(), "B lies in its scratch memory");
        assert!(end(rows, stride, columns) <= sums.len(), "sums lie in their scratch memory");
        // SAFETY: as in `decode`.
        unsafe { (self.add_products)(extent, a, b, sums, stride) }
    }

    /// Multiplies scores by `scale` and returns the largest,
    /// at least `most`. NaN is never the largest.
    pub fn scale_scores(&self, scores: &mut [f32], scale: f32, most: f32) -> f32 {
        assert!(scores.len().is_multiple_of(LANES), "scores are whole vectors");
        // SAFETY: as in `decode`.
        unsafe { (self.scale_scores)(scores, scale, most) }
    }

    /// Whether no value is infinite or NaN.
    pub fn are_finite(&self, values: &[f32]) -> bool {
        assert!(values.len().is_multiple_of(LANES), "values are whole vectors");
        // SAFETY: as in `decode`.
        unsafe { (self.are_finite)(values) }
    }

    /// Replaces every score by `exp(score − most)` and returns their sum.
    /// No score exceeds `most`. NaN makes the sum NaN.
    pub fn exponentials(&self, scores: &mut [f32], most: f32) -> f32 {
        assert!(scores.len().is_multiple_of(LANES), "scores are whole vectors");
        // SAFETY: as in `decode`.
        unsafe { (self.exponentials)(scores, most) }
    }

    /// `[Σ (value · scale − mean), Σ (value · scale − mean)²]`,
    /// in an order that depends on the length only.
    pub fn moments(&self, values: &[f32], scale: f32, mean: f32) -> [f32; 2] {
        // SAFETY: as in `decode`.
        unsafe { (self.moments)(values, scale, mean) }
    }

    /// Normalizes values, then applies `gamma` and `beta` if given.
    pub fn normalize(&self, how: &Normalization, gamma: &[f32], beta: &[f32], values: &mut [f32]) {
        let fits = |of_columns: &[f32]| of_columns.is_empty() || of_columns.len() == values.len();
        assert!(fits(gamma) && fits(beta), "a factor and a summand for each value");
        // SAFETY: as in `decode`.
        unsafe { (self.normalize)(how, gamma, beta, values) }
    }

    /// Adds `other` elementwise.
    pub fn add(&self, other: &[f32], values: &mut [f32]) {
        assert_eq!(other.len(), values.len(), "every value has a counterpart");
        // SAFETY: as in `decode`.
        unsafe { (self.add)(other, values) }
    }

    /// One token of linear attention for rows of a state, one for each
    /// value: see [`recur`](super::recurrence::recur).
    pub fn recur(&self, token: &Recurrence<'_>, values: &[f32], states: &mut [f32], out: &mut [f32]) {
        let width = token.k.len();
        assert!(width > 0 && width.is_multiple_of(LANES) && token.q.len() == width, "rows are whole vectors");
        assert!(token.decay.len() == 1 || token.decay.len() == width, "a decay for all features, or for each");
        assert!(states.len() == values.len() * width && out.len() == values.len(), "every value has a row");
        // SAFETY: as in `decode`.
        unsafe { (self.recur)(token, values, states, out) }
    }

    /// Multiplies `values` by the activation of `z`.
    pub fn gate(&self, function: GateFunction, z: &[f32], values: &mut [f32]) {
        assert_eq!(z.len(), values.len(), "every value has a gate");
        // SAFETY: as in `decode`.
        unsafe { (self.gate)(function, z, values) }
    }

    /// Weighted sums of the rows of inputs from the first on:
    /// one token of a depthwise convolution.
    pub fn convolve(&self, taps: &Taps<'_>, inputs: &[f32], out: &mut [f32]) {
        let Taps { weights, bias, width, pitch, .. } = *taps;
        let end = (width - 1) * pitch + out.len();
        assert!(out.len().is_multiple_of(LANES) && out.len() <= pitch, "channels are whole vectors of a row");
        assert!(end <= weights.len().min(inputs.len()) && out.len() <= bias.len(), "rows lie in scratch memory");
        // SAFETY: as in `decode`.
        unsafe { (self.convolve)(taps, inputs, out) }
    }

    /// `sums[token][row] += Σ w[tile][column][lane] · x[token][column]` for
    /// `tokens` tokens (at most [`Simd::tokens`]) and all tiles of a block.
    /// Rows of `x` are `stride` apart.
    pub fn multiply(&self, tokens: usize, w: &[f32], x: &[f32], stride: usize, columns: usize, sums: &mut [f32]) {
        assert!(BLOCK_ROWS * columns <= w.len(), "tiles lie in their scratch memory");
        assert!((tokens - 1) * stride + columns <= x.len(), "tokens lie in their scratch memory");
        assert!(tokens * BLOCK_ROWS <= sums.len(), "sums lie in their scratch memory");
        // SAFETY: as in `decode`.
        unsafe { (self.multiply[tokens - 1])(w, x, stride, columns, sums) }
    }

    /// Group sizes for `tokens` quantized tokens, with packed
    /// or unpacked codes. A group is multiplied at once, and
    /// its words are interleaved.
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

    /// Unpacks the codes of packed k-tiles of `layout`, for which `how`
    /// is, to bytes: [`LANES`] per column.
    pub fn unpack_codes(&self, how: &Quantization, layout: &PackedLayout, k_tiles: &[u8], out: &mut [u8]) {
        let columns = check_k_tiles(how, layout, k_tiles.len(), layout.k_tile_bytes);
        assert!(columns * LANES <= out.len(), "codes lie in their scratch memory");
        // SAFETY: as in `decode`.
        unsafe { (self.unpack_codes[how.shapes[0]])(layout, k_tiles, out) }
    }

    /// `sums[token][tile][row] += Σ w[tile][column][row] · x[token][column]`
    /// for `tokens` quantized tokens in groups as in [`Simd::token_groups`].
    /// Accumulators of tokens are [`BLOCK_ROWS`] apart.
    pub fn multiply_codes(&self, tokens: usize, at: &Operands<'_>, sums: &mut [f32]) {
        if cfg!(test) {
            unreachable!("unit tests have no kernel for each shape (`of_shapes!`)");
        }
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
                // In parts, because a core that requests much at once stalls.
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

/// Checks that rows of a cache have what kernels read.
fn check_rows(format: KvFormat, rows: &[KvRow<'_>], features: usize) {
    let scales = if format.has_scales() { features / KV_BLOCK * KV_SCALE_BYTES } else { 0 };
    assert!(features.is_multiple_of(format.step()), "features are whole blocks");
    let bytes = readable(format, features);
    let fits = |row: &KvRow<'_>| row.numbers.len() >= bytes && row.scales.len() >= scales;
    assert!(rows.iter().all(fits), "rows have their numbers and scales");
}

/// Columns of the whole k-tiles of `layout` (`k_tile_bytes` each) in
/// `bytes` bytes, if products with them are supported.
fn check_k_tiles(how: &Quantization, layout: &PackedLayout, bytes: usize, k_tile_bytes: usize) -> usize {
    let Quantization { block, span, sub_block, .. } = *how;
    assert!(how.format() == layout.format(), "tokens are quantized for the layout's format");
    assert!(layout.class == FragmentLayout::Simd16 && bytes.is_multiple_of(k_tile_bytes), "k-tiles are whole");
    assert!(block.is_multiple_of(UNIT) && UNIT.is_multiple_of(span), "a block is whole units, a unit whole spans");
    assert!(block.is_power_of_two() && layout.k_tile.is_multiple_of(block), "a k-tile is whole blocks");
    assert!(sub_block.is_power_of_two() && sub_block >= LEAST_SUB_BLOCK, "sub-blocks are found by shifts");
    assert!(SCALED_COLUMNS.is_multiple_of(layout.k_tile), "scales of whole k-tiles are unpacked at once");
    bytes / k_tile_bytes * layout.k_tile
}
