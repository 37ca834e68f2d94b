//! [`Conversion`]: which matrix becomes which, and its validation into a [`CheckedConvert`].

use qgemm_formats::DType;
use qgemm_hal::CheckedConvert;

use crate::error::Error;
use crate::operand::{Stored, WIDE_ACCESS, check_dimension};

/// A matrix to be written in another element type, order of columns or layout, described for [`Context::plan_conversion`]:
///
/// ```text
/// D[r, c] = X[r, order[c]] · 2^e(r)
/// ```
///
/// rounded to nearest even. Unless said otherwise both matrices are row-major without gaps, D has the columns of X in their
/// order, and `e` is 0. Without an order, columns of D beyond those of X are zeros, and columns of X beyond those of D are left
/// out. Numbers beyond the range of f16 become infinite there; finite ones beyond bf16's largest become that one.
///
/// [`Context::plan_conversion`]: crate::Context::plan_conversion
#[derive(Clone, Debug)]
pub struct Conversion {
    rows: usize,
    columns: usize,
    from: DType,
    to: DType,
    x_row_stride: Option<u64>,
    x_transposed: bool,
    x_alignment: usize,
    d_columns: usize,
    d_row_stride: Option<u64>,
    d_alignment: usize,
    gathers: bool,
    row_factors: bool,
}

impl Conversion {
    /// X of `rows` × `columns` elements of type `from` becomes D of type `to`. There may be 0 rows, or 0 columns of D:
    /// such a plan launches nothing.
    pub fn new(rows: usize, columns: usize, from: DType, to: DType) -> Self {
        Self {
            rows,
            columns,
            from,
            to,
            x_row_stride: None,
            x_transposed: false,
            x_alignment: WIDE_ACCESS,
            d_columns: columns,
            d_row_stride: None,
            d_alignment: WIDE_ACCESS,
            gathers: false,
            row_factors: false,
        }
    }

    /// X is stored as `[columns, rows]`, the values of one column contiguous.
    pub fn x_transposed(mut self) -> Self {
        self.x_transposed = true;
        self
    }

    /// Elements from one stored row of X to the next: at least the columns, or at least the rows when X is transposed.
    pub fn x_row_stride(mut self, elements: u64) -> Self {
        self.x_row_stride = Some(elements);
        self
    }

    /// What the address of X is a multiple of, in bytes, at every run. 16 when not given, which every buffer that a context
    /// allocates meets; less costs speed.
    pub fn x_alignment(mut self, bytes: usize) -> Self {
        self.x_alignment = bytes;
        self
    }

    /// D has `columns` columns in place of as many as X.
    pub fn d_columns(mut self, columns: usize) -> Self {
        self.d_columns = columns;
        self
    }

    /// D has `columns` columns, and an order, given at every run, says which column of X each of them is: as many `u32` in device
    /// memory. An entry that is no column of X, such as [`NO_COLUMN`](crate::NO_COLUMN), makes a column of zeros.
    pub fn gathered(mut self, columns: usize) -> Self {
        self.gathers = true;
        self.d_columns(columns)
    }

    /// Elements from one row of D to the next: at least its columns. What lies between rows is left as it is.
    pub fn d_row_stride(mut self, elements: u64) -> Self {
        self.d_row_stride = Some(elements);
        self
    }

    /// What the address of D is a multiple of, in bytes; see [`Conversion::x_alignment`].
    pub fn d_alignment(mut self, bytes: usize) -> Self {
        self.d_alignment = bytes;
        self
    }

    /// Multiplies each row by the power of two that brings the largest finite magnitude of X's row to [2¹⁴, 2¹⁵), which f16 holds
    /// with eleven bits whatever it was, and writes its inverse for every row, in f32, beside. Rows below 2⁻¹¹² are multiplied by
    /// 2¹²⁶. Only for D in f16.
    pub fn row_factors(mut self) -> Self {
        self.row_factors = true;
        self
    }

    /// Validates everything that does not depend on the buffers of a run.
    pub(crate) fn check(&self) -> Result<CheckedConvert, Error> {
        let &Self { rows, columns, d_columns, gathers, row_factors, .. } = self;
        for (name, got) in [("rows", rows), ("columns", columns), ("columns of D", d_columns)] {
            check_dimension(name, got)?;
        }
        if columns == 0 && d_columns > 0 {
            return Err(Error::NoColumns { d_columns });
        }
        if row_factors && self.to != DType::F16 {
            return Err(Error::RowFactorsOf { expected: DType::F16, got: self.to });
        }
        let stored_x =
            |rows, columns| Stored { name: "X", rows, columns, dtype: self.from, alignment: self.x_alignment };
        let x = match self.x_transposed {
            false => stored_x(rows, columns).check(self.x_row_stride)?,
            true => stored_x(columns, rows).check_transposed(self.x_row_stride)?,
        };
        let d = Stored { name: "D", rows, columns: d_columns, dtype: self.to, alignment: self.d_alignment }
            .check(self.d_row_stride)?;
        Ok(CheckedConvert { rows, columns, d_columns, x, d, gathers, row_factors })
    }
}
