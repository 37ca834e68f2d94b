//! Planes of a quantized X in poisoned buffers, to detect writes
//! out of bounds.

use std::ops::Range;

use qgemm_formats::{XFactor, XParts};

use crate::outcome::{Failure, WrongBits};

/// A multiple of the alignment of every device's buffers.
const GUARD_BYTES: usize = 256;
const POISON: u8 = 0xee;
const WORD: usize = 4;

/// Rows of bytes in a buffer of poison.
#[derive(Clone, Copy, Debug)]
pub struct Plane {
    name: &'static str,
    rows: usize,
    /// Bytes of a row; 0 if the format lacks the plane.
    pub row_bytes: usize,
    /// Bytes from one row to the next.
    pub row_stride: usize,
    offset: usize,
    /// Whether words are f32. Any NaN then equals any other NaN.
    is_f32: bool,
}

impl Plane {
    /// The bytes from the first row to the last within the buffer.
    pub fn range(&self) -> Range<usize> {
        let start = GUARD_BYTES + self.offset;
        let len = if self.row_bytes == 0 { 0 } else { (self.rows - 1) * self.row_stride + self.row_bytes };
        start..start + len
    }

    /// A buffer full of poison.
    pub fn poison(&self) -> Vec<u8> {
        vec![POISON; (self.range().end + GUARD_BYTES).next_multiple_of(WORD)]
    }

    /// The bytes of a row within the buffer.
    pub fn row(&self, row: usize) -> Range<usize> {
        let stride = if self.row_bytes == 0 { 0 } else { self.row_stride };
        let start = self.range().start + row * stride;
        start..start + self.row_bytes
    }

    /// Compares the plane in `buffer` with the expected bytes.
    pub fn check(&self, buffer: &[u8], expected: &[u8]) -> Result<(), Failure> {
        let word = |bytes: &[u8], at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at * WORD + byte]));
        for row in 0..self.rows {
            let (got, expected) = (&buffer[self.row(row)], &expected[self.row(row)]);
            for column in 0..self.row_bytes / WORD {
                let (got, expected) = (word(got, column), word(expected, column));
                let both_nan = self.is_f32 && f32::from_bits(got).is_nan() && f32::from_bits(expected).is_nan();
                if got != expected && !both_nan {
                    return Err(Failure::WrongBits(WrongBits { operand: self.name, row, column, expected, got }));
                }
            }
        }
        self.check_outside(buffer)
    }

    /// Checks that nothing was written outside the rows.
    pub fn check_outside(&self, buffer: &[u8]) -> Result<(), Failure> {
        let mut outside = buffer.to_vec();
        (0..self.rows).for_each(|row| outside[self.row(row)].fill(POISON));
        let written = outside.iter().position(|&byte| byte != POISON);
        written.map_or(Ok(()), |byte| Err(Failure::WroteOutside(byte)))
    }
}

/// Codes, scales, token factors and sums. Planes that the format
/// lacks have no rows.
pub const PLANES: usize = 4;

/// The planes of an X of `[rows, k]`.
/// Rows of codes are `gap` · 16 bytes apart, rows of scales and
/// sums `gap` words.
/// All planes but the codes start `offset` words past an aligned
/// address.
pub fn planes_of(parts: &XParts, [rows, k]: [usize; 2], gap: usize, offset: usize) -> [Plane; PLANES] {
    let offset = offset * WORD;
    let plane = |name, row_bytes: usize, unit: usize, offset: usize, is_f32| Plane {
        name,
        rows,
        row_bytes,
        row_stride: row_bytes + gap * unit,
        offset,
        is_f32,
    };
    let of_token = if parts.factor == XFactor::PerToken { WORD } else { 0 };
    let factors = Plane { row_stride: WORD, ..plane("token factors", of_token, WORD, offset, true) };
    [
        plane("codes", parts.code_bytes(k), 16, 0, false),
        plane("scales", parts.scale_bytes(k), WORD, offset, parts.scale_width() == WORD),
        factors,
        plane("sums", parts.sums(k) * WORD, WORD, offset, true),
    ]
}
