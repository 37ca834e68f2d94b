//! Output planes of a quantized X: rows of bytes,
//! checked once per launch.

use std::marker::PhantomData;

use qgemm_formats::{XFactor, XParts, XRow};
use qgemm_hal::{BufferMut, BufferRef, DeviceId, HalError, HostMemory};

use crate::operand::{absent, host_bytes};

/// Output rows of bytes, shared by the threads of a launch.
struct Plane<'a> {
    start: *mut u8,
    rows: usize,
    row_stride: usize,
    row_bytes: usize,
    bytes: PhantomData<&'a mut [u8]>,
}

// SAFETY: a `Plane` is a `&mut [u8]` whose only access
// is `row`, an unsafe method whose callers must not
// use a row in two threads.
unsafe impl Sync for Plane<'_> {}

impl<'a> Plane<'a> {
    /// `rows` rows of `row_bytes` bytes each, `row_stride` apart.
    fn new(
        bytes: &'a mut [u8],
        rows: usize,
        row_stride: u64,
        row_bytes: usize,
        what: &'static str,
    ) -> Result<Self, HalError> {
        let (len, row_stride) = (bytes.len(), usize::try_from(row_stride).unwrap_or(usize::MAX));
        let end = (rows - 1).checked_mul(row_stride).and_then(|last| last.checked_add(row_bytes)).unwrap_or(usize::MAX);
        if end > len || (rows > 1 && row_stride < row_bytes) {
            return Err(HalError::OutOfBounds { what, start: 0, end, len });
        }
        Ok(Self { start: bytes.as_mut_ptr(), rows, row_stride, row_bytes, bytes: PhantomData })
    }

    /// # Safety
    /// Nobody else may use the row meanwhile.
    ///
    /// # Panics
    /// When the row does not exist.
    #[expect(clippy::mut_from_ref, reason = "rows are disjoint, and callers use each once")]
    unsafe fn row(&self, row: usize) -> &mut [u8] {
        assert!(row < self.rows, "a row of the matrix");
        // SAFETY: `new` checked that the last row, and so every
        // row, is in the bytes that `self` borrows mutably, and
        // that rows do not overlap. The caller guarantees that
        // nobody else uses this row.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.row_stride), self.row_bytes) }
    }
}

/// Names of the planes in errors.
#[derive(Clone, Copy, Debug)]
pub struct PlaneNames {
    pub codes: &'static str,
    pub scales: &'static str,
    pub token_factors: &'static str,
    pub sums: &'static str,
}

/// Views of the planes in a launch.
#[derive(Debug, Default)]
pub struct PlaneViews<'a> {
    pub codes: Option<BufferMut<'a>>,
    pub scales: Option<BufferMut<'a>>,
    pub token_factors: Option<BufferMut<'a>>,
    pub sums: Option<BufferMut<'a>>,
}

/// Planes of a quantized X, shared by the
/// threads of a launch.
pub struct Planes<'a> {
    parts: XParts,
    /// The given factor for all of X, if any.
    given: Option<f32>,
    codes: Plane<'a>,
    /// Rows of 0 bytes when the format lacks the plane.
    scales: Plane<'a>,
    token_factors: Plane<'a>,
    sums: Plane<'a>,
}

impl<'a> Planes<'a> {
    /// Planes of `rows` rows of `columns` columns. Rows of codes,
    /// scales and sums are `row_strides` bytes apart. `factor` is read
    /// if one is given for all of X.
    ///
    /// # Errors
    /// When a plane of the format is missing, too
    /// short, or not in host memory.
    pub fn new(
        parts: &XParts,
        [rows, columns]: [usize; 2],
        [codes_row, scales_row, sums_row]: [u64; 3],
        views: PlaneViews<'a>,
        names: PlaneNames,
    ) -> Result<Self, HalError> {
        let plane = |view: Option<BufferMut<'a>>, row_stride: u64, row_bytes: usize, what: &'static str| {
            let view = view.ok_or(absent(what, row_bytes))?;
            Plane::new(HostMemory::of_device_mut(DeviceId::CPU, view, what)?, rows, row_stride, row_bytes, what)
        };
        let optional = |is_there: bool, view, row_stride: u64, row_bytes: usize, what| match is_there {
            true => plane(view, row_stride, row_bytes, what),
            false => Plane::new(&mut [], rows, 0, 0, what),
        };
        let per_token = parts.factor == XFactor::PerToken;
        let (scale_bytes, sum_bytes) = (parts.scale_bytes(columns), parts.sums(columns) * 4);
        Ok(Self {
            parts: *parts,
            given: None,
            codes: plane(views.codes, codes_row, parts.code_bytes(columns), names.codes)?,
            scales: optional(parts.scale.is_some(), views.scales, scales_row, scale_bytes, names.scales)?,
            token_factors: optional(per_token, views.token_factors, 4, 4, names.token_factors)?,
            sums: optional(parts.sum_span.is_some(), views.sums, sums_row, sum_bytes, names.sums)?,
        })
    }

    /// Sets the factor for all of X, an f32 in `view`,
    /// if the format needs one.
    ///
    /// # Errors
    /// When it is needed and missing, too short,
    /// or not in host memory.
    pub fn with_factor(self, view: Option<BufferRef<'_>>, what: &'static str) -> Result<Self, HalError> {
        if self.parts.factor != XFactor::Given {
            return Ok(self);
        }
        let bytes = host_bytes(view.ok_or(absent(what, 4))?, what)?;
        let len = bytes.len();
        let word = bytes.first_chunk().ok_or(HalError::OutOfBounds { what, start: 0, end: 4, len })?;
        Ok(Self { given: Some(f32::from_le_bytes(*word)), ..self })
    }

    /// Quantizes a row.
    ///
    /// # Safety
    /// Nobody else may use the row meanwhile.
    ///
    /// # Panics
    /// When the row does not exist.
    pub unsafe fn quantize(&self, row: usize, values: &[f32]) {
        // SAFETY: guaranteed by the caller.
        let (planes, to_factor) = unsafe {
            let planes = XRow { codes: self.codes.row(row), scales: self.scales.row(row), sums: self.sums.row(row) };
            (planes, self.token_factors.row(row))
        };
        if let Some(factor) = self.parts.quantize_row(values, self.given, planes) {
            to_factor.copy_from_slice(&factor.to_le_bytes());
        }
    }
}
