//! Rows of X as products multiply them and `convert` writes them: in f32, with their columns in order.

use std::ops::Range;

use qgemm_hal::Dense;

use crate::operand::{Input, is_transposed};
use crate::simd::Simd;

/// Columns of a transposed matrix that become rows together.
const COLUMNS: usize = 16;

/// X with its columns in the order of what is made of them.
#[derive(Clone, Copy, Debug)]
pub struct Ordered<'a> {
    x: Input<'a>,
    /// For every column, which one of X it is.
    order: Option<&'a [[u8; 4]]>,
}

impl<'a> Ordered<'a> {
    /// Most rows that may be loaded together: 16-bit elements of a column fill a cache line.
    pub const MOST_ROWS: usize = 32;

    /// `x` in the order of `order`, a `u32` a column; in its own where there is none.
    pub fn new(x: Input<'a>, order: Option<&'a [u8]>) -> Self {
        Self { x, order: order.map(|order| order.as_chunks().0) }
    }

    /// The matrix's element type and strides.
    pub fn layout(&self) -> &Dense {
        self.x.layout()
    }

    /// The same matrix in its own order.
    pub fn natural(self) -> Self {
        Self { order: None, ..self }
    }

    /// Rows of a matrix that are best loaded together.
    pub fn rows_at_once(x: &Dense) -> usize {
        if is_transposed(x) { Self::MOST_ROWS } else { 1 }
    }

    /// `rows` from column `first` on, of as many columns as `out` has room for. What X has no column for is 0, which keeps NaN out
    /// of products with weights that are 0.
    pub fn load(&self, simd: &Simd, rows: Range<usize>, first: usize, out: &mut [f32]) {
        let columns = out.len() / rows.len();
        if rows.len() == 1 {
            self.load_row(simd, rows.start, first, out);
        } else if is_transposed(self.layout()) {
            self.transpose(simd, rows, first, columns, out);
        } else {
            let of_rows = rows.zip(out.chunks_exact_mut(columns));
            of_rows.for_each(|(row, out)| self.load_row(simd, row, first, out));
        }
    }

    fn load_row(&self, simd: &Simd, row: usize, first: usize, out: &mut [f32]) {
        let held = self.order.map_or(self.x.columns(), <[_]>::len).saturating_sub(first);
        let (values, padding) = out.split_at_mut(out.len().min(held));
        padding.fill(0.0);
        if values.is_empty() {
            // The columns begin where X has none, and its bytes end before.
            return;
        }
        match self.order {
            None => self.x.part(simd, row, first, values),
            Some(order) => self.x.gather(simd, row, |i| column(order[first + i]), values),
        }
    }

    /// Reads columns, which are contiguous or nearly so, and writes rows.
    fn transpose(&self, simd: &Simd, rows: Range<usize>, first: usize, columns: usize, out: &mut [f32]) {
        let mut tile = [[0.0; Self::MOST_ROWS]; COLUMNS];
        for start in (0..columns).step_by(COLUMNS) {
            let width = COLUMNS.min(columns - start);
            for (i, values) in tile[..width].iter_mut().enumerate() {
                let at = first + start + i;
                let of_x = self.order.map_or(at, |order| order.get(at).map_or(usize::MAX, |&entry| column(entry)));
                self.x.down(simd, rows.start, of_x, &mut values[..rows.len()]);
            }
            for (row, out) in out.chunks_exact_mut(columns).enumerate() {
                out[start..start + width].iter_mut().zip(&tile).for_each(|(out, values)| *out = values[row]);
            }
        }
    }
}

/// The column that an entry of an order names; none of X's for [`NO_COLUMN`](qgemm_formats::NO_COLUMN).
fn column(entry: [u8; 4]) -> usize {
    u32::from_le_bytes(entry) as usize
}
