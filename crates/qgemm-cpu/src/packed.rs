//! A weight packed for vectors (`Simd16`): its k-tiles and unpacked scales.

use qgemm_formats::prepack::PackedLayout;

use crate::simd::{KTile, LANES, Prefetch, Scales, Simd, scaled_sub_blocks};

/// K-tiles between the one that is decoded to f32 and the
/// prefetched one. Tiles are read in turns, which hardware prefetchers do
/// not follow. A larger distance would evict lines from the L1
/// cache, because the row pitch is a multiple of its ways.
const PREFETCH_DISTANCE: usize = 1;

/// A packed weight.
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    layout: &'a PackedLayout,
    scales: &'a Scales,
    bytes: &'a [u8],
    k_tiles: usize,
}

impl<'a> Packed<'a> {
    /// The weight in `bytes`, with `k_tiles` k-tiles per row;
    /// `scales` are those of `layout`.
    pub fn new(layout: &'a PackedLayout, scales: &'a Scales, bytes: &'a [u8], k_tiles: usize) -> Self {
        Self { layout, scales, bytes, k_tiles }
    }

    /// Its layout.
    pub fn layout(&self) -> &'a PackedLayout {
        self.layout
    }

    /// Locations of the scales in its k-tiles.
    pub fn scales(&self) -> &'a Scales {
        self.scales
    }

    /// K-tiles of a row.
    pub fn k_tiles(&self) -> usize {
        self.k_tiles
    }

    /// Scales and minimums of a k-tile of `layout`; 0
    /// for unquantized types.
    pub fn scale_floats_of(layout: &PackedLayout) -> usize {
        2 * scaled_sub_blocks(layout) * LANES
    }

    /// `count` k-tiles of tile `tile` from `k_tile` on.
    pub fn run_of_k_tiles(&self, tile: usize, k_tile: usize, count: usize) -> &'a [u8] {
        let k_tile_bytes = self.layout.k_tile_bytes;
        let first = (tile * self.k_tiles + k_tile) * k_tile_bytes;
        &self.bytes[first..first + count * k_tile_bytes]
    }

    /// K-tile `k_tile` of tile `tile`, with scales and minimums
    /// unpacked to the caller's memory.
    pub fn k_tile<'s>(
        &'s self,
        simd: &Simd,
        tile: usize,
        k_tile: usize,
        scales: &'s mut [f32],
        mins: &'s mut [f32],
    ) -> KTile<'s> {
        let bytes = self.run_of_k_tiles(tile, k_tile, 1);
        let prefetch = Prefetch::new(bytes.as_ptr()).skip(PREFETCH_DISTANCE * self.layout.k_tile_bytes);
        simd.unpack_scales(self.layout, self.scales, bytes, scales, mins);
        KTile { layout: self.layout, bytes, prefetch, scales, mins }
    }

    /// Unpacks scale and minimum of every sub-block of `k_tiles`; no
    /// minimums when `mins` is empty.
    pub fn unpack_scales(&self, simd: &Simd, k_tiles: &[u8], scales: &mut [f32], mins: &mut [f32]) {
        simd.unpack_scales(self.layout, self.scales, k_tiles, scales, mins);
    }
}
