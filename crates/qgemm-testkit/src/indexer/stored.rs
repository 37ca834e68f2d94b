//! Rows of queries and keys in a poisoned buffer, for formats
//! that [`Operand`](crate::operand::Operand) lacks.

use std::ops::Range;

use qgemm_formats::DType;
use qgemm_hal::KvFormat;

use crate::attention::e4m3;

/// A multiple of every device's alignment.
const GUARD_BYTES: usize = 256;

/// A poisoned buffer with some rows of numbers.
pub(super) struct Rows {
    pub bytes: Vec<u8>,
    /// Start of the first element.
    pub start: usize,
    format: KvFormat,
}

impl Rows {
    /// A buffer for `elements` elements, `offset` elements past an
    /// aligned address.
    pub fn new(format: KvFormat, elements: usize, offset: usize) -> Self {
        let start = GUARD_BYTES + format.bytes_of(offset);
        let bytes = vec![0xff; (start + format.bytes_of(elements) + GUARD_BYTES).next_multiple_of(4)];
        Self { bytes, start, format }
    }

    /// Writes numbers, starting at `element`.
    pub fn put(&mut self, element: usize, values: &[f32]) {
        let to = &mut self.bytes[self.start + self.format.bytes_of(element)..];
        match self.format {
            KvFormat::Plain(dtype) => values.iter().enumerate().for_each(|(i, &value)| dtype.write(to, i, value)),
            _ => to.iter_mut().zip(values).for_each(|(to, &value)| *to = e4m3(value)),
        }
    }

    /// Writes an f32 scale at byte `byte` of the elements.
    pub fn put_scale(&mut self, byte: usize, scale: f32) {
        DType::F32.write(&mut self.bytes[self.start + byte..], 0, scale);
    }

    /// From byte `first` of the elements to the guard.
    pub fn range(&self, first: usize) -> Range<usize> {
        self.start + first..self.bytes.len() - GUARD_BYTES
    }

    /// Alignment of the first element's address, at most 16.
    pub fn alignment(&self) -> usize {
        16.min(1 << self.start.trailing_zeros())
    }
}
