//! A weight as it is packed for vectors (class R): its slabs, and their scales as numbers.

use half::f16;
use half::slice::HalfFloatSliceExt;
use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{Encoding, SubScale};

use crate::simd::{LANES, Slab, scaled_sub_blocks};

/// Most bytes of a block's records, and most sub-blocks of a block.
const MOST_RECORDS: usize = 32;
const MOST_SUB_BLOCKS: usize = 16;

/// A packed weight.
#[derive(Clone, Copy, Debug)]
pub struct Packed<'a> {
    layout: &'a PackedLayout,
    bytes: &'a [u8],
    k_slabs: usize,
}

impl<'a> Packed<'a> {
    /// The weight in `bytes`, whose rows have `k_slabs` slabs.
    pub fn new(layout: &'a PackedLayout, bytes: &'a [u8], k_slabs: usize) -> Self {
        Self { layout, bytes, k_slabs }
    }

    /// Its layout.
    pub fn layout(&self) -> &'a PackedLayout {
        self.layout
    }

    /// Slabs of a row.
    pub fn k_slabs(&self) -> usize {
        self.k_slabs
    }

    /// Floats of scratch memory that [`Packed::slab`] fills.
    pub fn scale_floats(&self) -> usize {
        2 * scaled_sub_blocks(self.layout) * LANES
    }

    /// Slab `slab` of tile `tile`, with its scales in `scratch`.
    pub fn slab<'s>(&'s self, tile: usize, slab: usize, scratch: &'s mut [f32]) -> Slab<'s> {
        let start = (tile * self.k_slabs + slab) * self.layout.slab_bytes;
        let bytes = &self.bytes[start..start + self.layout.slab_bytes];
        let (scales, mins) = scratch.split_at_mut(self.scale_floats() / 2);
        if !scales.is_empty() && !self.halves(bytes, scales, mins) {
            self.records(tile, slab, scales, mins);
        }
        Slab { layout: self.layout, bytes, scales, mins }
    }

    /// Blocks with an f16 scale, or an f16 scale and minimum, and nothing else, which lie row after row: all at once. False
    /// for others.
    fn halves(&self, bytes: &[u8], scales: &mut [f32], mins: &mut [f32]) -> bool {
        let format = self.layout.format();
        let offset = match format.encoding {
            Encoding::IntOffset { offset } => offset as f32,
            Encoding::Codebook(_) | Encoding::IntAffine => 0.0,
            _ => return false,
        };
        let [plane] = format.scale_planes else { return false };
        let subs = self.layout.slab_k / format.block_len;
        let each = if format.encoding == Encoding::IntAffine { 2 } else { 1 };
        if plane.bytes != 2 * each || format.sub_block != format.block_len || plane.rows != 1 {
            return false;
        }
        let records = &bytes[self.layout.scales[0].offset..][..LANES * subs * 2 * each];
        let Ok(halves) = bytemuck::try_cast_slice::<u8, f16>(records) else { return false };
        let mut numbers = [0.0; LANES * 8];
        let Some(numbers) = numbers.get_mut(..halves.len()) else { return false };
        halves.convert_to_f32_slice(numbers);
        for (row, numbers) in numbers.chunks_exact(subs * each).enumerate() {
            for (sub, numbers) in numbers.chunks_exact(each).enumerate() {
                scales[sub * LANES + row] = numbers[0];
                mins[sub * LANES + row] = if each == 2 { numbers[1] } else { -offset * numbers[0] };
            }
        }
        true
    }

    /// The scales of any format, a row and block after the other.
    fn records(&self, tile: usize, slab: usize, scales: &mut [f32], mins: &mut [f32]) {
        let format = self.layout.format();
        let subs = format.block_len / format.sub_block;
        let blocks = self.layout.slab_k / format.block_len;
        for row in 0..LANES {
            for block in 0..blocks {
                let mut records = [0; MOST_RECORDS];
                let mut end = 0;
                for plane in 0..format.scale_planes.len() {
                    let all = self.layout.scales_at(self.bytes, self.k_slabs, tile * LANES + row, slab, plane);
                    let len = all.len() / blocks;
                    records[end..end + len].copy_from_slice(&all[block * len..(block + 1) * len]);
                    end += len;
                }
                let mut numbers = [SubScale::default(); MOST_SUB_BLOCKS];
                (format.sub_scales)(&records[..end], &mut numbers[..subs]);
                for (sub, SubScale { scale, min }) in numbers[..subs].iter().enumerate() {
                    let at = (block * subs + sub) * LANES + row;
                    (scales[at], mins[at]) = (*scale, *min);
                }
            }
        }
    }
}
