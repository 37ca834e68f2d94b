//! A dense operand inside a larger buffer whose every other byte
//! is poison.
//!
//! ```text
//! guard band | offset | row 0 | gap | row 1 | gap | … | last row | guard band
//! ```
//!
//! Poison is 0xff, which is NaN in every element type.
//! A wrong read shows in the result; a wrong write destroys
//! poison.

use std::ops::Range;

use qgemm_hal::FactorFormat;

/// A multiple of the alignment of every device's buffers, so that
/// the operand is aligned like its buffer.
const GUARD_BYTES: usize = 256;
const POISON: u8 = 0xff;

/// Location of an operand in its buffer.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    dtype: FactorFormat,
    rows: usize,
    columns: usize,
    row_stride: usize,
    offset: usize,
    /// Whether the logical matrix is the transpose of the stored one.
    transposed: bool,
}

impl Operand {
    /// `rows` stored rows of `columns` elements, with `gap` elements
    /// between rows. The first is `offset` elements past an aligned
    /// address.
    pub fn new(dtype: impl Into<FactorFormat>, rows: usize, columns: usize, gap: usize, offset: usize) -> Self {
        Self { dtype: dtype.into(), rows, columns, row_stride: columns + gap, offset, transposed: false }
    }

    /// View of the memory, accessed as the transposed matrix.
    pub fn transposed(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// Elements from one stored row to the next.
    pub fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// Elements of a stored row.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Alignment of the first element's address, at most 16.
    pub fn alignment(&self) -> usize {
        match self.offset * self.dtype.bytes() {
            0 => 16,
            bytes => 16.min(1 << bytes.trailing_zeros()),
        }
    }

    /// The bytes of the operand within its buffer.
    pub fn range(&self) -> Range<usize> {
        let start = GUARD_BYTES + self.offset * self.dtype.bytes();
        let elements = match self.rows {
            0 => 0,
            rows => (rows - 1) * self.row_stride + self.columns,
        };
        start..start + elements * self.dtype.bytes()
    }

    /// Bytes of the buffer, with both guard bands; a multiple of 4,
    /// as some devices require.
    pub fn buffer_bytes(&self) -> usize {
        (self.range().end + GUARD_BYTES).next_multiple_of(4)
    }

    /// A buffer full of poison.
    pub fn poison(&self) -> Vec<u8> {
        vec![POISON; self.buffer_bytes()]
    }

    /// A poisoned buffer that holds `values`, the contiguous logical
    /// matrix.
    pub fn encode(&self, values: &[f32]) -> Vec<u8> {
        let mut bytes = self.poison();
        for (row, column) in self.positions() {
            let index = if self.transposed { column * self.rows + row } else { row * self.columns + column };
            self.dtype.write(&mut bytes[self.range().start..], row * self.row_stride + column, values[index]);
        }
        bytes
    }

    /// The values of a buffer, as the contiguous stored matrix.
    pub fn decode(&self, buffer: &[u8]) -> Vec<f32> {
        let operand = &buffer[self.range()];
        self.positions().map(|(row, column)| self.dtype.read(operand, row * self.row_stride + column)).collect()
    }

    /// The first byte outside the operand's rows that is not poison.
    pub fn first_written_outside(&self, buffer: &[u8]) -> Option<usize> {
        let (start, row_bytes) = (self.range().start, self.columns * self.dtype.bytes());
        let mut outside = buffer.to_vec();
        for row in 0..self.rows {
            outside[start + row * self.row_stride * self.dtype.bytes()..][..row_bytes].fill(POISON);
        }
        outside.iter().position(|&byte| byte != POISON)
    }

    fn positions(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let columns = self.columns;
        (0..self.rows).flat_map(move |row| (0..columns).map(move |column| (row, column)))
    }
}

#[cfg(test)]
mod tests {
    use qgemm_formats::DType;

    use super::*;

    #[test]
    fn values_survive_gaps_offsets_and_transposition() {
        let values: Vec<f32> = (0..15).map(|v| v as f32).collect();
        let operand = Operand::new(DType::F16, 3, 5, 2, 1);
        assert_eq!(operand.alignment(), 2);
        assert_eq!(operand.decode(&operand.encode(&values)), values);
        // The stored matrix of a transposed operand is 5 x 3 for a
        // logical 3 x 5.
        let stored = Operand::new(DType::F32, 5, 3, 1, 0).transposed();
        assert_eq!(stored.decode(&stored.encode(&values))[..4], [0.0, 5.0, 10.0, 1.0]);
    }

    #[test]
    fn a_byte_written_in_a_gap_or_guard_is_found() {
        let operand = Operand::new(DType::F16, 2, 4, 1, 0);
        let clean = operand.encode(&[1.0; 8]);
        assert_eq!(operand.first_written_outside(&clean), None);
        for at in [0, GUARD_BYTES - 1, operand.range().start + 8, operand.range().end, clean.len() - 1] {
            let mut written = clean.clone();
            written[at] = 0;
            assert_eq!(operand.first_written_outside(&written), Some(at));
        }
    }
}
