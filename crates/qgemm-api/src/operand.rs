//! Operand checks: matrix strides at planning, and buffers at a run.

use qgemm_formats::{DType, ElementType};
use qgemm_hal::{BatchedDense, BufferMut, BufferRef, Dense, Device, DeviceId, Portion, Stream};

use crate::error::Error;

/// Maximum dimension: kernels count rows and columns in 32 bits, offsets in 64.
pub(crate) const MAX_DIMENSION: usize = u32::MAX as usize;
/// Alignment of the widest vector accesses, in bytes.
pub(crate) const WIDE_ACCESS: usize = 16;

/// Checks that a dimension fits 32 bits.
pub(crate) fn check_dimension(name: &'static str, got: usize) -> Result<(), Error> {
    if got <= MAX_DIMENSION { Ok(()) } else { Err(Error::DimensionTooLarge { name, got, limit: MAX_DIMENSION }) }
}

/// Stored dense operand: `rows` rows of `columns` contiguous elements.
pub(crate) struct Stored {
    pub name: &'static str,
    pub rows: usize,
    pub columns: usize,
    pub dtype: DType,
    pub alignment: usize,
}

impl Stored {
    /// Validates a matrix with `row_stride`. Without gaps by default.
    pub fn check(&self, row_stride: Option<u64>) -> Result<Dense, Error> {
        let &Self { name, rows, columns, dtype, alignment } = self;
        let stored = StoredRows { name, rows, columns, width: dtype.bytes(), alignment };
        let (row_stride, aligned16) = stored.check(row_stride)?;
        Ok(Dense { dtype, row_stride, col_stride: 1, aligned16 })
    }

    /// Validates the transpose of a stored matrix with `row_stride`.
    pub fn check_transposed(&self, row_stride: Option<u64>) -> Result<Dense, Error> {
        let stored = self.check(row_stride)?;
        Ok(Dense { row_stride: 1, col_stride: stored.row_stride, aligned16: false, ..stored })
    }
}

/// Stored matrix of elements of `width` bytes, as described by the caller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoredRows {
    pub name: &'static str,
    pub rows: usize,
    pub columns: usize,
    pub width: usize,
    pub alignment: usize,
}

impl StoredRows {
    /// Row stride in elements, and whether all rows are 16-byte aligned.
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
        // The stride of a single row is irrelevant, but arithmetic with it must not overflow.
        let is_harmless = rows > 1 || row_stride <= MAX_DIMENSION as u64;
        let row_stride = if is_harmless { row_stride } else { columns.next_multiple_of(WIDE_ACCESS as u64) };
        // No object exceeds isize::MAX bytes. The check here spares it in `run`.
        let to_last_row = rows.saturating_sub(1).checked_mul(row_stride);
        let elements = to_last_row.and_then(|elements| elements.checked_add(columns));
        let bytes = elements.and_then(|elements| elements.checked_mul(width as u64));
        if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(Error::ExtentOverflow { operand, rows, row_stride });
        }
        Ok((row_stride, aligned16))
    }
}

/// Required extent of a buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    bytes: usize,
    alignment: usize,
    element: ElementType,
}

impl Extent {
    /// Extent of `bytes` bytes of `element`, aligned to `alignment`.
    pub fn new(element: impl Into<ElementType>, bytes: usize, alignment: usize) -> Self {
        Self { bytes, alignment, element: element.into() }
    }

    /// Extent of `rows × columns` elements, which [`Stored::check`] has bounded.
    pub fn of(dense: &Dense, rows: usize, columns: usize) -> Self {
        Self::of_rows(dense.dtype.into(), dense.extent(rows, columns), dense.aligned16)
    }

    /// Extent of `batch` matrices of `rows × columns` elements, already bounded.
    pub fn of_batch<T: Copy + Into<ElementType>>(
        dense: &BatchedDense<T>,
        batch: usize,
        rows: usize,
        columns: usize,
    ) -> Self {
        Self::of_rows(dense.dtype.into(), dense.extent(batch, rows, columns), dense.aligned16)
    }

    /// Extent of `count` elements, including gaps between rows.
    fn of_rows(element: ElementType, count: Option<u64>, aligned16: bool) -> Self {
        let width = element.bytes();
        let bytes = (count.unwrap_or(u64::MAX) as usize).saturating_mul(width);
        Self { bytes, alignment: if aligned16 { WIDE_ACCESS } else { width }, element }
    }

    /// Extent of `count` contiguous values.
    pub fn of_values(element: impl Into<ElementType>, count: usize) -> Self {
        let element = element.into();
        Self { bytes: count.saturating_mul(element.bytes()), alignment: element.bytes(), element }
    }

    /// Length in bytes.
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// Element type.
    pub fn element(self) -> ElementType {
        self.element
    }
}

/// Portion of the planned tokens. `None` means all of them.
///
/// # Errors
/// [`Error::OutOfRange`] for more tokens than planned.
pub(crate) fn portion_of(tokens: Option<usize>, planned: usize) -> Result<Option<Portion>, Error> {
    match tokens {
        None => Ok(None),
        Some(tokens) if tokens == planned => Ok(None),
        Some(got) => match Portion::new(got, planned) {
            Some(portion) => Ok(Some(portion)),
            None => Err(Error::OutOfRange { name: "tokens of a run", least: 0, most: planned, got }),
        },
    }
}

/// Zeroes the extent after previous work of `stream`: the result
/// of a run without tokens.
pub(crate) fn zero(
    device: &dyn Device,
    stream: &Stream,
    view: Option<BufferMut<'_>>,
    extent: Option<Extent>,
) -> Result<(), Error> {
    let (Some(view), Some(extent)) = (view, extent) else { return Ok(()) };
    Ok(device.fill(stream, view.slice(0..extent.bytes)?, 0)?)
}

/// Checks the element type of memory. Untyped memory may hold anything.
pub(crate) fn check_element(operand: &'static str, expected: ElementType, view: BufferRef<'_>) -> Result<(), Error> {
    match view.element() {
        ElementType::Bytes => Ok(()),
        got if got == expected => Ok(()),
        got => Err(Error::WrongElementType { operand, expected, got }),
    }
}

/// Operand checks for one device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checks(pub DeviceId);

impl Checks {
    /// Checks that an object is on the device.
    pub fn device(self, operand: &'static str, got: DeviceId) -> Result<(), Error> {
        let expected = self.0;
        if got == expected { Ok(()) } else { Err(Error::WrongDevice { operand, expected, got }) }
    }

    /// Checks device, element type, length and alignment of a view.
    pub fn view(self, operand: &'static str, view: BufferRef<'_>, extent: Extent) -> Result<(), Error> {
        self.device(operand, view.device())?;
        check_element(operand, extent.element, view)?;
        if view.len() < extent.bytes {
            return Err(Error::BufferTooShort { operand, expected: extent.bytes, got: view.len() });
        }
        let got = view.alignment();
        if got < extent.alignment {
            return Err(Error::Misaligned { operand, expected: extent.alignment, got });
        }
        Ok(())
    }

    /// Workspace of a plan that needs `expected` bytes: its own or a part of another
    /// buffer. None if it needs none; `why` explains the need.
    pub fn workspace<'a>(
        self,
        workspace: Option<BufferMut<'a>>,
        expected: usize,
        why: &'static str,
    ) -> Result<Option<BufferMut<'a>>, Error> {
        const OPERAND: &str = "workspace";
        if let Some(workspace) = &workspace {
            self.device(OPERAND, workspace.view().device())?;
        }
        if expected == 0 {
            return Ok(None);
        }
        let workspace = workspace.ok_or(Error::MissingOperand { operand: OPERAND, why })?;
        self.view(OPERAND, workspace.view(), Extent::new(ElementType::Bytes, expected, 1))?;
        Ok(Some(workspace))
    }

    /// Checks that an operand is present exactly if the plan uses it (`extent` is
    /// some). `why` explains the use.
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

/// Read or write view.
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
