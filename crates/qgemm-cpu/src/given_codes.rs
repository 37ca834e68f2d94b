//! A given INT8 X, which integer products multiply directly.

use qgemm_hal::{HalError, XPlanes};

use crate::operand::PlaneRows;
use crate::simd::Quantization;

/// Planes of an INT8 X with f32 scales.
#[derive(Debug)]
pub struct GivenCodes<'a> {
    codes: PlaneRows<'a>,
    scales: PlaneRows<'a>,
    /// Columns that share a scale; `None` for one scale per token.
    block: Option<usize>,
}

impl<'a> GivenCodes<'a> {
    /// Wraps `planes` with `rows` rows of `columns` columns. Codes and scales
    /// come with their names for errors.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`] when a plane is too short.
    pub fn new(
        planes: &XPlanes,
        [rows, columns]: [usize; 2],
        codes: (&'a [u8], &'static str),
        scales: (&'a [u8], &'static str),
    ) -> Result<Self, HalError> {
        let parts = &planes.parts;
        Ok(Self {
            codes: PlaneRows::new(codes.0, rows, planes.codes_row, parts.code_bytes(columns), codes.1)?,
            scales: PlaneRows::new(scales.0, rows, planes.scales_row, parts.scale_bytes(columns), scales.1)?,
            block: parts.block,
        })
    }

    /// Loads `columns` columns of `row` from `first` on, in kernel
    /// order, zero-padded beyond X.
    pub fn load(&self, how: &Quantization, row: usize, first: usize, columns: usize, out: &mut [u32]) {
        let (codes, scales) = (self.codes.row(row), self.scales.row(row));
        let scale = |column: usize| {
            let at = 4 * self.block.map_or(0, |block| (first + column) / block);
            scales.get(at..).and_then(|rest| rest.first_chunk()).map_or(0.0, |word| f32::from_le_bytes(*word))
        };
        let held = &codes[first.min(codes.len())..codes.len().min(first + columns)];
        how.arrange(columns, held, scale, out);
    }
}
