//! Conversion problem: the builder [`Conversion`] and its validation
//! into a [`CheckedConvert`].

use qgemm_formats::DType;
use qgemm_hal::CheckedConvert;

use crate::error::Error;
use crate::operand::{Stored, WIDE_ACCESS, check_dimension};

/// Type and layout conversion, for [`Context::plan_conversion`]:
///
/// ```text
/// D[r, c] = X[r, order[c]] · 2^e(r)
/// ```
///
/// Values round to nearest even. Defaults: row-major without gaps,
/// the columns of X in their order, `e = 0`. Without an order, extra
/// columns of D are zeros and extra columns of X are dropped.
/// Values beyond f16's range become infinite; finite values beyond
/// bf16's range become its largest.
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
    /// Converts X of `rows` × `columns` elements from `from` to `to`.
    /// With 0 rows, or 0 columns of D, the plan launches nothing.
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

    /// Stores X as `[columns, rows]`: the values of one
    /// column are contiguous.
    pub fn x_transposed(mut self) -> Self {
        self.x_transposed = true;
        self
    }

    /// Row stride of X as stored, in elements. At least its columns, or its
    /// rows when transposed.
    pub fn x_row_stride(mut self, elements: u64) -> Self {
        self.x_row_stride = Some(elements);
        self
    }

    /// Alignment of the address of X in every run, in bytes. 16 by default,
    /// which all buffers of a context have; less is slower.
    pub fn x_alignment(mut self, bytes: usize) -> Self {
        self.x_alignment = bytes;
        self
    }

    /// Number of columns of D. By default that of X.
    pub fn d_columns(mut self, columns: usize) -> Self {
        self.d_columns = columns;
        self
    }

    /// Gathers columns: `columns` column indices into X, u32 in device
    /// memory, given at every run.
    ///
    /// An index that is no column of X, such as
    /// [`NO_COLUMN`](crate::NO_COLUMN), yields zeros.
    pub fn gathered(mut self, columns: usize) -> Self {
        self.gathers = true;
        self.d_columns(columns)
    }

    /// Row stride of D in elements, at least its columns.
    /// Gaps are not written.
    pub fn d_row_stride(mut self, elements: u64) -> Self {
        self.d_row_stride = Some(elements);
        self
    }

    /// Alignment of the address of D, in bytes; see
    /// [`Conversion::x_alignment`].
    pub fn d_alignment(mut self, bytes: usize) -> Self {
        self.d_alignment = bytes;
        self
    }

    /// Power-of-two row factors, only for D in f16. Each row is scaled so
    /// that its largest finite magnitude is in [2¹⁴, 2¹⁵).
    ///
    /// f16 then has eleven significant bits for rows of any magnitude.
    /// The inverse of the factor is written per row in f32. Rows below
    /// 2⁻¹¹² are multiplied by 2¹²⁶.
    pub fn row_factors(mut self) -> Self {
        self.row_factors = true;
        self
    }

    /// Validates everything that is independent of a run's buffers.
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
