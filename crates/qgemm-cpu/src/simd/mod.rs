//! SIMD kernels on sixteen rows at a time: decoding of
//! packed weights to f32 and products with a few tokens;
//! products of packed codes with a few quantized tokens.
//! One file for each level.

mod activation;
mod attention;
mod checked;
mod codes;
mod convolution;
mod dense;
mod dot;
mod epilogue;
mod gate;
mod indexer;
mod kernel;
mod kv_tile;
mod level;
mod norm;
mod portable;
mod prefetch;
mod quantize;
mod recurrence;
mod scales;
mod vector;

#[cfg(all(feature = "simd", target_arch = "x86_64"))]
mod avx2;
#[cfg(all(feature = "simd", target_arch = "x86_64"))]
mod avx512;
#[cfg(all(feature = "simd", target_arch = "aarch64"))]
mod neon;

use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{DType, Encoding};
use qgemm_hal::{GateFunction, KvFormat, SimdLevel};

use level::{level, of_shapes};

pub use attention::{Extent, Panel};
pub use codes::CodeShape;
pub use convolution::Taps;
pub use dot::{Operands, SCALED_COLUMNS, Tile};
pub use epilogue::{Epilogue, OfRows, OfToken};
pub use kv_tile::{KvRow, TILE_KEYS, readable};
pub use norm::Normalization;
pub use prefetch::Prefetch;
pub use quantize::{Quantization, Row};
pub use recurrence::Recurrence;
pub use scales::Scales;
pub use vector::{LANES, VALUE_BYTE};

/// Tiles of sixteen rows that are processed together.
pub const TILES: usize = 4;
/// Rows of these tiles, and accumulators of a token.
pub const BLOCK_ROWS: usize = TILES * LANES;

/// A packed k-tile of a tile with unpacked scales.
#[derive(Clone, Copy, Debug)]
pub struct KTile<'a> {
    /// Its `Simd16` layout.
    pub layout: &'a PackedLayout,
    /// The k-tile.
    pub bytes: &'a [u8],
    /// The block to prefetch: one line for each line decoded, because
    /// a core that requests many at once stalls.
    pub prefetch: Prefetch,
    /// `[sub-block][lane]`; empty for unquantized types.
    pub scales: &'a [f32],
    /// Minimums, `[sub-block][lane]`.
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
/// [`epilogue::finish`] of a level.
type Finish = unsafe fn(how: &Epilogue<'_>, token: &OfToken<'_>, sums: &mut OfRows);
/// [`kernel::multiply`] of a level, for a fixed number of tokens.
type Multiply = unsafe fn(w: &[f32], x: &[f32], stride: usize, columns: usize, sums: &mut [f32]);
/// [`codes::unpack`] of a level, for a shape of packed codes.
type UnpackCodes = unsafe fn(layout: &PackedLayout, k_tiles: &[u8], out: &mut [u8]);
/// [`dot::multiply_codes`] of a level, for a fixed number of
/// tokens and shape of codes.
type MultiplyCodes = unsafe fn(at: &Operands<'_>, sums: &mut [f32]);

/// [`indexer::match_keys`] of a level.
type MatchKeys = unsafe fn(q: &[f32], k: &[f32], width: usize, out: &mut [f32]);
/// [`attention::exponentials`] of a level.
type Exponentials = unsafe fn(scores: &mut [f32], most: f32) -> f32;
/// [`attention::add_products`] of a level.
type AddProducts = unsafe fn(extent: Extent, a: Panel<'_>, b: Panel<'_>, sums: &mut [f32], stride: usize);
/// [`attention::scale_scores`] of a level.
type ScaleScores = unsafe fn(scores: &mut [f32], scale: f32, most: f32) -> f32;
/// [`attention::are_finite`] of a level.
type AreFinite = unsafe fn(values: &[f32]) -> bool;
/// [`kv_tile::load_keys`] or [`kv_tile::load_values`] of a level.
type LoadTile = unsafe fn(format: KvFormat, rows: &[KvRow<'_>], features: usize, out: &mut [f32]);

/// [`norm::moments`] of a level.
type Moments = unsafe fn(values: &[f32], scale: f32, mean: f32) -> [f32; 2];
/// [`norm::normalize`] of a level.
type Normalize = unsafe fn(how: &Normalization, gamma: &[f32], beta: &[f32], values: &mut [f32]);
/// [`norm::add`] of a level.
type Add = unsafe fn(other: &[f32], values: &mut [f32]);
/// [`recurrence::recur`] of a level.
type Recur = unsafe fn(token: &Recurrence<'_>, values: &[f32], states: &mut [f32], out: &mut [f32]);
/// [`gate::gate`] of a level.
type Gate = unsafe fn(function: GateFunction, z: &[f32], values: &mut [f32]);
/// [`convolution::convolve`] of a level.
type Convolve = unsafe fn(taps: &Taps<'_>, inputs: &[f32], out: &mut [f32]);

/// The kernels of one level.
#[derive(Debug)]
pub struct Simd {
    level: SimdLevel,
    /// Whether products of codes with an offset of 128 use
    /// magnitudes of the tokens.
    magnitudes: bool,
    decode: Decode,
    unpack: Unpack,
    to_f32: ToF32,
    quantize: Quantize,
    finish: Finish,
    match_keys: MatchKeys,
    load_keys: LoadTile,
    load_values: LoadTile,
    add_products: AddProducts,
    scale_scores: ScaleScores,
    exponentials: Exponentials,
    are_finite: AreFinite,
    moments: Moments,
    normalize: Normalize,
    add: Add,
    recur: Recur,
    gate: Gate,
    convolve: Convolve,
    /// For one token, for two, ….
    multiply: &'static [Multiply],
    /// For every shape of packed codes.
    unpack_codes: [UnpackCodes; CodeShape::PACKED],
    /// For packed and for unpacked codes: kernels for every shape, for
    /// some numbers of quantized tokens in ascending order from one.
    multiply_codes: [&'static [(usize, &'static [MultiplyCodes])]; 2],
}

/// Sub-blocks of a k-tile that have scales; 0 for unquantized types.
pub fn scaled_sub_blocks(layout: &PackedLayout) -> usize {
    match layout.format().encoding {
        Encoding::Plain(_) => 0,
        _ => layout.k_tile / layout.format().sub_block,
    }
}
