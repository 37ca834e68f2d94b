//! [`SubScales`]: what the scale records of a block say of its sub-blocks, as data, so that kernels of any kind can read the
//! records of every format by one rule.

use crate::desc::FloatScale;

/// How the values of a sub-block follow from their codes: `scale · number + min`, the number being the unsigned code itself, or
/// what the table or FP8 make of it. Offsets and zero points are part of the minimum.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SubScale {
    /// The factor.
    pub scale: f32,
    /// What is added.
    pub min: f32,
}

/// Some bits of one byte of a block's records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BitField {
    /// The byte.
    pub byte: u8,
    /// Its bits that are below the field.
    pub shift: u8,
    /// Width of the field; 0 for none.
    pub bits: u8,
}

impl BitField {
    /// `bits` bits of byte `byte`, from bit `shift` on.
    pub const fn new(byte: usize, shift: usize, bits: usize) -> Self {
        Self { byte: byte as u8, shift: shift as u8, bits: bits as u8 }
    }

    /// The field's value.
    fn read(self, records: &[u8]) -> u32 {
        u32::from(records[usize::from(self.byte)]) >> self.shift & ((1 << self.bits) - 1)
    }
}

/// An integer of at most eight bits a sub-block, each from a low and, where it is not wide enough, a high field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubCodes {
    /// `[low, high]` for every sub-block of a block.
    pub fields: &'static [[BitField; 2]],
    /// Bits that are turned over before `offset` is subtracted: 0x80 and 128 make a two's complement of eight bits.
    pub flip: u32,
    /// Subtracted from each.
    pub offset: i32,
}

impl SubCodes {
    /// Unsigned integers.
    pub const fn unsigned(fields: &'static [[BitField; 2]]) -> Self {
        Self { fields, flip: 0, offset: 0 }
    }

    fn read(&self, records: &[u8], sub: usize) -> f32 {
        let [low, high] = self.fields[sub];
        let code = low.read(records) | high.read(records) << low.bits;
        ((code ^ self.flip) as i32 - self.offset) as f32
    }
}

/// What is added to the scaled codes of a sub-block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Minimum {
    /// The scale times this, negated: what the encoding subtracts from every code.
    Offset(i32),
    /// The scale times the zero point in this byte of the records, negated.
    Zero(usize),
    /// A number of its own for the block.
    Stored(FloatScale),
    /// A number of the block times an integer of each sub-block, negated.
    Coded(FloatScale, SubCodes),
}

/// What the records of a block, plane after plane as [`FormatDesc::unpack_block`](crate::FormatDesc::unpack_block) writes them,
/// say of its sub-blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SubScales {
    /// The block's scale (its offset counts from the first record), or `None` for 1.
    pub factor: Option<FloatScale>,
    /// The factor is multiplied by it, exactly.
    pub times: f32,
    /// What the factor is multiplied with in each sub-block; `None` where one scale serves the block.
    pub codes: Option<SubCodes>,
    /// What is added.
    pub minimum: Minimum,
}

impl SubScales {
    /// A scale of 1, whatever the records.
    pub const ONE: Self = Self { factor: None, times: 1.0, codes: None, minimum: Minimum::Offset(0) };

    /// One scale for the whole block.
    pub const fn stored(factor: FloatScale, minimum: Minimum) -> Self {
        Self { factor: Some(factor), times: 1.0, codes: None, minimum }
    }

    /// Scale and minimum of every sub-block that `out` has room for.
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
                Minimum::Coded(factor, codes) => -factor.read(records) * codes.read(records, sub),
            };
            *out = SubScale { scale, min };
        }
    }
}
