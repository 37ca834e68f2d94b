//! A or B of one product, of any format, as
//! tasks read it: in f32.

use std::ops::Range;

use qgemm_formats::float8::e4m3_to_f32;
use qgemm_hal::{BatchedDense, FactorFormat};

use crate::operand::Input;
use crate::ordered::Ordered;
use crate::simd::Simd;

/// A or B of one product.
pub enum Factor<'a> {
    Plain(Input<'a>),
    E4M3(Codes<'a>),
    Blocks(Blocks<'a>),
}

/// An E4M3 matrix whose elements are known to be in bounds.
pub struct Codes<'a> {
    bytes: &'a [u8],
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Codes<'a> {
    /// The matrix at the start of `bytes`.
    pub fn new<T>(bytes: &'a [u8], layout: &BatchedDense<T>) -> Self {
        Self { bytes, row_stride: layout.row_stride as usize, col_stride: layout.col_stride as usize }
    }

    fn value(&self, row: usize, column: usize) -> f32 {
        e4m3_to_f32(self.bytes[row * self.row_stride + column * self.col_stride])
    }
}

/// Rows of A, or columns of B, with E4M3 contiguous along
/// K and a scale for each block.
pub struct Blocks<'a> {
    codes: &'a [u8],
    code_row: usize,
    /// f32 scales in little-endian order.
    scales: &'a [u8],
    scale_row: usize,
    of_a: bool,
}

impl<'a> Blocks<'a> {
    /// Rows of A.
    pub fn of_a<T>(codes: &'a [u8], layout: &BatchedDense<T>, scales: &'a [u8], scale_row: u64) -> Self {
        Self { codes, code_row: layout.row_stride as usize, scales, scale_row: scale_row as usize, of_a: true }
    }

    /// Columns of B.
    pub fn of_b<T>(codes: &'a [u8], layout: &BatchedDense<T>, scales: &'a [u8], scale_row: u64) -> Self {
        Self { codes, code_row: layout.col_stride as usize, scales, scale_row: scale_row as usize, of_a: false }
    }

    /// Elements of row (or column) `outer` from
    /// `first` on, rounded to f32.
    fn along(&self, outer: usize, first: usize, out: &mut [f32]) {
        let codes = &self.codes[outer * self.code_row + first..][..out.len()];
        let scales = self.scales.as_chunks::<4>().0;
        let mut at = 0;
        while at < out.len() {
            let block = (first + at) / FactorFormat::BLOCK;
            let end = ((block + 1) * FactorFormat::BLOCK - first).min(out.len());
            let scale = f32::from_le_bytes(scales[outer * self.scale_row + block]);
            out[at..end].iter_mut().zip(&codes[at..end]).for_each(|(out, &code)| *out = e4m3_to_f32(code) * scale);
            at = end;
        }
    }
}

impl Factor<'_> {
    /// Whether rows are contiguous.
    pub fn is_row_major(&self) -> bool {
        match self {
            Factor::Plain(input) => input.layout().col_stride == 1,
            Factor::E4M3(codes) => codes.col_stride == 1,
            Factor::Blocks(blocks) => blocks.of_a,
        }
    }

    /// Number of rows that are best loaded together.
    pub fn rows_at_once(&self) -> usize {
        match self {
            Factor::Plain(input) => Ordered::rows_at_once(input.layout()),
            Factor::E4M3(_) if self.is_row_major() => 1,
            Factor::Blocks(_) => 1,
            Factor::E4M3(_) => Ordered::MOST_ROWS,
        }
    }

    /// Columns `k` of `rows`, as rows of `out`; the rest
    /// of `out` is unspecified.
    pub fn rows(&self, simd: &Simd, rows: Range<usize>, k: Range<usize>, out: &mut [f32]) {
        let columns = out.len() / rows.len();
        match self {
            Factor::Plain(input) => Ordered::new(*input, None).load(simd, rows, k.start, out),
            Factor::E4M3(codes) if self.is_row_major() => {
                for (row, out) in rows.zip(out.chunks_exact_mut(columns)) {
                    out.iter_mut().zip(k.clone()).for_each(|(out, k)| *out = codes.value(row, k));
                }
            }
            Factor::Blocks(blocks) => {
                for (row, out) in rows.zip(out.chunks_exact_mut(columns)) {
                    blocks.along(row, k.start, &mut out[..k.len()]);
                }
            }
            Factor::E4M3(codes) => {
                for (i, k) in k.enumerate() {
                    for (row, out) in rows.clone().zip(out[i..].iter_mut().step_by(columns)) {
                        *out = codes.value(row, k);
                    }
                }
            }
        }
    }

    /// `out.len()` values of `row` from column `first` on.
    pub fn part(&self, simd: &Simd, row: usize, first: usize, out: &mut [f32]) {
        match self {
            Factor::Plain(input) => input.part(simd, row, first, out),
            Factor::E4M3(codes) => {
                out.iter_mut().zip(first..).for_each(|(out, column)| *out = codes.value(row, column))
            }
            Factor::Blocks(blocks) => blocks.along(row, first, out),
        }
    }

    /// `out.len()` values of `column` from `row` on.
    pub fn down(&self, simd: &Simd, row: usize, column: usize, out: &mut [f32]) {
        match self {
            Factor::Plain(input) => input.down(simd, row, column, out),
            Factor::E4M3(codes) => out.iter_mut().zip(row..).for_each(|(out, row)| *out = codes.value(row, column)),
            Factor::Blocks(blocks) => blocks.along(column, row, out),
        }
    }
}
