//! Operands as plans see them: how a matrix must lie when it is planned, and what a run's buffers must hold.

use qgemm_formats::DType;
use qgemm_hal::{BatchedDense, BufferMut, BufferRef, Dense, DeviceId, Portion};

use crate::error::Error;

/// The largest dimension: kernels count rows and columns in 32 bits (offsets in 64).
pub(crate) const MAX_DIMENSION: usize = u32::MAX as usize;
/// Alignment that lets kernels use their widest accesses, in bytes.
pub(crate) const WIDE_ACCESS: usize = 16;

/// Checks that kernels can count to `got`.
pub(crate) fn check_dimension(name: &'static str, got: usize) -> Result<(), Error> {
    if got <= MAX_DIMENSION { Ok(()) } else { Err(Error::DimensionTooLarge { name, got, limit: MAX_DIMENSION }) }
}

/// A dense operand as it is stored: `rows` rows of `columns` contiguous elements.
pub(crate) struct Stored {
    pub name: &'static str,
    pub rows: usize,
    pub columns: usize,
    pub dtype: DType,
    pub alignment: usize,
}

impl Stored {
    /// The matrix, whose rows lie `row_stride` elements apart; without gaps when that is not given.
    pub fn check(&self, row_stride: Option<u64>) -> Result<Dense, Error> {
        let &Self { name, rows, columns, dtype, alignment } = self;
        let stored = StoredRows { name, rows, columns, width: dtype.bytes(), alignment };
        let (row_stride, aligned16) = stored.check(row_stride)?;
        Ok(Dense { dtype, row_stride, col_stride: 1, aligned16 })
    }

    /// The transpose of the stored matrix, whose rows lie `row_stride` elements apart.
    pub fn check_transposed(&self, row_stride: Option<u64>) -> Result<Dense, Error> {
        let stored = self.check(row_stride)?;
        Ok(Dense { row_stride: 1, col_stride: stored.row_stride, aligned16: false, ..stored })
    }
}

/// A matrix of elements of `width` bytes, whatever they mean, described by the caller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredRows {
    pub name: &'static str,
    pub rows: usize,
    pub columns: usize,
    pub width: usize,
    pub alignment: usize,
}

impl StoredRows {
    /// Elements from one row to the next, `row_stride` if that is given, and whether all rows begin at multiples of 16 bytes.
    pub fn check(&self, row_stride: Option<u64>) -> Result<(u64, bool), Error> {
        let (operand, width) = (self.name, self.width);
        let (rows, columns) = (self.rows as u64, self.columns as u64);
        let row_stride = row_stride.unwrap_or(columns);
        if row_stride < columns {
            return Err(Error::StrideTooSmall { operand, expected: columns, got: row_stride });
        }
        if !self.alignment.is_power_of_two() || self.alignment < width {
            return Err(Error::Misaligned { operand, expected: width, got: self.alignment });
        }
        let row_aligned = row_stride.checked_mul(width as u64).is_some_and(|b| b.is_multiple_of(WIDE_ACCESS as u64));
        let aligned16 = self.alignment >= WIDE_ACCESS && row_aligned;
        // Nothing lies a stride away from the only row, but what is computed with the stride must not overflow.
        let is_harmless = rows > 1 || row_stride <= MAX_DIMENSION as u64;
        let row_stride = if is_harmless { row_stride } else { columns.next_multiple_of(WIDE_ACCESS as u64) };
        // An object larger than isize::MAX bytes cannot exist; checked here, so that `run` need not.
        let to_last_row = rows.saturating_sub(1).checked_mul(row_stride);
        let elements = to_last_row.and_then(|elements| elements.checked_add(columns));
        let bytes = elements.and_then(|elements| elements.checked_mul(width as u64));
        if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(Error::ExtentOverflow { operand, rows, row_stride });
        }
        Ok((row_stride, aligned16))
    }
}

/// What a run asks of a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    bytes: usize,
    alignment: usize,
}

impl Extent {
    /// Of `bytes` bytes from a multiple of `alignment` on.
    pub fn new(bytes: usize, alignment: usize) -> Self {
        Self { bytes, alignment }
    }

    /// Of `rows × columns` elements, whose extent [`Stored::check`] found to fit the address space.
    pub fn of(dense: &Dense, rows: usize, columns: usize) -> Self {
        let width = dense.dtype.bytes();
        let elements = dense.extent(rows, columns).unwrap_or(u64::MAX) as usize;
        Self { bytes: elements * width, alignment: if dense.aligned16 { WIDE_ACCESS } else { width } }
    }

    /// Their number.
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// Of `batch` matrices of `rows × columns` elements of `width` bytes, whose extent was found to fit the address space.
    pub fn of_batch<T>(dense: &BatchedDense<T>, width: usize, batch: usize, rows: usize, columns: usize) -> Self {
        let elements = dense.extent(batch, rows, columns).unwrap_or(u64::MAX) as usize;
        Self { bytes: elements.saturating_mul(width), alignment: if dense.aligned16 { WIDE_ACCESS } else { width } }
    }

    /// Of `bytes` bytes from a multiple of `alignment` on.
    pub fn of_bytes(bytes: usize, alignment: usize) -> Self {
        Self { bytes, alignment }
    }

    /// Of `count` contiguous values of `width` bytes.
    pub fn of_values(count: usize, width: usize) -> Self {
        Self { bytes: count * width, alignment: width }
    }
}

/// The portion that `tokens` of `planned` tokens are; `None` where that is all of them.
///
/// # Errors
/// [`Error::OutOfRange`] where there are not so many, or none is left.
pub(crate) fn portion_of(tokens: Option<usize>, planned: usize) -> Result<Option<Portion>, Error> {
    match tokens {
        None => Ok(None),
        Some(tokens) if tokens == planned => Ok(None),
        Some(got) => match Portion::new(got, planned) {
            Some(portion) => Ok(Some(portion)),
            None => Err(Error::OutOfRange { name: "tokens of a run", least: 1, most: planned, got }),
        },
    }
}

/// Checks the operands of runs on one device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checks(pub DeviceId);

impl Checks {
    /// That an object lives on the device.
    pub fn device(self, operand: &'static str, got: DeviceId) -> Result<(), Error> {
        let expected = self.0;
        if got == expected { Ok(()) } else { Err(Error::WrongDevice { operand, expected, got }) }
    }

    /// That a view is on the device, long enough and aligned.
    pub fn view(self, operand: &'static str, view: BufferRef<'_>, extent: Extent) -> Result<(), Error> {
        self.device(operand, view.device())?;
        if view.len() < extent.bytes {
            return Err(Error::BufferTooShort { operand, expected: extent.bytes, got: view.len() });
        }
        let got = view.alignment();
        if got < extent.alignment {
            return Err(Error::Misaligned { operand, expected: extent.alignment, got });
        }
        Ok(())
    }

    /// The workspace of a plan, one of its own or part of another buffer, that needs `expected` bytes of it; none where it needs none.
    /// `why` it does.
    pub fn workspace<'a>(
        self,
        workspace: Option<BufferMut<'a>>,
        expected: usize,
        why: &'static str,
    ) -> Result<Option<BufferMut<'a>>, Error> {
        const OPERAND: &str = "workspace";
        if expected == 0 {
            return Ok(None);
        }
        let workspace = workspace.ok_or(Error::MissingOperand { operand: OPERAND, why })?;
        self.view(OPERAND, workspace.view(), Extent::of_values(expected, 1))?;
        Ok(Some(workspace))
    }

    /// That an operand came if, and only if, the plan uses one, which is when `extent` is some; `why` it does.
    pub fn optional<V: AsView>(
        self,
        operand: &'static str,
        view: Option<V>,
        extent: Option<Extent>,
        why: &'static str,
    ) -> Result<Option<V>, Error> {
        match (view, extent) {
            (Some(view), Some(extent)) => {
                self.view(operand, view.as_view(), extent)?;
                Ok(Some(view))
            }
            (None, Some(_)) => Err(Error::MissingOperand { operand, why }),
            (Some(_), None) => Err(Error::UnexpectedOperand { operand }),
            (None, None) => Ok(None),
        }
    }
}

/// A view to be read or written.
pub(crate) trait AsView {
    fn as_view(&self) -> BufferRef<'_>;
}

impl AsView for BufferRef<'_> {
    fn as_view(&self) -> BufferRef<'_> {
        *self
    }
}

impl AsView for BufferMut<'_> {
    fn as_view(&self) -> BufferRef<'_> {
        self.view()
    }
}
