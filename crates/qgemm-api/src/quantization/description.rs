//! Quantization problem: the builder [`Quantization`] and its validation
//! into a [`CheckedQuantize`].

use qgemm_formats::quantize_x::SUM_SPANS;
use qgemm_formats::{DType, XFactor, XFormat, XParts};
use qgemm_hal::CheckedQuantize;

use crate::error::Error;
use crate::operand::{MAX_DIMENSION, Stored, WIDE_ACCESS, check_dimension};

/// Word size of stored scales and sums, in bytes.
const WORD: usize = 4;

/// Quantization of activations, for [`Context::plan_quantization`].
///
/// A result has up to four row-major planes: *codes*, *scales*, *token factors*
/// (NVFP4) and *sums* (Q8_1). [`XParts`] has their row lengths. Planes have no
/// gaps unless strides are set. Results are bit-identical on all devices:
/// [`qgemm_formats::quantize_x`] has the formulas.
///
/// X is row-major without gaps by default.
///
/// ```
/// use qgemm_api::{Context, DType, Quantization, XFormat};
///
/// let ctx = Context::open("cpu")?;
/// let plan = ctx.plan_quantization(&Quantization::new(2, 128, DType::F32, XFormat::E4M3Block))?;
/// let x = ctx.upload(&[1.0f32; 2 * 128])?;
/// let mut quantized = ctx.allocate_x(&plan)?; // serves products as their X
/// plan.run(&ctx.default_stream(), quantized.args(&x))?;
/// # Ok::<(), qgemm_api::Error>(())
/// ```
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
    /// Quantizes X of `rows` × `columns` elements from `from` to `to`. With 0 rows
    /// or columns the plan launches nothing.
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

    /// Stores X as `[columns, rows]`: the values of one column are contiguous.
    pub fn x_transposed(mut self) -> Self {
        self.x_transposed = true;
        self
    }

    /// Row stride of X as stored, in elements. At least its columns, or
    /// its rows when transposed.
    pub fn x_row_stride(mut self, elements: u64) -> Self {
        self.x_row_stride = Some(elements);
        self
    }

    /// Alignment of the address of X in every run, in bytes. 16 by
    /// default; less is slower.
    pub fn x_alignment(mut self, bytes: usize) -> Self {
        self.x_alignment = bytes;
        self
    }

    /// Takes one f32 factor for all of X from device memory at every run,
    /// instead of one per token.
    ///
    /// For NVFP4. E4M3 with a tensor scale always does so.
    pub fn given_factor(mut self) -> Self {
        self.given_factor = true;
        self
    }

    /// Columns per sum of Q8_1: 32 (default) or 16.
    pub fn sums_of(mut self, columns: usize) -> Self {
        self.sum_span = Some(columns);
        self
    }

    /// Row stride of codes in bytes, a multiple of 16.
    pub fn codes_row_stride(mut self, bytes: u64) -> Self {
        self.codes_row = Some(bytes);
        self
    }

    /// Row stride of scales in bytes, a multiple of 4.
    pub fn scales_row_stride(mut self, bytes: u64) -> Self {
        self.scales_row = Some(bytes);
        self
    }

    /// Row stride of sums in bytes, a multiple of 4.
    pub fn sums_row_stride(mut self, bytes: u64) -> Self {
        self.sums_row = Some(bytes);
        self
    }

    /// Result format.
    pub fn format(&self) -> XFormat {
        self.to
    }

    /// Same quantization of `rows` rows without gaps.
    pub(crate) fn of_rows(&self, rows: usize) -> Self {
        self.of_shape(rows, self.columns)
    }

    /// Same quantization of `rows` × `columns` without gaps.
    pub(crate) fn of_shape(&self, rows: usize, columns: usize) -> Self {
        Self { rows, columns, x_row_stride: None, x_transposed: false, ..self.clone() }
    }

    /// Validates everything that is independent of a run's buffers.
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

    /// Planes, if the options fit the format.
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

/// Row stride of a plane with rows of `row` bytes. It must be a multiple
/// of `multiple` and may leave gaps.
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
    // The stride of a single row is irrelevant to the result. Kernels are still
    // chosen by it, as for the batch, and arithmetic with it must not overflow.
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

    /// A batch-invariant plan of one row equals that of its batch, which kernels
    /// may refuse for its strides.
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
