//! The planes of a quantized X as kernels write them: rows of bytes, checked once per launch.

use std::marker::PhantomData;

use qgemm_formats::{XFactor, XParts, XRow};
use qgemm_hal::{BufferMut, BufferRef, DeviceId, HalError, HostMemory};

use crate::operand::{absent, host_bytes};

/// Rows of bytes to write, shared by the threads of a launch.
struct Plane<'a> {
    start: *mut u8,
    rows: usize,
    row_stride: usize,
    row_bytes: usize,
    bytes: PhantomData<&'a mut [u8]>,
}

// SAFETY: a `Plane` is a `&mut [u8]` whose only access is `row`, an unsafe method that obliges its callers to use no row in two
// threads.
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
    /// When there is no such row.
    #[expect(clippy::mut_from_ref, reason = "rows are disjoint, and callers use each once")]
    unsafe fn row(&self, row: usize) -> &mut [u8] {
        assert!(row < self.rows, "a row of the matrix");
        // SAFETY: `new` checked that the last row, and so every row, lies in the bytes that `self` borrows mutably, and that rows do
        // not overlap. That nobody else uses this one is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.row_stride), self.row_bytes) }
    }
}

/// What planes are called in errors.
#[derive(Clone, Copy, Debug)]
pub struct PlaneNames {
    pub codes: &'static str,
    pub scales: &'static str,
    pub token_factors: &'static str,
    pub sums: &'static str,
}

/// What a launch is given for planes.
#[derive(Debug, Default)]
pub struct PlaneViews<'a> {
    pub codes: Option<BufferMut<'a>>,
    pub scales: Option<BufferMut<'a>>,
    pub token_factors: Option<BufferMut<'a>>,
    pub sums: Option<BufferMut<'a>>,
}

/// The planes of an X of some rows, shared by the threads of a launch.
pub struct Planes<'a> {
    parts: XParts,
    /// The factor for all of X, where it is given.
    given: Option<f32>,
    codes: Plane<'a>,
    /// Rows of no bytes where the format has no such plane.
    scales: Plane<'a>,
    token_factors: Plane<'a>,
    sums: Plane<'a>,
}

impl<'a> Planes<'a> {
    /// Planes of `rows` rows of `columns` columns, whose rows of codes, scales and sums are `row_strides` bytes apart. `factor` is read
    /// where one is given for all of X.
    ///
    /// # Errors
    /// When one that the format has is absent, too short, or in other memory than the host's.
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

    /// With the factor for all of X, an f32 in `view`, which the format may need.
    ///
    /// # Errors
    /// When it is needed and absent, too short, or in other memory than the host's.
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
    /// When there is no such row.
    pub unsafe fn quantize(&self, row: usize, values: &[f32]) {
        // SAFETY: the caller's promise.
        let (planes, to_factor) = unsafe {
            let planes = XRow { codes: self.codes.row(row), scales: self.scales.row(row), sums: self.sums.row(row) };
            (planes, self.token_factors.row(row))
        };
        if let Some(factor) = self.parts.quantize_row(values, self.given, planes) {
            to_factor.copy_from_slice(&factor.to_le_bytes());
        }
    }
}
