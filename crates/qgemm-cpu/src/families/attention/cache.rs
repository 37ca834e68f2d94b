//! Keys or values in memory, and tiles of them in f32.

use qgemm_hal::op::attention::{KV_BLOCK, KV_SCALE_BYTES, MOST_HEAD_DIM};
use qgemm_hal::{CheckedAttention, HalError, KvFormat, KvRows, Paging};

use super::keys::Place;
use crate::operand::absent;
use crate::simd::{KvRow, Prefetch, Simd, TILE_KEYS, readable};

/// A row of an absent key, in any format.
static ZEROS: [u8; MOST_HEAD_DIM * size_of::<f32>()] = [0; _];

/// First elements of the rows of a tile, of the first head, or [`ABSENT`].
pub(super) type TileRows = [usize; TILE_KEYS];

/// No row: a key past the last, or on no valid page.
const ABSENT: usize = usize::MAX;

/// Keys or values in memory.
pub(super) struct Cache<'a> {
    bytes: &'a [u8],
    /// Block scales; empty if the format has none.
    scales: &'a [u8],
    layout: KvRows,
    format: KvFormat,
    columns: usize,
}

impl<'a> Cache<'a> {
    /// # Errors
    /// [`HalError::OutOfBounds`] when the rows exceed `bytes`.
    pub fn new(
        bytes: &'a [u8],
        scales: Option<&'a [u8]>,
        layout: KvRows,
        op: &CheckedAttention,
        format: KvFormat,
        columns: usize,
        what: &'static str,
    ) -> Result<Self, HalError> {
        let Paging { pages, page_size, .. } = op.paging();
        let cache = Self { bytes, scales: scales.unwrap_or_default(), layout, format, columns };
        if pages > 0 && page_size > 0 {
            let end = cache.at(pages - 1, page_size - 1, op.kv_heads - 1) + columns;
            if format.bytes_of(end) > bytes.len() {
                return Err(absent(what, format.bytes_of(end)));
            }
            let of_scales = end / KV_BLOCK * KV_SCALE_BYTES;
            if format.has_scales() && cache.scales.len() < of_scales {
                return Err(absent("the scales", of_scales));
            }
        }
        Ok(cache)
    }

    /// Floats of memory for rows at the end of the operand.
    pub fn staged_len(op: &CheckedAttention) -> usize {
        let bytes = readable(op.kv.k, op.qk_dim).max(readable(op.kv.v, op.v_dim));
        TILE_KEYS * bytes / size_of::<f32>()
    }

    /// First element of a head of a row.
    fn at(&self, page: usize, row: usize, head: usize) -> usize {
        let KvRows { page_stride, rows } = self.layout;
        page * page_stride as usize + row * rows.token_stride as usize + head * rows.head_stride as usize
    }

    /// Rows of the first head at `places`.
    pub fn rows_at(&self, places: &[Place; TILE_KEYS]) -> TileRows {
        places.map(|place| place.map_or(ABSENT, |(page, row)| self.at(page, row, 0)))
    }

    /// Loads keys of a head as `out[feature][key]`, features
    /// [`TILE_KEYS`] apart. Prefetches the next tile.
    /// Absent keys are zeros.
    pub fn load_keys(&self, simd: &Simd, rows: [&[usize]; 2], head: usize, staged: &mut [f32], out: &mut [f32]) {
        simd.load_keys(self.format, &self.rows(rows, head, staged)[..rows[0].len()], self.columns, out);
    }

    /// Loads values of a head as `out[key][feature]`, rows
    /// padded to whole vectors. Prefetches the next tile.
    /// Absent values are zeros.
    pub fn load_values(&self, simd: &Simd, rows: [&[usize]; 2], head: usize, staged: &mut [f32], out: &mut [f32]) {
        simd.load_values(self.format, &self.rows(rows, head, staged)[..rows[0].len()], self.columns, out);
    }

    /// Rows of a tile and of the next one.
    /// Kernels read whole vectors, so rows too close to
    /// the operand's end are copied to `staged`.
    fn rows<'t>(&'t self, [rows, next]: [&[usize]; 2], head: usize, staged: &'t mut [f32]) -> [KvRow<'t>; TILE_KEYS] {
        let of_head = self.at(0, 0, head);
        let bytes = readable(self.format, self.columns);
        let own = self.format.bytes_of(self.columns);
        let absent = KvRow { numbers: &ZEROS, scales: &ZEROS, prefetch: Prefetch::default() };
        let mut out = [absent; TILE_KEYS];
        let staged = bytemuck::cast_slice_mut::<f32, u8>(staged).chunks_exact_mut(bytes);
        for (((row, element), next), staged) in out.iter_mut().zip(rows).zip(next).zip(staged) {
            if *next != ABSENT {
                row.prefetch = Prefetch::new(self.bytes.as_ptr()).skip(self.format.bytes_of(*next + of_head));
            }
            if *element == ABSENT {
                continue;
            }
            let element = *element + of_head;
            let first = self.format.bytes_of(element);
            row.numbers = match self.bytes.get(first..first + bytes) {
                Some(numbers) => numbers,
                None => {
                    staged[..own].copy_from_slice(&self.bytes[first..first + own]);
                    staged[own..].fill(0);
                    staged
                }
            };
            if self.format.has_scales() {
                row.scales = &self.scales[element / KV_BLOCK * KV_SCALE_BYTES..];
            }
        }
        out
    }
}
