//! Sub-block scales as data: [`SubScales`] describes how scale records encode them.
//! Kernels read the records of every format by one rule.

use crate::desc::FloatScale;

/// Scale and minimum of a sub-block: a value is `scale · number + min`.
///
/// The number is the unsigned code, the table entry or the FP8 number. Offsets and zero
/// points are part of the minimum.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SubScale {
    /// Multiplier.
    pub scale: f32,
    /// Addend.
    pub min: f32,
}

/// Bit field of a byte of the records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BitField {
    /// Byte index.
    pub byte: u8,
    /// Lowest bit of the field.
    pub shift: u8,
    /// Width of the field. 0 means no field.
    pub bits: u8,
}

impl BitField {
    /// Field of `bits` bits in byte `byte`, from bit `shift`.
    pub const fn new(byte: usize, shift: usize, bits: usize) -> Self {
        Self { byte: byte as u8, shift: shift as u8, bits: bits as u8 }
    }

    /// Value of the field.
    fn read(self, records: &[u8]) -> u32 {
        u32::from(records[usize::from(self.byte)]) >> self.shift & ((1 << self.bits) - 1)
    }
}

/// Integer of at most eight bits per sub-block, from a low and an optional high field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubCodes {
    /// `[low, high]` for every sub-block of a block.
    pub fields: &'static [[BitField; 2]],
    /// XOR mask, applied first. 0x80 and an offset of 128 decode an 8-bit two's
    /// complement.
    pub flip: u32,
    /// Left shift, applied before `offset` is subtracted.
    pub shift: u32,
    /// Offset to subtract.
    pub offset: i32,
}

impl SubCodes {
    /// Unsigned integers.
    pub const fn unsigned(fields: &'static [[BitField; 2]]) -> Self {
        Self::less(fields, 0)
    }

    /// Unsigned integers less `offset`.
    pub const fn less(fields: &'static [[BitField; 2]], offset: i32) -> Self {
        Self { fields, flip: 0, shift: 0, offset }
    }

    /// Odd integers `2 · code + from`.
    pub const fn odd(fields: &'static [[BitField; 2]], from: i32) -> Self {
        Self { fields, flip: 0, shift: 1, offset: -from }
    }

    fn read(&self, records: &[u8], sub: usize) -> f32 {
        let [low, high] = self.fields[sub];
        let code = low.read(records) | high.read(records) << low.bits;
        (((code ^ self.flip) << self.shift) as i32 - self.offset) as f32
    }
}

/// Minimum: the addend of a sub-block's scaled codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Minimum {
    /// `−scale · offset`, with the encoding's offset.
    Offset(i32),
    /// `−scale · zero point`, with the zero point in this byte of the records.
    Zero(usize),
    /// Stored number of the block.
    Stored(FloatScale),
    /// `number − scale · offset`: a stored number of the block, the value of the code `offset`.
    Centered(FloatScale, i32),
    /// `−number · integer`: a number of the block and an integer of each sub-block.
    Coded(FloatScale, SubCodes),
    /// `−scale · integer / 8`, with an integer of each sub-block.
    Eighths(SubCodes),
}

/// Rule for a block's sub-block scales, from its records in the order of
/// [`FormatDesc::unpack_block`](crate::FormatDesc::unpack_block).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SubScales {
    /// Scale of the block, or `None` for 1. Its offset counts from the first record.
    pub factor: Option<FloatScale>,
    /// Exact multiplier of the scale.
    pub times: f32,
    /// Integer multiplier of each sub-block. `None` when one scale covers the block.
    pub codes: Option<SubCodes>,
    /// Addend.
    pub minimum: Minimum,
}

impl SubScales {
    /// Constant scale of 1.
    pub const ONE: Self = Self { factor: None, times: 1.0, codes: None, minimum: Minimum::Offset(0) };

    /// One scale for the whole block.
    pub const fn stored(factor: FloatScale, minimum: Minimum) -> Self {
        Self { factor: Some(factor), times: 1.0, codes: None, minimum }
    }

    /// Decodes scale and minimum of each sub-block in `out`.
    ///
    /// # Panics
    /// When `records` or the description are shorter than the format's.
    pub fn read(&self, records: &[u8], out: &mut [SubScale]) {
        let factor = self.factor.map_or(1.0, |factor| factor.read(records)) * self.times;
        for (sub, out) in out.iter_mut().enumerate() {
            let scale = factor * self.codes.map_or(1.0, |codes| codes.read(records, sub));
            let min = match self.minimum {
                Minimum::Offset(offset) => -scale * offset as f32,
                Minimum::Zero(byte) => -scale * f32::from(records[byte]),
                Minimum::Stored(stored) => stored.read(records),
                Minimum::Centered(stored, offset) => stored.read(records) - scale * offset as f32,
                Minimum::Coded(factor, codes) => -factor.read(records) * codes.read(records, sub),
                Minimum::Eighths(codes) => -scale * (codes.read(records, sub) / 8.0),
            };
            *out = SubScale { scale, min };
        }
    }
}
