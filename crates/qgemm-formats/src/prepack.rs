//! Packed weight layouts in fragment order: a lane's codes
//! are consecutive words.
//!
//! A weight is cut into *tiles* of 16 (`MmaM16`, `Simd16`) or 32
//! (`MmaM8N8K4`) rows. A tile is cut along K into *k-tiles* of one
//! block, or 64 columns if a block is shorter. K-tiles of a tile are
//! contiguous, so a warp streams contiguous memory. A k-tile has its
//! code planes and then its scale planes:
//!
//! ```text
//! k-tile = plane 0 | plane 1 | … | scale plane 0 | scale plane 1 | … | padding to 16 bytes
//! code plane  = [word][lane 0..32][16 bytes]        (or 4 or 8 bytes where a lane has no more; `Simd16`: 16 lanes, 4 bytes)
//! scale plane = [row][records of the k-tile, along K] (rows in the order 0, 8, 1, 9, … for `MmaM16`)
//!             = [word][row][4 bytes] in `Simd16`, where the records of a row are whole words
//! ```
//!
//! A scale that covers many rows (128×128 blocks) has one record per
//! eight rows, in row order. Eight is the run of a gated pair, which
//! interleaves eight rows of one weight with eight of the other.
//!
//! The codes of a lane form a stream of *quads*, four
//! values of one row each.
//!
//! - `MmaM16`: lane `l` has `g = l / 4` and `t = l % 4`. Per 64 columns
//!   it holds four quads of row `g`, then four of row `g + 8`.
//!   Quad `s` has columns `16 s + {2t, 2t+1, 2t+8, 2t+9}`. These are
//!   the A registers of `mma.m16n8k16` (PTX ISA, "Matrix Fragments
//!   for mma.m16n8k16").
//! - `MmaM8N8K4`: lane `l` holds row `l`, columns in order.
//!   These are the A registers of `mma.m8n8k4` when each of its four
//!   products takes other rows.
//! - `Simd16`: each of 16 lanes holds one row, columns in order.
//!   One vector register is a word of 16 rows, which a CPU multiplies
//!   with one element of X. On a GPU, neighbouring invocations read
//!   neighbouring words.
//!
//! In a quad, values are the bytes of a word in the order
//! `v0 v2 v1 v3`. A plane of `b` bits stacks `8 / b` quads in the same
//! word. `word >> b·q & mask` then yields quad `q` as four bytes, for
//! integer instructions. A 16-bit mask yields the pairs `(v0, v1)` and,
//! 8 bits up, `(v2, v3)`, for f16x2 instructions.

use rayon::prelude::*;

use crate::desc::Format;
use crate::weight::HostWeight;

/// Layout class, by the instructions that read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FragmentLayout {
    /// Canonical rows of blocks, as in the file.
    Canonical,
    /// All 16-row matrix instructions (Turing and newer).
    MmaM16,
    /// Volta's `mma.m8n8k4`.
    MmaM8N8K4,
    /// Vectors of 32-bit lanes, one row per lane: CPUs,
    /// and GPUs through wgpu.
    Simd16,
}

/// Rows per record, for formats whose scales cover more than one row.
pub const SHARED_ROWS: usize = 8;

/// Values in a quad.
pub(crate) const QUAD: usize = 4;
/// Byte of value `i` of a quad within a word.
const QUAD_BYTE: [usize; QUAD] = [0, 2, 1, 3];

/// Lanes that share the words of a k-tile.
const fn lanes(class: FragmentLayout) -> usize {
    match class {
        FragmentLayout::Simd16 => 16,
        FragmentLayout::MmaM16 | FragmentLayout::MmaM8N8K4 | FragmentLayout::Canonical => 32,
    }
}

/// Position of a code plane in a k-tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodePlaneLayout {
    /// Width of the plane in bits.
    pub bits: usize,
    /// Byte offset in the k-tile.
    pub offset: usize,
    /// Bytes per access of a lane: 4 in `Simd16`, else 16, or the lane's
    /// whole share if smaller.
    pub word_bytes: usize,
    /// Number of accesses of a lane.
    pub words: usize,
}

impl CodePlaneLayout {
    /// First bit of value `i` of `quad`, among all bits
    /// of the plane in a lane.
    pub fn lane_bit(&self, quad: usize, i: usize) -> usize {
        match self.bits {
            16 | 32 => (quad * QUAD + i) * self.bits,
            bits => {
                let per_word = 8 / bits;
                quad / per_word * 32 + 8 * QUAD_BYTE[i] + bits * (quad % per_word)
            }
        }
    }
}

/// Position of a scale plane in a k-tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScalePlaneLayout {
    /// Byte offset in the k-tile.
    pub offset: usize,
    /// Bytes of the records of one row.
    pub row_bytes: usize,
    /// Consecutive rows per record: 1, or [`SHARED_ROWS`]
    /// (128×128 block scales).
    pub rows: usize,
}

/// Geometry of a packed weight.
#[derive(Clone, Debug, PartialEq)]
pub struct PackedLayout {
    /// Layout class, never [`FragmentLayout::Canonical`].
    pub class: FragmentLayout,
    /// Rows in a tile.
    pub tile_rows: usize,
    /// Columns in a k-tile.
    pub k_tile: usize,
    /// Bytes of a k-tile.
    pub k_tile_bytes: usize,
    /// Code planes, in the order of the description.
    pub codes: Vec<CodePlaneLayout>,
    /// Scale planes, in the order of the description.
    pub scales: Vec<ScalePlaneLayout>,
    format: Format,
}

impl PackedLayout {
    /// Layout of `format` in `class`. `None` for
    /// [`FragmentLayout::Canonical`], which has no k-tiles.
    pub fn new(format: Format, class: FragmentLayout) -> Option<Self> {
        let tile_rows = match class {
            FragmentLayout::Canonical => return None,
            FragmentLayout::MmaM16 | FragmentLayout::Simd16 => 16,
            FragmentLayout::MmaM8N8K4 => 32,
        };
        let lanes = lanes(class);
        // 64 columns are a cache line of f16 activations per token.
        let k_tile = 64.max(format.block_len);
        let mut offset = 0;
        let mut codes = Vec::new();
        for &bits in format.code_planes {
            let bits = usize::from(bits);
            let lane_bytes = tile_rows * k_tile / lanes * bits / 8;
            let word_bytes = if class == FragmentLayout::Simd16 { 4 } else { lane_bytes.min(16) };
            codes.push(CodePlaneLayout { bits, offset, word_bytes, words: lane_bytes / word_bytes });
            offset += lane_bytes * lanes;
        }
        let mut scales = Vec::new();
        for plane in format.scale_planes {
            let row_bytes = plane.bytes * k_tile / plane.span;
            let rows = if plane.rows >= SHARED_ROWS { SHARED_ROWS } else { 1 };
            scales.push(ScalePlaneLayout { offset, row_bytes, rows });
            // Planes are 16-byte aligned, so that records can
            // be read in wide words.
            offset = (offset + row_bytes * tile_rows / rows).next_multiple_of(16);
        }
        Some(Self { class, tile_rows, k_tile, k_tile_bytes: offset.next_multiple_of(16), codes, scales, format })
    }

    /// Weight format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Tiles of `n` rows. The last one is zero-padded.
    pub fn n_tiles(&self, n: usize) -> usize {
        n.div_ceil(self.tile_rows)
    }

    /// K-tiles of `stored_k` columns. The last one is zero-padded.
    pub fn k_tiles(&self, stored_k: usize) -> usize {
        stored_k.div_ceil(self.k_tile)
    }

    /// Size of a whole weight in bytes.
    pub fn bytes(&self, n: usize, stored_k: usize) -> usize {
        self.n_tiles(n) * self.k_tiles(stored_k) * self.k_tile_bytes
    }

    /// Row of the tile and column of the k-tile, for value `i` of
    /// quad `quad` of `lane`.
    pub fn position(&self, lane: usize, quad: usize, i: usize) -> (usize, usize) {
        match self.class {
            FragmentLayout::MmaM8N8K4 | FragmentLayout::Simd16 => (lane, quad * QUAD + i),
            FragmentLayout::MmaM16 | FragmentLayout::Canonical => {
                let (g, t) = (lane / 4, lane % 4);
                let (chunk, half, step) = (quad / 8, quad / 4 % 2, quad % 4);
                (g + 8 * half, chunk * 64 + step * 16 + 2 * t + [0, 1, 8, 9][i])
            }
        }
    }

    /// Quads per lane in one k-tile.
    pub fn quads(&self) -> usize {
        self.tile_rows * self.k_tile / (lanes(self.class) * QUAD)
    }

    /// Whether the records of a plane are stored by words: in `Simd16`,
    /// if a row's records are whole words.
    pub fn records_by_words(&self, plane: &ScalePlaneLayout) -> bool {
        self.class == FragmentLayout::Simd16 && plane.rows == 1 && plane.row_bytes.is_multiple_of(4)
    }

    /// Byte of the k-tile with byte `i` of the records of tile row `row`.
    fn record_byte_at(&self, plane: &ScalePlaneLayout, row: usize, i: usize) -> usize {
        if self.records_by_words(plane) {
            return plane.offset + (i / 4 * self.tile_rows + row) * 4 + i % 4;
        }
        let record = match self.class {
            _ if plane.rows > 1 => row / plane.rows,
            FragmentLayout::MmaM16 => (row % 8) * 2 + row / 8,
            _ => row,
        };
        plane.offset + record * plane.row_bytes + i
    }

    /// Bit position of value `i` of `quad` in `plane`:
    /// byte offset in the k-tile, and shift. The value lies within the
    /// four bytes at the offset.
    fn code_position(&self, plane: &CodePlaneLayout, lane: usize, quad: usize, i: usize) -> (usize, usize) {
        let bit = plane.lane_bit(quad, i);
        let (byte_in_lane, shift) = (bit / 32 * 4, bit % 32);
        let (word, byte) = (byte_in_lane / plane.word_bytes, byte_in_lane % plane.word_bytes);
        (plane.offset + (word * lanes(self.class) + lane) * plane.word_bytes + byte, shift)
    }

    /// Packs one k-tile from codes `[tile_rows][k_tile]` and scale records
    /// `[row][plane bytes…]`.
    fn pack_k_tile(&self, codes: &[u32], scales: &[Vec<u8>], k_tile: &mut [u8]) {
        match self.class {
            FragmentLayout::Simd16 => self.pack_words_of_rows(codes, k_tile),
            _ => self.pack_words(codes, k_tile),
        }
        let rows = scales.len() / self.scales.len().max(1);
        for (p, plane) in self.scales.iter().enumerate() {
            for row in (0..rows).step_by(plane.rows) {
                for (i, &byte) in scales[row * self.scales.len() + p].iter().enumerate() {
                    k_tile[self.record_byte_at(plane, row, i)] = byte;
                }
            }
        }
    }

    /// Packs the code planes of `Simd16` by whole words: loading
    /// on a CPU waits for it.
    fn pack_words_of_rows(&self, codes: &[u32], k_tile: &mut [u8]) {
        let lanes = lanes(self.class);
        let mut below = 0;
        for plane in &self.codes {
            let mask = if plane.bits == 32 { u32::MAX } else { (1 << plane.bits) - 1 };
            for (lane, codes) in codes.chunks_exact(self.k_tile).enumerate() {
                // Values per word.
                let codes = codes.chunks_exact(32 / plane.bits);
                for (word, codes) in codes.enumerate() {
                    let place =
                        |(i, &code): (usize, &u32)| (code >> below & mask) << plane.lane_bit(i / QUAD, i % QUAD);
                    let value = codes.iter().enumerate().map(place).fold(0, |word, part| word | part);
                    let at = plane.offset + (word * lanes + lane) * 4;
                    k_tile[at..at + 4].copy_from_slice(&value.to_le_bytes());
                }
            }
            below += plane.bits;
        }
    }

    fn pack_words(&self, codes: &[u32], k_tile: &mut [u8]) {
        for lane in 0..lanes(self.class) {
            for quad in 0..self.quads() {
                for i in 0..QUAD {
                    let (row, column) = self.position(lane, quad, i);
                    let mut code = codes[row * self.k_tile + column];
                    for plane in &self.codes {
                        let (at, shift) = self.code_position(plane, lane, quad, i);
                        match plane.bits {
                            32 => k_tile[at..at + 4].copy_from_slice(&code.to_le_bytes()),
                            16 => k_tile[at + shift / 8..][..2].copy_from_slice(&(code as u16).to_le_bytes()),
                            bits => {
                                let part = (code & ((1 << bits) - 1)) as u8;
                                k_tile[at + shift / 8] |= part << (shift % 8);
                                code >>= bits;
                            }
                        }
                    }
                }
            }
        }
    }

    /// Codes and scale records of one k-tile, from canonical rows.
    fn gather(&self, weight: &HostWeight, tile: usize, k_tile: usize) -> (Vec<u32>, Vec<Vec<u8>>) {
        let f = self.format;
        let blocks_per_k_tile = self.k_tile / f.block_len;
        let mut codes = vec![0u32; self.tile_rows * self.k_tile];
        let mut scales = Vec::new();
        let mut block_scales = vec![0u8; f.scale_bytes()];
        for row in 0..self.tile_rows.min(weight.n() - tile * self.tile_rows) {
            let row_blocks = weight.row(tile * self.tile_rows + row);
            let first = scales.len();
            scales.extend(self.scales.iter().map(|p| vec![0u8; p.row_bytes]));
            for b in 0..blocks_per_k_tile {
                let at = (k_tile * blocks_per_k_tile + b) * f.block_bytes;
                let Some(block) = row_blocks.get(at..at + f.block_bytes) else { break };
                let start = row * self.k_tile + b * f.block_len;
                (f.unpack_block)(block, &mut codes[start..start + f.block_len], &mut block_scales);
                let mut from = 0;
                for (p, plane) in f.scale_planes.iter().enumerate() {
                    let len = plane.bytes * f.block_len / plane.span;
                    scales[first + p][b * len..(b + 1) * len].copy_from_slice(&block_scales[from..from + len]);
                    from += len;
                }
            }
        }
        (codes, scales)
    }

    /// Packs a whole weight. Runs on all threads of the current rayon pool.
    pub fn pack(&self, weight: &HostWeight) -> Vec<u8> {
        let k_tiles = self.k_tiles(weight.stored_k());
        let mut out = vec![0u8; self.bytes(weight.n(), weight.stored_k())];
        out.par_chunks_mut(self.k_tile_bytes).enumerate().for_each(|(i, bytes)| {
            let (codes, scales) = self.gather(weight, i / k_tiles, i % k_tiles);
            self.pack_k_tile(&codes, &scales, bytes);
        });
        out
    }

    /// Code at (`row`, `column`) of a packed weight with
    /// `k_tiles` k-tiles per tile.
    ///
    /// It is the inverse of packing, for tests and for
    /// conversion between layouts.
    pub fn code_at(&self, packed: &[u8], k_tiles: usize, row: usize, column: usize) -> u32 {
        let (tile, tile_row) = (row / self.tile_rows, row % self.tile_rows);
        let (k_tile, k_tile_column) = (column / self.k_tile, column % self.k_tile);
        let bytes = &packed[(tile * k_tiles + k_tile) * self.k_tile_bytes..][..self.k_tile_bytes];
        let (lane, quad, i) = self.locate(tile_row, k_tile_column);
        let mut code = 0u32;
        let mut below = 0;
        for plane in &self.codes {
            let (at, shift) = self.code_position(plane, lane, quad, i);
            let part = match plane.bits {
                32 => u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]),
                16 => u32::from(u16::from_le_bytes([bytes[at + shift / 8], bytes[at + shift / 8 + 1]])),
                bits => u32::from(bytes[at + shift / 8] >> (shift % 8)) & ((1 << bits) - 1),
            };
            code |= part << below;
            below += plane.bits;
        }
        code
    }

    /// Records of `plane` for (`row`, `k_tile`) of a packed weight.
    pub fn records(&self, packed: &[u8], k_tiles: usize, row: usize, k_tile: usize, plane: usize) -> Vec<u8> {
        let base = (row / self.tile_rows * k_tiles + k_tile) * self.k_tile_bytes;
        let plane = &self.scales[plane];
        let byte = |i| packed[base + self.record_byte_at(plane, row % self.tile_rows, i)];
        (0..plane.row_bytes).map(byte).collect()
    }

    /// Lane, quad and index within the quad of (`row`, `column`):
    /// the inverse of [`Self::position`].
    fn locate(&self, row: usize, column: usize) -> (usize, usize, usize) {
        match self.class {
            FragmentLayout::MmaM8N8K4 | FragmentLayout::Simd16 => (row, column / QUAD, column % QUAD),
            FragmentLayout::MmaM16 | FragmentLayout::Canonical => {
                let in_step = column % 16;
                let lane = row % 8 * 4 + in_step % 8 / 2;
                let quad = column / 64 * 8 + row / 8 * 4 + column % 64 / 16;
                (lane, quad, in_step % 2 + in_step / 8 * 2)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::sample;

    #[test]
    fn locate_inverts_position() {
        for class in [FragmentLayout::MmaM16, FragmentLayout::MmaM8N8K4, FragmentLayout::Simd16] {
            for format in Format::all() {
                let layout = PackedLayout::new(format, class).expect("a fragment layout");
                for lane in 0..lanes(class) {
                    for quad in 0..layout.quads() {
                        for i in 0..QUAD {
                            let (row, column) = layout.position(lane, quad, i);
                            assert_eq!(layout.locate(row, column), (lane, quad, i), "{format} {class:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn packing_keeps_every_code_and_scale() {
        for class in [FragmentLayout::MmaM16, FragmentLayout::MmaM8N8K4, FragmentLayout::Simd16] {
            for format in Format::all() {
                let layout = PackedLayout::new(format, class).expect("a fragment layout");
                let (n, k) = (layout.tile_rows + 3, format.block_len * 3);
                let weight = sample(format, n, k, 1);
                let packed = layout.pack(&weight);
                let k_tiles = layout.k_tiles(k);
                let mut codes = vec![0u32; format.block_len];
                let mut scales = vec![0u8; format.scale_bytes()];
                for row in 0..n {
                    for block in 0..3 {
                        let bytes = &weight.row(row)[block * format.block_bytes..][..format.block_bytes];
                        (format.unpack_block)(bytes, &mut codes, &mut scales);
                        for (i, &code) in codes.iter().enumerate() {
                            let column = block * format.block_len + i;
                            assert_eq!(layout.code_at(&packed, k_tiles, row, column), code, "{format} {row},{column}");
                        }
                        let per_k_tile = layout.k_tile / format.block_len;
                        let mut from = 0;
                        for (p, plane) in format.scale_planes.iter().enumerate() {
                            let len = plane.bytes * format.block_len / plane.span;
                            if row % layout.scales[p].rows == 0 {
                                let records = layout.records(&packed, k_tiles, row, block / per_k_tile, p);
                                assert_eq!(&records[block % per_k_tile * len..][..len], &scales[from..from + len]);
                            }
                            from += len;
                        }
                    }
                }
            }
        }
    }
}
