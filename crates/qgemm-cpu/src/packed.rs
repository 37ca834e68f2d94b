//! A weight as it is packed for vectors (class R): its slabs, and their scales as numbers.

use qgemm_formats::prepack::PackedLayout;

use crate::simd::{Ahead, LANES, Scales, Simd, Slab, scaled_sub_blocks};

/// Slabs of a tile that are brought from memory ahead of the one that is decoded to f32: tiles are read in turns, which processors do
/// not foresee. More would drive one another out of the nearest cache, since rows are apart by multiples of its ways.
const AHEAD: usize = 1;

/// A packed weight.
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    layout: &'a PackedLayout,
    scales: &'a Scales,
    bytes: &'a [u8],
    k_slabs: usize,
}

impl<'a> Packed<'a> {
    /// The weight in `bytes`, whose rows have `k_slabs` slabs; `scales` are those of `layout`.
    pub fn new(layout: &'a PackedLayout, scales: &'a Scales, bytes: &'a [u8], k_slabs: usize) -> Self {
        Self { layout, scales, bytes, k_slabs }
    }

    /// Its layout.
    pub fn layout(&self) -> &'a PackedLayout {
        self.layout
    }

    /// Where scales are in its slabs.
    pub fn scales(&self) -> &'a Scales {
        self.scales
    }

    /// Slabs of a row.
    pub fn k_slabs(&self) -> usize {
        self.k_slabs
    }

    /// Scales and minima of a slab, none of plain types.
    pub fn scale_floats(&self) -> usize {
        2 * scaled_sub_blocks(self.layout) * LANES
    }

    /// `count` slabs of tile `tile` from `slab` on.
    pub fn slabs(&self, tile: usize, slab: usize, count: usize) -> &'a [u8] {
        let slab_bytes = self.layout.slab_bytes;
        let first = (tile * self.k_slabs + slab) * slab_bytes;
        &self.bytes[first..first + count * slab_bytes]
    }

    /// Slab `slab` of tile `tile`, with the scales and minima of its sub-blocks in memory of the caller's.
    pub fn slab<'s>(
        &'s self,
        simd: &Simd,
        tile: usize,
        slab: usize,
        scales: &'s mut [f32],
        mins: &'s mut [f32],
    ) -> Slab<'s> {
        let bytes = self.slabs(tile, slab, 1);
        let ahead = Ahead::new(bytes.as_ptr()).skip(AHEAD * self.layout.slab_bytes);
        simd.unpack_scales(self.layout, self.scales, bytes, scales, mins);
        Slab { layout: self.layout, bytes, ahead, scales, mins }
    }

    /// Scale and minimum of every sub-block of `slabs` as numbers; no minima where `mins` is empty.
    pub fn unpack_scales(&self, simd: &Simd, slabs: &[u8], scales: &mut [f32], mins: &mut [f32]) {
        simd.unpack_scales(self.layout, self.scales, slabs, scales, mins);
    }
}
