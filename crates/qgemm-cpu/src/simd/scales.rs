//! Scales and minima of a slab's sub-blocks as f32, from its records, sixteen rows at a time.

use qgemm_formats::prepack::{PackClass, PackedLayout, SHARED_ROWS};
use qgemm_formats::{BitField, FloatScale, Format, Minimum, ScaleType, SubCodes};

use super::vector::{LANES, Vector};

/// How the records of sixteen rows lie.
#[derive(Clone, Copy, Debug, Default)]
enum Width {
    /// A word of each row after another.
    #[default]
    Word,
    /// Two bytes of each row.
    Half,
    /// A byte of each row.
    Byte,
    /// A word for every [`SHARED_ROWS`] rows.
    SharedWord,
}

/// Where some bits of the records of every row are.
#[derive(Clone, Copy, Debug, Default)]
struct Source {
    /// Byte of the slab at which those of the first row begin.
    at: usize,
    width: Width,
    /// Bits below them.
    shift: u32,
}

/// Some bits, and others above them.
#[derive(Clone, Copy, Debug, Default)]
struct Code {
    low: Source,
    low_bits: u32,
    high: Source,
    high_bits: u32,
}

#[derive(Clone, Debug)]
struct Codes {
    of_sub_blocks: Vec<Code>,
    flip: u32,
    offset: f32,
}

#[derive(Clone, Debug)]
enum Min {
    Offset(f32),
    Zero(Source),
    Stored(Source, ScaleType),
    Coded(Source, ScaleType, Codes),
}

/// One block of a slab.
#[derive(Clone, Debug)]
struct Block {
    factor: Option<(Source, ScaleType)>,
    codes: Option<Codes>,
    min: Min,
}

/// Where the scales of every sub-block of a slab are: a format's [`SubScales`](qgemm_formats::SubScales) put into the places of
/// its layout.
#[derive(Clone, Debug)]
pub struct Scales {
    format: Format,
    blocks: Vec<Block>,
    sub_blocks: usize,
    times: f32,
}

impl Scales {
    /// The scales of `layout`, of class R.
    pub fn new(layout: &PackedLayout) -> Self {
        let format = layout.format();
        let sub_blocks = format.block_len / format.sub_block;
        let block = |block| {
            let place = |float: FloatScale| (source(layout, block, float.offset), float.kind);
            let codes = |codes: SubCodes| Codes {
                of_sub_blocks: codes.fields[..sub_blocks].iter().map(|&fields| code(layout, block, fields)).collect(),
                flip: codes.flip,
                offset: codes.offset as f32,
            };
            let records = &format.sub_scales;
            Block {
                factor: records.factor.map(place),
                codes: records.codes.map(codes),
                min: match records.minimum {
                    Minimum::Offset(offset) => Min::Offset(offset as f32),
                    Minimum::Zero(byte) => Min::Zero(source(layout, block, byte)),
                    Minimum::Stored(float) => Min::Stored(source(layout, block, float.offset), float.kind),
                    Minimum::Coded(float, minima) => {
                        Min::Coded(source(layout, block, float.offset), float.kind, codes(minima))
                    }
                },
            }
        };
        let blocks = (0..layout.slab_k / format.block_len).map(block).collect();
        Self { format, blocks, sub_blocks, times: format.sub_scales.times }
    }

    /// Whether they were made for `layout`: of class R, a format has one.
    pub fn is_of(&self, layout: &PackedLayout) -> bool {
        layout.class == PackClass::R && layout.format() == self.format
    }

    /// Sub-blocks of a slab.
    pub fn count(&self) -> usize {
        self.blocks.len() * self.sub_blocks
    }
}

/// Where byte `byte` of the records of block `block` of a slab is.
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

fn code(layout: &PackedLayout, block: usize, [low, high]: [BitField; 2]) -> Code {
    let place = |field: BitField| {
        if field.bits == 0 {
            return Source::default();
        }
        let place = source(layout, block, field.byte.into());
        Source { shift: place.shift + u32::from(field.shift), ..place }
    };
    Code { low: place(low), low_bits: low.bits.into(), high: place(high), high_bits: high.bits.into() }
}

/// Scale and minimum of every sub-block of `slab`, to `[sub-block][lane]`.
///
/// # Safety
/// As of [`Vector`]'s functions; `scales` were made for the layout of `slab`, which is whole, and `out` and `mins` have
/// [`Scales::count`] times [`LANES`] floats.
#[inline(always)]
pub unsafe fn unpack<V: Vector>(scales: &Scales, slab: &[u8], out: &mut [f32], mins: &mut [f32]) {
    let (mut out, mut mins) = (out.as_mut_ptr(), mins.as_mut_ptr());
    // SAFETY: the caller's promise.
    unsafe {
        for block in &scales.blocks {
            let factor = match block.factor {
                Some((at, kind)) => float::<V>(slab, at, kind),
                None => V::splat(1.0),
            };
            let factor = V::multiply(factor, V::splat(scales.times));
            let min_factor = match block.min {
                Min::Offset(offset) => V::splat(-offset),
                Min::Zero(zero) => V::multiply(V::to_floats(V::and(load::<V>(slab, zero), 0xff)), V::splat(-1.0)),
                Min::Stored(at, kind) => float::<V>(slab, at, kind),
                Min::Coded(at, kind, _) => V::multiply(float::<V>(slab, at, kind), V::splat(-1.0)),
            };
            for sub in 0..scales.sub_blocks {
                let scale = match &block.codes {
                    Some(codes) => V::multiply(factor, integer::<V>(slab, codes, sub)),
                    None => factor,
                };
                let min = match &block.min {
                    Min::Offset(_) | Min::Zero(_) => V::multiply(scale, min_factor),
                    Min::Stored(..) => min_factor,
                    Min::Coded(.., codes) => V::multiply(min_factor, integer::<V>(slab, codes, sub)),
                };
                V::store(out, scale);
                V::store(mins, min);
                (out, mins) = (out.add(LANES), mins.add(LANES));
            }
        }
    }
}

/// # Safety
/// As of [`unpack`].
#[inline(always)]
unsafe fn load<V: Vector>(slab: &[u8], from: Source) -> V::Words {
    // SAFETY: the caller's promise.
    unsafe {
        let at = slab.as_ptr().add(from.at);
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
/// As of [`unpack`].
#[inline(always)]
unsafe fn float<V: Vector>(slab: &[u8], at: Source, kind: ScaleType) -> V::Floats {
    // SAFETY: the caller's promise.
    unsafe {
        let words = load::<V>(slab, at);
        match kind {
            ScaleType::F32 => V::bits_to_floats(words),
            ScaleType::F16 => V::half_bits_to_floats(V::and(words, 0xffff)),
            ScaleType::E4M3 => super::kernel::e4m3::<V>(V::and(words, 0xff)),
            ScaleType::E8M0 => {
                // In two factors, both of them normal numbers.
                let exponent = V::and(words, 0xff);
                let lower = V::shift_right(exponent, 1);
                let upper = V::shift_right(V::add(exponent, V::splat_word(1)), 1);
                let power =
                    |exponent, bias| V::bits_to_floats(V::shift_left(V::add(exponent, V::splat_word(bias)), 23));
                V::multiply(power(lower, 64), power(upper, 63))
            }
        }
    }
}

/// # Safety
/// As of [`unpack`].
#[inline(always)]
unsafe fn integer<V: Vector>(slab: &[u8], codes: &Codes, sub: usize) -> V::Floats {
    let code = codes.of_sub_blocks[sub];
    // SAFETY: the caller's promise.
    unsafe {
        let mut words = V::and(load::<V>(slab, code.low), (1 << code.low_bits) - 1);
        if code.high_bits > 0 {
            let high = V::and(load::<V>(slab, code.high), (1 << code.high_bits) - 1);
            words = V::or(words, V::shift_left(high, code.low_bits));
        }
        let number = V::to_floats(V::xor(words, V::splat_word(codes.flip)));
        V::multiply_add(number, V::splat(1.0), V::splat(-codes.offset))
    }
}
