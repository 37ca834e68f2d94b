//! A weight as it is packed for vectors (class R): its slabs, and their scales as numbers.

use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{Encoding, SubScale};

use crate::simd::{LANES, Simd, Slab, scaled_sub_blocks};

/// Slabs of a tile that are brought from memory ahead of the one that is decoded. Tiles are read in turns and each slab's
/// scales before its codes, which the processor's own prefetching does not follow.
const AHEAD: usize = 2;

/// Most bytes of a block's records, and most sub-blocks of a block.
const MOST_RECORDS: usize = 32;
const MOST_SUB_BLOCKS: usize = 16;

/// Asks for `bytes` to be brought to the nearest cache.
#[inline]
fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 processor has the instruction, which reads nothing that the program sees.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// The two bytes at `at` of every row's records.
#[inline]
fn halves_at<'a>(rows: impl Iterator<Item = &'a [u8]>, at: usize) -> [u32; LANES] {
    let mut halves = [0; LANES];
    for (half, records) in halves.iter_mut().zip(rows) {
        *half = u32::from(u16::from_le_bytes([records[at], records[at + 1]]));
    }
    halves
}

/// Where the minimum of a block comes from.
#[derive(Clone, Copy)]
enum Minimum {
    /// It is the scale times this, negated.
    Offset(f32),
    /// An f16 after the scale.
    Half,
    /// The scale times a zero point, a byte of the second plane, negated.
    Zero,
}

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
    pub fn slab<'s>(&'s self, simd: &Simd, tile: usize, slab: usize, scratch: &'s mut [f32]) -> Slab<'s> {
        let slab_bytes = self.layout.slab_bytes;
        let start = (tile * self.k_slabs + slab) * slab_bytes;
        let bytes = &self.bytes[start..start + slab_bytes];
        let ahead = (start + AHEAD * slab_bytes).min(self.bytes.len());
        prefetch(&self.bytes[ahead..(ahead + slab_bytes).min(self.bytes.len())]);
        let (scales, mins) = scratch.split_at_mut(self.scale_floats() / 2);
        if !scales.is_empty() && !self.halves(simd, bytes, scales, mins) {
            self.records(tile, slab, scales, mins);
        }
        Slab { layout: self.layout, bytes, scales, mins }
    }

    /// The scales of blocks that begin with one f16 scale for all of their values, sixteen rows at a time. False for others.
    fn halves(&self, simd: &Simd, bytes: &[u8], scales: &mut [f32], mins: &mut [f32]) -> bool {
        let format = self.layout.format();
        let one_scale = format.sub_block == format.block_len && format.scale_planes.iter().all(|p| p.rows == 1);
        let bytes_of = |plane: usize| format.scale_planes.get(plane).map_or(0, |p| p.bytes);
        let minimum = match (format.encoding, bytes_of(0), bytes_of(1)) {
            (Encoding::IntOffset { offset }, 2, 0) => Minimum::Offset(offset as f32),
            (Encoding::Codebook(_), 2, 0) => Minimum::Offset(0.0),
            (Encoding::IntAffine, 4, 0) => Minimum::Half,
            (Encoding::IntZero, 2, 1) => Minimum::Zero,
            _ => return false,
        };
        if !one_scale {
            return false;
        }
        let rows = |plane: usize| {
            let plane = &self.layout.scales[plane];
            bytes[plane.offset..plane.offset + LANES * plane.row_bytes].chunks_exact(plane.row_bytes)
        };
        let outs = scales.as_chunks_mut::<LANES>().0.iter_mut().zip(mins.as_chunks_mut::<LANES>().0);
        for (sub, (scales, mins)) in outs.enumerate() {
            let at = sub * bytes_of(0);
            simd.widen(&halves_at(rows(0), at), scales);
            match minimum {
                Minimum::Offset(offset) => {
                    for (min, scale) in mins.iter_mut().zip(scales) {
                        *min = -offset * *scale;
                    }
                }
                Minimum::Half => simd.widen(&halves_at(rows(0), at + 2), mins),
                Minimum::Zero => {
                    for ((min, scale), zeros) in mins.iter_mut().zip(scales).zip(rows(1)) {
                        *min = -f32::from(zeros[sub]) * *scale;
                    }
                }
            }
        }
        true
    }

    /// The scales of any format, a row and block after the other.
    fn records(&self, tile: usize, slab: usize, scales: &mut [f32], mins: &mut [f32]) {
        let format = self.layout.format();
        let subs = format.block_len / format.sub_block;
        let blocks = self.layout.slab_k / format.block_len;
        let mut joined = [0; MOST_RECORDS];
        let mut numbers = [SubScale::default(); MOST_SUB_BLOCKS];
        for row in 0..LANES {
            for block in 0..blocks {
                let of_plane = |plane: usize| {
                    let all = self.layout.scales_at(self.bytes, self.k_slabs, tile * LANES + row, slab, plane);
                    let len = all.len() / blocks;
                    &all[block * len..(block + 1) * len]
                };
                let records = match format.scale_planes.len() {
                    1 => of_plane(0),
                    planes => join((0..planes).map(of_plane), &mut joined),
                };
                (format.sub_scales)(records, &mut numbers[..subs]);
                for (sub, SubScale { scale, min }) in numbers[..subs].iter().enumerate() {
                    let at = (block * subs + sub) * LANES + row;
                    (scales[at], mins[at]) = (*scale, *min);
                }
            }
        }
    }
}

/// The parts one after another, in `joined`.
fn join<'a, 'j>(parts: impl Iterator<Item = &'a [u8]>, joined: &'j mut [u8]) -> &'j [u8] {
    let mut end = 0;
    for part in parts {
        joined[end..end + part.len()].copy_from_slice(part);
        end += part.len();
    }
    &joined[..end]
}
