//! Device memory: owned buffers and borrowed views of them.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::caps::DeviceId;
use crate::error::HalError;

/// A backend's own memory object behind a [`Buffer`].
pub trait RawBuffer: Any + Send + Sync + fmt::Debug {
    /// The device it lives on.
    fn device(&self) -> DeviceId;
    /// The concrete type, for the backend that made it.
    fn as_any(&self) -> &dyn Any;
    /// The power of two in bytes that its first byte's address is a multiple of. Memory that a caller owns
    /// may have less than what [`Device::allocate`](crate::Device::allocate) promises.
    fn alignment(&self) -> usize {
        256
    }
    /// Checks the guard bands (debug builds keep some around every allocation).
    ///
    /// # Errors
    /// [`HalError::GuardBand`] when something was written outside the buffer.
    fn check_guards(&self) -> Result<(), HalError> {
        Ok(())
    }
}

/// Memory on a device. Freed on drop, after the work that was submitted before.
#[derive(Debug)]
pub struct Buffer {
    raw: Arc<dyn RawBuffer>,
    len: usize,
}

impl Buffer {
    /// Wraps a backend's memory object of `len` usable bytes.
    pub fn from_raw(raw: Arc<dyn RawBuffer>, len: usize) -> Self {
        Self { raw, len }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device it lives on.
    pub fn device(&self) -> DeviceId {
        self.raw.device()
    }

    /// The backend's own object.
    pub fn raw(&self) -> &dyn RawBuffer {
        &*self.raw
    }

    /// A view of the bytes `range`.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`].
    pub fn slice(&self, range: Range<usize>) -> Result<BufferRef<'_>, HalError> {
        check_range("view", &range, self.len)?;
        Ok(BufferRef { raw: &*self.raw, offset: range.start, len: range.len() })
    }

    /// A writable view of the bytes `range`.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`].
    pub fn slice_mut(&mut self, range: Range<usize>) -> Result<BufferMut<'_>, HalError> {
        check_range("view", &range, self.len)?;
        Ok(BufferMut { view: BufferRef { raw: &*self.raw, offset: range.start, len: range.len() } })
    }
}

fn check_range(what: &'static str, range: &Range<usize>, len: usize) -> Result<(), HalError> {
    if range.start > range.end || range.end > len {
        return Err(HalError::OutOfBounds { what, start: range.start, end: range.end, len });
    }
    Ok(())
}

/// A read-only view of a [`Buffer`].
#[derive(Clone, Copy, Debug)]
pub struct BufferRef<'a> {
    raw: &'a dyn RawBuffer,
    offset: usize,
    len: usize,
}

impl<'a> BufferRef<'a> {
    /// The backend's own object.
    pub fn raw(&self) -> &'a dyn RawBuffer {
        self.raw
    }

    /// First byte of the view within the object.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device it lives on.
    pub fn device(&self) -> DeviceId {
        self.raw.device()
    }

    /// The bytes `range` of the view.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`].
    pub fn slice(self, range: Range<usize>) -> Result<BufferRef<'a>, HalError> {
        check_range("view", &range, self.len)?;
        Ok(BufferRef { raw: self.raw, offset: self.offset + range.start, len: range.len() })
    }

    /// The largest power of two in bytes that the view's first byte is known to be a multiple of.
    pub fn alignment(&self) -> usize {
        let base = self.raw.alignment();
        if self.offset == 0 { base } else { base.min(1 << self.offset.trailing_zeros()) }
    }
}

impl<'a> From<&'a Buffer> for BufferRef<'a> {
    fn from(buffer: &'a Buffer) -> Self {
        BufferRef { raw: &*buffer.raw, offset: 0, len: buffer.len }
    }
}

/// A view of a [`Buffer`] that nothing else reads or writes while it lives.
#[derive(Debug)]
pub struct BufferMut<'a> {
    view: BufferRef<'a>,
}

impl<'a> BufferMut<'a> {
    /// The same bytes, for reading.
    pub fn view(&self) -> BufferRef<'_> {
        self.view
    }

    /// The bytes, to be made a [`BufferMut`] of again.
    pub(crate) fn into_ref(self) -> BufferRef<'a> {
        self.view
    }

    /// A writable view of bytes that came from a [`BufferMut`], of which no other view is in use.
    pub(crate) fn of_exclusive(view: BufferRef<'a>) -> Self {
        Self { view }
    }
}

impl<'a> From<&'a mut Buffer> for BufferMut<'a> {
    fn from(buffer: &'a mut Buffer) -> Self {
        BufferMut { view: BufferRef::from(&*buffer) }
    }
}
