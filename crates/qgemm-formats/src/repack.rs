//! Repacking plan: how words of a packed k-tile follow from canonical bits.
//! Repack kernels are generated from it.
//!
//! Every packed bit is one bit of a block. A word is therefore
//! a sum of masked and shifted *windows*, 32 consecutive bits
//! of a canonical row. Bit positions are found by calling
//! [`FormatDesc::unpack_block`](crate::FormatDesc::unpack_block) with
//! one bit set after another.

use crate::desc::Format;
use crate::prepack::{CodePlaneLayout, FragmentLayout, PackedLayout, QUAD};

/// Window: 32 consecutive bits of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Row in the tile: 0 for the lane's first row, 1 for its second (8
    /// rows further in `MmaM16`).
    pub row: usize,
    /// First bit for lane 0, from the start of the k-tile in the row.
    pub bit: usize,
    /// Bit distance between lanes: lane `l` adds `l % 4` times it
    /// (`MmaM16`; 0 in `MmaM8N8K4`).
    pub lane_bits: usize,
}

/// Move of window bits into a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Window index.
    pub window: usize,
    /// Left shift; negative means right.
    pub shift: i32,
    /// Mask after the shift.
    pub mask: u32,
}

/// Bytes of a scale plane in a block, contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRecords {
    /// First byte in the block.
    pub offset: usize,
    /// Number of bytes.
    pub bytes: usize,
}

/// Plan that makes k-tiles of canonical rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Repacking {
    /// Windows to read.
    pub windows: Vec<Window>,
    /// Moves of every word, by code plane and in the order of a lane's stores.
    pub words: Vec<Vec<Vec<Move>>>,
    /// Records of every scale plane.
    pub records: Vec<BlockRecords>,
    /// Code of all-zero bits (128 for signed bytes). Codes are
    /// XORed with it after moving.
    pub zero_code: u32,
}

impl Repacking {
    /// Plan from rows of blocks to k-tiles of `layout`. `None` when bits are not
    /// simply moved (no current format), or lanes differ in bit positions.
    pub fn new(layout: &PackedLayout) -> Option<Self> {
        let source = BlockSource::probe(layout.format())?;
        let mut below = 0;
        let (mut windows, mut words) = (Vec::new(), Vec::new());
        for plane in &layout.codes {
            words.push(plane_words(layout, &source, plane, below, &mut windows)?);
            below += plane.bits;
        }
        let records = block_records(layout.format(), &source.record_byte)?;
        Some(Self { windows, words, records, zero_code: source.zero_code })
    }
}

/// Source positions of code bits and records in a block.
struct BlockSource {
    /// Bit position by value and bit of the code.
    code_bit: Vec<Vec<usize>>,
    /// Byte position by byte of the records.
    record_byte: Vec<usize>,
    zero_code: u32,
}

impl BlockSource {
    fn probe(format: Format) -> Option<Self> {
        let unpack = |block: &[u8]| {
            let (mut codes, mut scales) = (vec![0; format.block_len], vec![0; format.scale_bytes()]);
            (format.unpack_block)(block, &mut codes, &mut scales);
            (codes, scales)
        };
        let mut block = vec![0; format.block_bytes];
        let (zero_codes, zero_scales) = unpack(&block);
        let zero_code = *zero_codes.first()?;
        if zero_codes.iter().any(|&c| c != zero_code) || zero_scales.iter().any(|&s| s != 0) {
            return None;
        }
        let mut code_bit = vec![vec![None; format.code_bits() as usize]; format.block_len];
        let mut record_byte = vec![None; format.scale_bytes()];
        for bit in 0..format.block_bytes * 8 {
            block[bit / 8] = 1 << (bit % 8);
            let (codes, scales) = unpack(&block);
            block[bit / 8] = 0;
            for (i, code) in codes.iter().enumerate().filter(|(_, code)| **code != zero_code) {
                *code_bit[i].get_mut((code ^ zero_code).ilog2() as usize)? = Some(bit);
            }
            for (i, _) in scales.iter().enumerate().filter(|(_, byte)| **byte == 1 << (bit % 8)) {
                record_byte[i] = Some(bit / 8);
            }
        }
        Some(Self {
            code_bit: code_bit.into_iter().map(|bits| bits.into_iter().collect()).collect::<Option<_>>()?,
            record_byte: record_byte.into_iter().collect::<Option<_>>()?,
            zero_code,
        })
    }
}

/// Bit of a word and its source.
struct BitSource {
    word: usize,
    bit: usize,
    row: usize,
    /// Source bit, from the start of the k-tile in the row.
    from: usize,
}

/// Moves for the words of `plane`, and the windows they need. The lower `below`
/// code bits are in preceding planes.
fn plane_words(
    layout: &PackedLayout,
    source: &BlockSource,
    plane: &CodePlaneLayout,
    below: usize,
    windows: &mut Vec<Window>,
) -> Option<Vec<Vec<Move>>> {
    let lane_bits = lane_bits(layout, source, below)?;
    let mut bits = Vec::new();
    for quad in 0..layout.quads() {
        for i in 0..QUAD {
            for bit in 0..plane.bits {
                let (row, from) = position(layout, source, (0, quad, i), below + bit);
                let to = plane.lane_bit(quad, i) + bit;
                bits.push(BitSource { word: to / 32, bit: to % 32, row: row / 8, from });
            }
        }
    }
    bits.sort_by_key(|b| (b.word, b.row, b.from));
    // Byte-aligned windows can be shared by words that take different bits.
    let granularity = if lane_bits.is_multiple_of(8) { 8 } else { 1 };
    let mut words = vec![Vec::<Move>::new(); layout.quads() * QUAD * plane.bits / 32];
    for BitSource { word, bit, row, from } in bits {
        let covers = |w: &Window| w.row == row && w.lane_bits == lane_bits && (w.bit..w.bit + 32).contains(&from);
        let window = windows.iter().position(covers).unwrap_or_else(|| {
            windows.push(Window { row, bit: from / granularity * granularity, lane_bits });
            windows.len() - 1
        });
        let shift = bit as i32 - (from - windows[window].bit) as i32;
        match words[word].iter_mut().find(|m| m.window == window && m.shift == shift) {
            Some(found) => found.mask |= 1 << bit,
            None => words[word].push(Move { window, shift, mask: 1 << bit }),
        }
    }
    Some(words)
}

/// Source of bit `bit` of a code: tile row, and bit from
/// the start of the k-tile.
fn position(
    layout: &PackedLayout,
    source: &BlockSource,
    (lane, quad, i): (usize, usize, usize),
    bit: usize,
) -> (usize, usize) {
    let format = layout.format();
    let (row, column) = layout.position(lane, quad, i);
    let block = column / format.block_len * format.block_bytes * 8;
    (row, block + source.code_bit[column % format.block_len][bit])
}

/// Bit distance between lanes of one row. `None` when it is not constant.
fn lane_bits(layout: &PackedLayout, source: &BlockSource, bit: usize) -> Option<usize> {
    if layout.class == FragmentLayout::MmaM8N8K4 {
        return Some(0);
    }
    let at = |lane, quad, i| position(layout, source, (lane, quad, i), bit).1;
    let distance = at(1, 0, 0).checked_sub(at(0, 0, 0))?;
    let places = (0..layout.quads()).flat_map(|quad| (0..QUAD).map(move |i| (quad, i)));
    let mut all = places.flat_map(|place| (0..4).map(move |lane| (lane, place)));
    all.all(|(lane, (quad, i))| at(lane, quad, i) == at(0, quad, i) + lane * distance).then_some(distance)
}

/// Position of every scale plane in a block. `None` when a
/// plane is not contiguous.
fn block_records(format: Format, record_byte: &[usize]) -> Option<Vec<BlockRecords>> {
    let mut rest = record_byte;
    let mut records = Vec::new();
    for plane in format.scale_planes {
        let (part, after) = rest.split_at(plane.bytes * format.block_len / plane.span);
        rest = after;
        if part.windows(2).any(|pair| pair[1] != pair[0] + 1) {
            return None;
        }
        records.push(BlockRecords { offset: *part.first()?, bytes: part.len() });
    }
    Some(records)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::sample;

    /// 32 bits of `row` from bit `at`. Bits past the end are 0.
    fn window(row: &[u8], at: usize) -> u32 {
        let byte = |i: usize| u64::from(row.get(at / 8 + i).copied().unwrap_or(0));
        let bytes = (0..5).fold(0, |bits, i| bits | byte(i) << (8 * i));
        (bytes >> (at % 8)) as u32
    }

    #[test]
    fn moved_words_are_those_of_the_packer() {
        for (format, class) in
            Format::all().flat_map(|f| [FragmentLayout::MmaM16, FragmentLayout::MmaM8N8K4].map(|c| (f, c)))
        {
            let layout = PackedLayout::new(format, class).expect("a fragment class");
            let repacking = Repacking::new(&layout).unwrap_or_else(|| panic!("{format} {class:?}"));
            let (n, k) = (layout.tile_rows, 2 * layout.k_tile);
            let weight = sample(format, n, k, 9);
            let packed = layout.pack(&weight);
            let k_tile_row = layout.k_tile / format.block_len * format.block_bytes;
            for (k_tile, lane) in (0..2).flat_map(|s| (0..32).map(move |l| (s, l))) {
                let (rows, within) = match class {
                    FragmentLayout::MmaM8N8K4 => ([lane, lane], 0),
                    _ => ([lane / 4, lane / 4 + 8], lane % 4),
                };
                for (plane, words) in layout.codes.iter().zip(&repacking.words) {
                    for (index, word) in words.iter().enumerate() {
                        let moved = word.iter().fold(0, |all, m| {
                            let Window { row, bit, lane_bits } = repacking.windows[m.window];
                            let bits =
                                window(weight.row(rows[row]), k_tile * k_tile_row * 8 + bit + within * lane_bits);
                            let shifted = if m.shift < 0 { bits >> -m.shift } else { bits << m.shift };
                            all | shifted & m.mask
                        });
                        let flip = if repacking.zero_code == 0 { 0 } else { repacking.zero_code * 0x0101_0101 };
                        let at = plane.offset
                            + (index * 4 / plane.word_bytes * 32 + lane) * plane.word_bytes
                            + index * 4 % plane.word_bytes;
                        let expected = &packed[k_tile * layout.k_tile_bytes + at..][..4];
                        assert_eq!((moved ^ flip).to_le_bytes(), expected, "{format} {class:?} word {index} of {lane}");
                    }
                }
            }
        }
    }

    #[test]
    fn codes_are_flipped_in_whole_bytes_alone() {
        for format in Format::all() {
            let layout = PackedLayout::new(format, FragmentLayout::MmaM16).expect("a fragment class");
            let repacking = Repacking::new(&layout).expect("bits are moved");
            let bytes_of_a_block = format.code_planes == [8] && format.block_len >= 16;
            assert!(repacking.zero_code == 0 || bytes_of_a_block, "{format}");
        }
    }

    #[test]
    fn words_take_few_windows() {
        let layout =
            |name: &str| PackedLayout::new(name.parse().expect("a format"), FragmentLayout::MmaM16).expect("a class");
        let of = |name| Repacking::new(&layout(name)).expect("bits are moved");
        // Both nibbles of a byte belong to one row.
        let q4_k = of("q4_k");
        assert_eq!((q4_k.windows.len(), q4_k.words[0].len()), (32, 16));
        assert!(q4_k.windows.iter().all(|w| w.lane_bits == 16));
        // Both planes of a quad's codes come from one window.
        let int3 = of("int3_g64");
        assert_eq!((int3.windows.len(), int3.words[0].len(), int3.words[1].len()), (8, 2, 1));
        let f32 = of("f32");
        assert_eq!((f32.windows.len(), f32.words[0].len()), (32, 32));
        assert_eq!(f32.words[0][3], [Move { window: 3, shift: 0, mask: u32::MAX }]);
    }
}
