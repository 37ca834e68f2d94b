//! Scale unpacking: sub-block scales and minima of a k-tile as
//! f32, sixteen rows at a time.

use qgemm_formats::prepack::{FragmentLayout, PackedLayout, SHARED_ROWS};
use qgemm_formats::{BitField, FloatScale, Format, Minimum, ScaleType, SubCodes};

use super::vector::{LANES, Vector};

/// Layout of the records of sixteen rows.
#[derive(Clone, Copy, Debug, Default)]
enum Width {
    /// One word per row.
    #[default]
    Word,
    /// Two bytes per row.
    Half,
    /// One byte per row.
    Byte,
    /// One word per [`SHARED_ROWS`] rows.
    SharedWord,
}

/// Bit position within the records of every row.
#[derive(Clone, Copy, Debug, Default)]
struct Source {
    /// Byte of the k-tile for the first row.
    at: usize,
    width: Width,
    /// Right shift.
    shift: u32,
}

/// Bit field in the words of all rows: `(word << left >> right) & mask`.
#[derive(Clone, Copy, Debug)]
struct Bits {
    /// First byte of the words in the k-tile.
    at: usize,
    left: u32,
    right: u32,
    mask: u32,
}

/// Integer scales or minima of a block's sub-blocks.
#[derive(Clone, Debug)]
struct Codes {
    /// Fields of four sub-blocks each, which together form a word with one byte each.
    quads: Vec<Vec<Bits>>,
    /// XOR mask of the words.
    flip: u32,
    /// Left shift of an integer.
    shift: u32,
    /// Offset to subtract.
    offset: i32,
}

#[derive(Clone, Debug)]
enum Min {
    Offset(f32),
    Zero(Source),
    Stored(Source, ScaleType),
    Centered(Source, ScaleType, f32),
    Coded(Source, ScaleType, Codes),
    Eighths(Codes),
}

/// Block of a k-tile.
#[derive(Clone, Debug)]
struct Block {
    factor: Option<(Source, ScaleType)>,
    codes: Option<Codes>,
    min: Min,
}

impl Block {
    /// Position of the scale, if it is a plain f16 factor.
    fn half(&self) -> Option<(usize, u32)> {
        match self {
            Self { factor: Some((Source { at, width: Width::Word, shift }, ScaleType::F16)), codes: None, .. } => {
                Some((*at, *shift))
            }
            _ => None,
        }
    }
}

/// Scale positions of a k-tile, from the format's
/// [`SubScales`](qgemm_formats::SubScales) and its layout.
#[derive(Clone, Debug)]
pub struct Scales {
    format: Format,
    blocks: Vec<Block>,
    /// Byte and shift of each block's factor, if scales are plain f16 factors.
    halves: Option<Vec<(usize, u32)>>,
    sub_blocks: usize,
    times: f32,
}

impl Scales {
    /// Scales of `layout`, which must be `Simd16`.
    pub fn new(layout: &PackedLayout) -> Self {
        let format = layout.format();
        let sub_blocks = format.block_len / format.sub_block;
        let block = |block| {
            let place = |float: FloatScale| (source(layout, block, float.offset), float.kind);
            let codes = |codes: SubCodes| Codes {
                quads: codes.fields[..sub_blocks].chunks(4).map(|fields| bits(layout, block, fields)).collect(),
                flip: codes.flip * 0x0101_0101,
                shift: codes.shift,
                offset: codes.offset,
            };
            let records = &format.sub_scales;
            Block {
                factor: records.factor.map(place),
                codes: records.codes.map(codes),
                min: match records.minimum {
                    Minimum::Offset(offset) => Min::Offset(offset as f32),
                    Minimum::Zero(byte) => Min::Zero(source(layout, block, byte)),
                    Minimum::Stored(float) => Min::Stored(source(layout, block, float.offset), float.kind),
                    Minimum::Centered(float, offset) => {
                        Min::Centered(source(layout, block, float.offset), float.kind, offset as f32)
                    }
                    Minimum::Coded(float, minima) => {
                        Min::Coded(source(layout, block, float.offset), float.kind, codes(minima))
                    }
                    Minimum::Eighths(minima) => Min::Eighths(codes(minima)),
                },
            }
        };
        let blocks: Vec<Block> = (0..layout.k_tile / format.block_len).map(block).collect();
        let halves = if sub_blocks == 1 { blocks.iter().map(Block::half).collect() } else { None };
        Self { format, blocks, halves, sub_blocks, times: format.sub_scales.times }
    }

    /// Whether they were made for `layout`. A format has one `Simd16` layout.
    pub fn is_of(&self, layout: &PackedLayout) -> bool {
        layout.class == FragmentLayout::Simd16 && layout.format() == self.format
    }

    /// Sub-blocks per k-tile.
    pub fn count(&self) -> usize {
        self.blocks.len() * self.sub_blocks
    }
}

/// Position of byte `byte` in the records of block `block`.
fn source(layout: &PackedLayout, block: usize, byte: usize) -> Source {
    let format = layout.format();
    let mut before = 0;
    for (plane, place) in format.scale_planes.iter().zip(&layout.scales) {
        let bytes = plane.bytes * format.block_len / plane.span;
        if byte < before + bytes {
            let at = block * bytes + byte - before;
            let shift = |width: usize| (at % width * 8) as u32;
            return match place.row_bytes {
                _ if layout.records_by_words(place) => {
                    Source { at: place.offset + at / 4 * LANES * 4, width: Width::Word, shift: shift(4) }
                }
                4 => Source { at: place.offset, width: Width::SharedWord, shift: shift(4) },
                2 => Source { at: place.offset, width: Width::Half, shift: shift(2) },
                1 => Source { at: place.offset, width: Width::Byte, shift: 0 },
                bytes => unreachable!("{format} has records of {bytes} bytes a row"),
            };
        }
        before += bytes;
    }
    unreachable!("{format} has {before} bytes of records, and describes byte {byte}")
}

/// Fields that form the integers of some sub-blocks, as bytes of a word. Fields with
/// equal distance from their bytes in the same word move together.
fn bits(layout: &PackedLayout, block: usize, fields: &[[BitField; 2]]) -> Vec<Bits> {
    let mut all: Vec<Bits> = Vec::new();
    for (byte, &[low, high]) in fields.iter().enumerate() {
        for (field, first) in [(low, 8 * byte as u32), (high, 8 * byte as u32 + u32::from(low.bits))] {
            if field.bits == 0 {
                continue;
            }
            let place = source(layout, block, field.byte.into());
            assert!(matches!(place.width, Width::Word), "{}'s integers lie in words of rows", layout.format());
            let shift = place.shift + u32::from(field.shift);
            let (left, right) = (first.saturating_sub(shift), shift.saturating_sub(first));
            let mask = ((1 << field.bits) - 1) << first;
            match all.iter_mut().find(|bits| (bits.at, bits.left, bits.right) == (place.at, left, right)) {
                Some(bits) => bits.mask |= mask,
                None => all.push(Bits { at: place.at, left, right, mask }),
            }
        }
    }
    all
}

/// Unpacks scale and minimum of every sub-block in consecutive k-tiles, to
/// `[sub-block][lane]`. No minima if `mins` is empty.
///
/// # Safety
/// As for the functions of [`Vector`]. `scales` belong to `layout`, and
/// the k-tiles are whole. `out` and a non-empty `mins` have [`Scales::count`]
/// times [`LANES`] floats each.
#[inline(always)]
pub unsafe fn unpack<V: Vector>(
    scales: &Scales,
    layout: &PackedLayout,
    k_tiles: &[u8],
    out: &mut [f32],
    mins: &mut [f32],
) {
    if let (Some(halves), true) = (&scales.halves, mins.is_empty()) {
        // SAFETY: the caller's promise.
        return unsafe { unpack_halves::<V>(halves, scales.times, layout, k_tiles, out) };
    }
    let (floats, mut out, mut mins, mut rest) = (scales.sub_blocks * LANES, out, mins, k_tiles);
    // Not `chunks`: its division costs as much as a block.
    while rest.len() >= layout.k_tile_bytes {
        let (k_tile, others) = rest.split_at(layout.k_tile_bytes);
        rest = others;
        for block in &scales.blocks {
            let (of_block, other_scales) = std::mem::take(&mut out).split_at_mut(floats);
            out = other_scales;
            // SAFETY: the caller's promise.
            unsafe {
                let factor = match block.factor {
                    // A dispatch in `float` would cost more than this most frequent case.
                    Some((at @ Source { width: Width::Word, .. }, ScaleType::F16)) => {
                        float::<V>(k_tile, Source { width: Width::Word, ..at }, ScaleType::F16)
                    }
                    Some((at, kind)) => float::<V>(k_tile, at, kind),
                    None => V::splat(1.0),
                };
                let factor = V::multiply(factor, V::splat(scales.times));
                match &block.codes {
                    Some(codes) => integers::<V>(k_tile, codes, factor, of_block),
                    None => V::store(of_block.as_mut_ptr(), factor),
                }
                if !mins.is_empty() {
                    let (mins_of_block, other_mins) = std::mem::take(&mut mins).split_at_mut(floats);
                    mins = other_mins;
                    unpack_mins::<V>(block, k_tile, of_block, mins_of_block);
                }
            }
        }
    }
}

/// [`unpack`] for plain f16 factors, a frequent case. The general dispatch per block
/// costs more than the work.
///
/// # Safety
/// As for [`unpack`].
#[inline(always)]
unsafe fn unpack_halves<V: Vector>(
    halves: &[(usize, u32)],
    times: f32,
    layout: &PackedLayout,
    k_tiles: &[u8],
    out: &mut [f32],
) {
    let (mut rest, mut out) = (k_tiles, out.as_mut_ptr());
    // SAFETY: the caller's promise: `out` has a vector for each block of each k-tile.
    unsafe {
        let times = V::splat(times);
        while rest.len() >= layout.k_tile_bytes {
            for &(at, shift) in halves {
                let words = V::and(V::shift_right(V::load_words(rest.as_ptr().add(at)), shift), 0xffff);
                V::store(out, V::multiply(V::half_bits_to_floats(words), times));
                out = out.add(LANES);
            }
            rest = rest.get_unchecked(layout.k_tile_bytes..);
        }
    }
}

/// Minima of the sub-blocks of `block`, with scales `scales`.
///
/// # Safety
/// As for [`unpack`].
#[inline(always)]
unsafe fn unpack_mins<V: Vector>(block: &Block, k_tile: &[u8], scales: &[f32], mins: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut scaled = |factor: V::Floats| {
            for (scale, min) in scales.chunks_exact(LANES).zip(mins.chunks_exact_mut(LANES)) {
                V::store(min.as_mut_ptr(), V::multiply(V::load(scale.as_ptr()), factor));
            }
        };
        match &block.min {
            Min::Offset(offset) => scaled(V::splat(-offset)),
            Min::Zero(zero) => {
                let zero = V::to_floats(V::and(load::<V>(k_tile, *zero), 0xff));
                scaled(V::multiply(zero, V::splat(-1.0)));
            }
            Min::Stored(at, kind) => V::store(mins.as_mut_ptr(), float::<V>(k_tile, *at, *kind)),
            Min::Centered(at, kind, offset) => {
                let stored = float::<V>(k_tile, *at, *kind);
                for (scale, min) in scales.chunks_exact(LANES).zip(mins.chunks_exact_mut(LANES)) {
                    let scale = V::load(scale.as_ptr());
                    V::store(min.as_mut_ptr(), V::multiply_add(scale, V::splat(-offset), stored));
                }
            }
            Min::Coded(at, kind, codes) => {
                let factor = V::multiply(float::<V>(k_tile, *at, *kind), V::splat(-1.0));
                integers::<V>(k_tile, codes, factor, mins);
            }
            Min::Eighths(codes) => {
                integers::<V>(k_tile, codes, V::splat(-0.125), mins);
                for (scale, min) in scales.chunks_exact(LANES).zip(mins.chunks_exact_mut(LANES)) {
                    V::store(min.as_mut_ptr(), V::multiply(V::load(scale.as_ptr()), V::load(min.as_ptr())));
                }
            }
        }
    }
}

/// Integers of all sub-blocks times `factor`.
///
/// # Safety
/// As for [`unpack`].
#[inline(always)]
unsafe fn integers<V: Vector>(k_tile: &[u8], codes: &Codes, factor: V::Floats, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        let offset = V::splat_word(codes.offset.wrapping_neg() as u32);
        for (quad, out) in codes.quads.iter().zip(out.chunks_exact_mut(4 * LANES)) {
            let mut words = V::splat_word(codes.flip);
            for bits in quad {
                let from = V::load_words(k_tile.as_ptr().add(bits.at));
                let moved = V::shift_right(V::shift_left(from, bits.left), bits.right);
                words = V::xor(words, V::and(moved, bits.mask));
            }
            for (i, out) in out.chunks_exact_mut(LANES).enumerate() {
                let code = V::and(V::shift_right(words, 8 * i as u32), 0xff);
                let integer = V::add(V::shift_left(code, codes.shift), offset);
                V::store(out.as_mut_ptr(), V::multiply(factor, V::to_floats(integer)));
            }
        }
    }
}

/// # Safety
/// As for [`unpack`].
#[inline(always)]
unsafe fn load<V: Vector>(k_tile: &[u8], from: Source) -> V::Words {
    // SAFETY: the caller's promise.
    unsafe {
        let at = k_tile.as_ptr().add(from.at);
        let words = match from.width {
            Width::Word => V::load_words(at),
            Width::Half => V::load_halves(at),
            Width::Byte => V::load_bytes(at),
            Width::SharedWord => {
                let word = |row: usize| at.add(row / SHARED_ROWS * 4).cast::<[u8; 4]>().read();
                let words: [[u8; 4]; LANES] = std::array::from_fn(word);
                V::load_words(words.as_ptr().cast())
            }
        };
        V::shift_right(words, from.shift)
    }
}

/// # Safety
/// As for [`unpack`].
#[inline(always)]
unsafe fn float<V: Vector>(k_tile: &[u8], at: Source, kind: ScaleType) -> V::Floats {
    // SAFETY: the caller's promise.
    unsafe {
        let words = load::<V>(k_tile, at);
        match kind {
            ScaleType::F32 => V::bits_to_floats(words),
            ScaleType::F16 => V::half_bits_to_floats(V::and(words, 0xffff)),
            ScaleType::E4M3 => super::kernel::e4m3::<V>(V::and(words, 0xff)),
            ScaleType::E8M0 => {
                // Two factors, both normal numbers.
                let exponent = V::and(words, 0xff);
                let lower = V::shift_right(exponent, 1);
                let upper = V::shift_right(V::add(exponent, V::splat_word(1)), 1);
                let power =
                    |exponent, bias| V::bits_to_floats(V::shift_left(V::add(exponent, V::splat_word(bias)), 23));
                let number = V::multiply(power(lower, 64), power(upper, 63));
                // The NaN code yields infinity, and infinity times 0 is NaN.
                V::multiply_add(number, V::splat(0.0), number)
            }
        }
    }
}
