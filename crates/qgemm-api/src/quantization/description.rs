//! [`Quantization`]: which matrix becomes codes and scales of which format, and its validation into a [`CheckedQuantize`].

use qgemm_formats::quantize_x::SUM_SPANS;
use qgemm_formats::{DType, XFactor, XFormat, XParts};
use qgemm_hal::CheckedQuantize;

use crate::error::Error;
use crate::operand::{MAX_DIMENSION, Stored, WIDE_ACCESS, check_dimension};

/// Bytes of a word, which scales and sums are written by.
const WORD: usize = 4;

/// Activations to be written in a format of codes and scales, described for [`Context::plan_quantization`].
///
/// A result has up to four planes, each row-major: *codes*, *scales*, *token factors* (NVFP4) and *sums* (Q8_1);
/// [`XParts`] says how long their rows are. Rows lie one behind the other unless strides are given. What is computed is the same to
/// the bit on every device: [`qgemm_formats::quantize_x`] has the formulas.
///
/// X is row-major without gaps unless said otherwise.
///
/// [`Context::plan_quantization`]: crate::Context::plan_quantization
#[derive(Clone, Debug, PartialEq)]
pub struct Quantization {
    rows: usize,
    columns: usize,
    from: DType,
    to: XFormat,
    x_row_stride: Option<u64>,
    x_transposed: bool,
    x_alignment: usize,
    given_factor: bool,
    sum_span: Option<usize>,
    codes_row: Option<u64>,
    scales_row: Option<u64>,
    sums_row: Option<u64>,
}

impl Quantization {
    /// X of `rows` × `columns` elements of type `from` in the format `to`. There may be 0 rows or 0 columns: such a plan launches
    /// nothing.
    pub fn new(rows: usize, columns: usize, from: DType, to: XFormat) -> Self {
        Self {
            rows,
            columns,
            from,
            to,
            x_row_stride: None,
            x_transposed: false,
            x_alignment: WIDE_ACCESS,
            given_factor: false,
            sum_span: None,
            codes_row: None,
            scales_row: None,
            sums_row: None,
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

    /// What the address of X is a multiple of, in bytes, at every run. 16 when not given; less costs speed.
    pub fn x_alignment(mut self, bytes: usize) -> Self {
        self.x_alignment = bytes;
        self
    }

    /// The caller gives a factor for all of X at every run, an f32 in device memory, in place of one that is made for each token.
    /// For NVFP4; E4M3 with a scale for all of X always takes it so.
    pub fn given_factor(mut self) -> Self {
        self.given_factor = true;
        self
    }

    /// Writes a sum for every `columns` columns: 32, which is so when not given, or 16. For Q8_1.
    pub fn sums_of(mut self, columns: usize) -> Self {
        self.sum_span = Some(columns);
        self
    }

    /// Bytes from one row of codes to the next: a multiple of 16.
    pub fn codes_row_stride(mut self, bytes: u64) -> Self {
        self.codes_row = Some(bytes);
        self
    }

    /// Bytes from one row of scales to the next: a multiple of 4.
    pub fn scales_row_stride(mut self, bytes: u64) -> Self {
        self.scales_row = Some(bytes);
        self
    }

    /// Bytes from one row of sums to the next: a multiple of 4.
    pub fn sums_row_stride(mut self, bytes: u64) -> Self {
        self.sums_row = Some(bytes);
        self
    }

    /// The format of the result.
    pub fn format(&self) -> XFormat {
        self.to
    }

    /// The same of so many rows of what lies without gaps.
    pub(crate) fn of_rows(&self, rows: usize) -> Self {
        self.of_shape(rows, self.columns)
    }

    /// The same of so many rows and columns of what lies without gaps.
    pub(crate) fn of_shape(&self, rows: usize, columns: usize) -> Self {
        Self { rows, columns, x_row_stride: None, x_transposed: false, ..self.clone() }
    }

    /// Validates everything that does not depend on the buffers of a run.
    pub(crate) fn check(&self) -> Result<CheckedQuantize, Error> {
        let &Self { rows, columns, from, to, .. } = self;
        for (name, got) in [("rows", rows), ("columns", columns)] {
            check_dimension(name, got)?;
        }
        let parts = self.parts()?;
        let stored = |rows, columns| Stored { name: "X", rows, columns, dtype: from, alignment: self.x_alignment };
        let x = match self.x_transposed {
            false => stored(rows, columns).check(self.x_row_stride)?,
            true => stored(columns, rows).check_transposed(self.x_row_stride)?,
        };
        let plane = |operand, stride: Option<u64>, row: usize, multiple: usize| {
            plane_stride(operand, stride, rows, row as u64, multiple as u64)
        };
        Ok(CheckedQuantize {
            rows,
            columns,
            x,
            format: to,
            codes_row: plane("codes", self.codes_row, parts.code_bytes(columns), WIDE_ACCESS)?,
            scales_row: plane("scales", self.scales_row, parts.scale_bytes(columns), WORD)?,
            sums_row: plane("sums", self.sums_row, parts.sums(columns) * WORD, WORD)?,
            parts,
        })
    }

    /// The planes, if what is asked for fits the format.
    fn parts(&self) -> Result<XParts, Error> {
        let format = self.to;
        let unfit = |what| Err(Error::NotOfXFormat { what, format });
        if self.sum_span.is_some_and(|span| !SUM_SPANS.contains(&span)) {
            return unfit("a sum of other than 32 or 16 columns");
        }
        let parts = format.parts(self.given_factor, self.sum_span).ok_or(Error::NotQuantized { got: format })?;
        if self.given_factor && parts.factor != XFactor::Given {
            return unfit("a given factor");
        }
        let asked = [
            (self.sum_span.is_some() || self.sums_row.is_some(), parts.sum_span.is_some(), "a sum"),
            (self.scales_row.is_some(), parts.scale.is_some(), "a row stride of scales"),
        ];
        match asked.into_iter().find(|(is_asked, is_there, _)| *is_asked && !is_there) {
            Some((_, _, what)) => unfit(what),
            None => Ok(parts),
        }
    }
}

/// The bytes between rows of `row` bytes, which must be a multiple of `multiple` and may leave gaps.
pub(super) fn plane_stride(
    operand: &'static str,
    stride: Option<u64>,
    rows: usize,
    row: u64,
    multiple: u64,
) -> Result<u64, Error> {
    let got = stride.unwrap_or(row);
    if got < row || !got.is_multiple_of(multiple) {
        return Err(Error::PlaneStride { operand, multiple, least: row, got });
    }
    // Nothing lies a stride away from the only row, but kernels are chosen by the stride, for one row as for its batch, and what is
    // computed with it must not overflow.
    let got = if rows > 1 || got <= MAX_DIMENSION as u64 { got } else { row };
    let end = (rows as u64).saturating_sub(1).checked_mul(got).and_then(|last| last.checked_add(row));
    match end.is_some_and(|end| isize::try_from(end).is_ok()) {
        true => Ok(got),
        false => Err(Error::ExtentOverflow { operand, rows: rows as u64, row_stride: got }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A batch-invariant plan of one row is that of its batch, which kernels may refuse for its strides.
    #[test]
    fn one_row_has_the_strides_of_its_batch() {
        let strides = |rows| {
            let all = Quantization::new(rows, 256, DType::F32, XFormat::Q8_1);
            let checked = all.codes_row_stride(416).scales_row_stride(72).sums_row_stride(44).check().expect("valid");
            [checked.codes_row, checked.scales_row, checked.sums_row]
        };
        assert_eq!(strides(1), [416, 72, 44]);
        assert_eq!(strides(1), strides(56));
        let far =
            Quantization::new(1, 256, DType::F32, XFormat::Q8_1).codes_row_stride(1 << 62).check().expect("valid");
        assert_eq!(far.codes_row, 256, "nothing is computed with a stride that overflows");
    }
}
