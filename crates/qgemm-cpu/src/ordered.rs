//! Rows of X for products and `convert`: in f32,
//! with columns in order.

use std::ops::Range;

use qgemm_hal::Dense;

use crate::operand::{Input, is_transposed};
use crate::simd::Simd;

/// Columns of a column-major matrix that are transposed together.
const COLUMNS: usize = 16;

/// X with reordered columns.
#[derive(Clone, Copy, Debug)]
pub struct Ordered<'a> {
    x: Input<'a>,
    /// For every column, its column in X.
    order: Option<&'a [[u8; 4]]>,
}

impl<'a> Ordered<'a> {
    /// Maximum rows to load together: 16-bit elements of a
    /// column fill a cache line.
    pub const MOST_ROWS: usize = 32;

    /// `x` with columns in the order of `order`, one `u32` each,
    /// or unchanged without an order.
    pub fn new(x: Input<'a>, order: Option<&'a [u8]>) -> Self {
        Self { x, order: order.map(|order| order.as_chunks().0) }
    }

    /// Element type and strides of the matrix.
    pub fn layout(&self) -> &Dense {
        self.x.layout()
    }

    /// The matrix without reordering.
    pub fn natural(self) -> Self {
        Self { order: None, ..self }
    }

    /// Number of rows that are best loaded together.
    pub fn rows_at_once(x: &Dense) -> usize {
        if is_transposed(x) { Self::MOST_ROWS } else { 1 }
    }

    /// Loads `rows` from column `first` on, as many columns as
    /// `out` holds. Columns outside X are 0, which keeps NaN out
    /// of products with zero weights.
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
            // The columns start beyond X and its bytes.
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

/// Column that an order entry names; outside X for
/// [`NO_COLUMN`](qgemm_formats::NO_COLUMN).
fn column(entry: [u8; 4]) -> usize {
    u32::from_le_bytes(entry) as usize
}
