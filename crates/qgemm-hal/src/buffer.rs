//! Device memory: owned buffers and borrowed views.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use qgemm_formats::ElementType;

use crate::caps::DeviceId;
use crate::error::HalError;

/// A backend's memory object behind a [`Buffer`].
pub trait RawBuffer: Any + Send + Sync + fmt::Debug {
    /// Its device.
    fn device(&self) -> DeviceId;
    /// The concrete type, for downcasts by its backend.
    fn as_any(&self) -> &dyn Any;
    /// Alignment of the first byte: a power of two in bytes.
    /// Caller-owned memory may be aligned less than
    /// [`Device::allocate`](crate::Device::allocate) promises.
    fn alignment(&self) -> usize {
        256
    }
    /// Checks the guard bands, which debug builds keep around every allocation.
    ///
    /// # Errors
    /// [`HalError::GuardBand`] when something was written outside the buffer.
    fn check_guards(&self) -> Result<(), HalError> {
        Ok(())
    }
}

/// Memory on a device. Dropping it frees the memory after all
/// work submitted before. Parts made by [`Buffer::split_off`] share the
/// memory, which is freed with the last part.
///
/// A buffer remembers its element type if one was stated
/// ([`Buffer::typed`]); so do its views and parts.
#[derive(Debug)]
pub struct Buffer {
    raw: Arc<dyn RawBuffer>,
    /// Offset of the first byte in the object. No other
    /// `Buffer` shares these bytes.
    offset: usize,
    len: usize,
    element: ElementType,
}

impl Buffer {
    /// Wraps a backend's memory object of `len` usable bytes, whose element type nobody stated.
    pub fn from_raw(raw: Arc<dyn RawBuffer>, len: usize) -> Self {
        Self { raw, offset: 0, len, element: ElementType::Bytes }
    }

    /// The buffer as one of other elements; [`ElementType::Bytes`] makes plans take it for any operand. No byte changes.
    pub fn typed(self, element: impl Into<ElementType>) -> Self {
        Self { element: element.into(), ..self }
    }

    /// The type of its elements; [`ElementType::Bytes`] where nobody stated one.
    pub fn element(&self) -> ElementType {
        self.element
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its device.
    pub fn device(&self) -> DeviceId {
        self.raw.device()
    }

    /// The backend's object.
    pub fn raw(&self) -> &dyn RawBuffer {
        &*self.raw
    }

    /// A view of the whole buffer.
    pub fn view(&self) -> BufferRef<'_> {
        self.into()
    }

    /// A writable view of the whole buffer.
    pub fn view_mut(&mut self) -> BufferMut<'_> {
        self.into()
    }

    /// A view of the bytes `range`.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`].
    pub fn slice(&self, range: Range<usize>) -> Result<BufferRef<'_>, HalError> {
        self.view().slice(range)
    }

    /// A writable view of the bytes `range`.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`].
    pub fn slice_mut(&mut self, range: Range<usize>) -> Result<BufferMut<'_>, HalError> {
        self.view_mut().slice(range)
    }

    /// Splits the view at byte `at`.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`].
    pub fn split_at(&self, at: usize) -> Result<(BufferRef<'_>, BufferRef<'_>), HalError> {
        self.view().split_at(at)
    }

    /// Splits into two writable views at byte `at`.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`].
    pub fn split_at_mut(&mut self, at: usize) -> Result<(BufferMut<'_>, BufferMut<'_>), HalError> {
        self.view_mut().split_at(at)
    }

    /// Moves the bytes from `at` on into a separate buffer. The
    /// two share the allocation but no bytes, so that an engine
    /// can own the tensors of an arena. Every `at` that is
    /// a multiple of 256 keeps all alignments.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`].
    pub fn split_off(&mut self, at: usize) -> Result<Buffer, HalError> {
        check_range("splitting off", &(at..self.len), self.len)?;
        let (raw, element) = (Arc::clone(&self.raw), self.element);
        let rest = Buffer { raw, offset: self.offset + at, len: self.len - at, element };
        self.len = at;
        Ok(rest)
    }

    /// Several views at once. Writable views share no
    /// byte with any other view.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`], [`HalError::Overlap`].
    pub fn parts<const R: usize, const W: usize>(
        &mut self,
        read: [Range<usize>; R],
        write: [Range<usize>; W],
    ) -> Result<([BufferRef<'_>; R], [BufferMut<'_>; W]), HalError> {
        self.view_mut().parts(read, write)
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
    element: ElementType,
}

impl<'a> BufferRef<'a> {
    /// A view of `len` bytes at `offset` in a backend's
    /// memory object, of unknown element type.
    ///
    /// # Safety
    /// The bytes must belong to the object, or the object must
    /// support reading them. Nothing may write them for `'a`.
    pub unsafe fn from_raw(raw: &'a dyn RawBuffer, offset: usize, len: usize) -> Self {
        Self { raw, offset, len, element: ElementType::Bytes }
    }

    /// The view as one of other elements, as [`Buffer::typed`].
    pub fn typed(self, element: impl Into<ElementType>) -> Self {
        Self { element: element.into(), ..self }
    }

    /// The type of its elements; [`ElementType::Bytes`] where nobody stated one.
    pub fn element(&self) -> ElementType {
        self.element
    }

    /// The backend's object.
    pub fn raw(&self) -> &'a dyn RawBuffer {
        self.raw
    }

    /// Offset of the view in the object.
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

    /// Its device.
    pub fn device(&self) -> DeviceId {
        self.raw.device()
    }

    /// The bytes `range` of the view.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`].
    pub fn slice(self, range: Range<usize>) -> Result<BufferRef<'a>, HalError> {
        check_range("view", &range, self.len)?;
        Ok(self.part(range))
    }

    /// Bytes that are known to be in range.
    fn part(self, range: Range<usize>) -> BufferRef<'a> {
        BufferRef { offset: self.offset + range.start, len: range.len(), ..self }
    }

    /// Splits the view at byte `at`.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`].
    pub fn split_at(self, at: usize) -> Result<(BufferRef<'a>, BufferRef<'a>), HalError> {
        Ok((self.slice(0..at)?, self.slice(at..self.len)?))
    }

    /// Known alignment of the view's first byte: a
    /// power of two in bytes.
    pub fn alignment(&self) -> usize {
        let base = self.raw.alignment();
        if self.offset == 0 { base } else { base.min(1 << self.offset.trailing_zeros()) }
    }
}

impl<'a> From<&'a Buffer> for BufferRef<'a> {
    fn from(buffer: &'a Buffer) -> Self {
        BufferRef { raw: &*buffer.raw, offset: buffer.offset, len: buffer.len, element: buffer.element }
    }
}

/// A view of a [`Buffer`] with exclusive access while it lives.
#[derive(Debug)]
pub struct BufferMut<'a> {
    view: BufferRef<'a>,
}

impl<'a> BufferMut<'a> {
    /// A writable view of `len` bytes at `offset` in a
    /// backend's memory object.
    ///
    /// # Safety
    /// The bytes must belong to the object, or the object
    /// must support writing them. Nothing else may read
    /// or write them for `'a`.
    pub unsafe fn from_raw(raw: &'a dyn RawBuffer, offset: usize, len: usize) -> Self {
        // SAFETY: the caller promises exclusive access, which is
        // more than `BufferRef` needs.
        Self { view: unsafe { BufferRef::from_raw(raw, offset, len) } }
    }

    /// The bytes `range` of the view.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`].
    pub fn slice(self, range: Range<usize>) -> Result<BufferMut<'a>, HalError> {
        Ok(BufferMut { view: self.view.slice(range)? })
    }

    /// Splits the view at byte `at`.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`].
    pub fn split_at(self, at: usize) -> Result<(BufferMut<'a>, BufferMut<'a>), HalError> {
        let (before, behind) = self.view.split_at(at)?;
        Ok((BufferMut { view: before }, BufferMut { view: behind }))
    }

    /// A reborrow of the view for a shorter lifetime.
    pub fn reborrow(&mut self) -> BufferMut<'_> {
        BufferMut { view: self.view }
    }

    /// Several views of it at once: see [`Buffer::parts`].
    ///
    /// # Errors
    /// As [`Buffer::parts`].
    pub fn parts<const R: usize, const W: usize>(
        self,
        read: [Range<usize>; R],
        write: [Range<usize>; W],
    ) -> Result<([BufferRef<'a>; R], [BufferMut<'a>; W]), HalError> {
        let whole = self.view;
        read.iter().chain(&write).try_for_each(|range| check_range("view", range, whole.len))?;
        for (place, written) in write.iter().enumerate() {
            let others = read.iter().chain(&write[place + 1..]);
            // Empty ranges overlap nothing.
            let shares = |o: &&Range<usize>| o.start.max(written.start) < o.end.min(written.end);
            if let Some(other) = others.into_iter().find(shares) {
                return Err(HalError::Overlap { written: written.clone(), other: other.clone() });
            }
        }
        let view = |range: Range<usize>| whole.part(range);
        Ok((read.map(view), write.map(|range| BufferMut { view: view(range) })))
    }

    /// The view as one of other elements, as [`Buffer::typed`].
    pub fn typed(self, element: impl Into<ElementType>) -> Self {
        Self { view: self.view.typed(element) }
    }

    /// A read-only view of the same bytes.
    pub fn view(&self) -> BufferRef<'_> {
        self.view
    }

    /// The bytes as a [`BufferRef`], to be turned into
    /// a [`BufferMut`] again.
    pub(crate) fn into_ref(self) -> BufferRef<'a> {
        self.view
    }

    /// Turns the bytes of a [`BufferMut`] back into a writable view.
    /// No other view of them may be in use.
    pub(crate) fn of_exclusive(view: BufferRef<'a>) -> Self {
        Self { view }
    }
}

impl<'a> From<&'a BufferMut<'_>> for BufferRef<'a> {
    fn from(view: &'a BufferMut<'_>) -> Self {
        view.view()
    }
}

impl<'a> From<&'a mut BufferMut<'_>> for BufferMut<'a> {
    fn from(view: &'a mut BufferMut<'_>) -> Self {
        view.reborrow()
    }
}

impl<'a> From<&'a mut Buffer> for BufferMut<'a> {
    fn from(buffer: &'a mut Buffer) -> Self {
        BufferMut { view: BufferRef::from(&*buffer) }
    }
}

#[cfg(test)]
mod tests {
    use qgemm_formats::DType;

    use super::*;
    use crate::host_memory::HostMemory;
    use crate::noop;

    fn buffer(len: usize) -> Buffer {
        HostMemory::allocate(DeviceId::CPU, len, "test").expect("memory")
    }

    fn fill(view: BufferMut<'_>, value: u8) {
        HostMemory::fill(DeviceId::CPU, view, value).expect("host memory");
    }

    fn bytes(view: BufferRef<'_>) -> &[u8] {
        HostMemory::bytes(view).expect("host memory")
    }

    #[test]
    fn parts_of_a_view_are_written_side_by_side() {
        let mut whole = buffer(10);
        let (first, mut second) = whole.split_at_mut(4).expect("in range");
        fill(first, 1);
        fill(second.reborrow().slice(0..2).expect("in range"), 2);
        fill(second.slice(4..6).expect("in range"), 3);
        assert_eq!(bytes(whole.view()), [1, 1, 1, 1, 2, 2, 0, 0, 3, 3]);
        let (first, second) = whole.split_at(5).expect("in range");
        assert_eq!((bytes(first), second.offset(), bytes(second)), (&[1, 1, 1, 1, 2][..], 5, &[2, 0, 0, 3, 3][..]));
        assert!(matches!(whole.split_at_mut(11), Err(HalError::OutOfBounds { end: 11, len: 10, .. })));
    }

    #[test]
    fn owned_parts_keep_the_memory_and_know_their_place() {
        let mut arena = buffer(1024);
        let mut d = arena.split_off(512).expect("in range");
        let mut tail = d.split_off(500).expect("in range");
        assert!(arena.split_off(513).is_err() && tail.split_off(13).is_err());
        assert_eq!((arena.len(), d.len(), tail.len()), (512, 500, 12));
        assert_eq!((arena.view().alignment(), d.view().alignment(), tail.view().alignment()), (256, 256, 4));
        fill((&mut arena).into(), 1);
        fill((&mut d).into(), 2);
        fill(tail.slice_mut(2..4).expect("in range"), 3);
        drop(arena);
        assert!(bytes(d.view()).iter().all(|&b| b == 2) && d.raw().check_guards().is_ok());
        assert_eq!(bytes(tail.slice(0..5).expect("in range")), [0, 0, 3, 3, 0]);
        // Views of several parts at once count from the part's own start, too.
        let ([read, _], [written, _]) = tail.parts([2..4, 0..0], [4..6, 0..0]).expect("apart");
        assert_eq!(bytes(read), [3, 3]);
        fill(written, 4);
        assert_eq!(bytes(tail.view()), [0, 0, 3, 3, 4, 4, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn views_and_parts_remember_the_type_of_elements() {
        let half = ElementType::Number(DType::F16);
        let mut whole = buffer(1024).typed(half);
        let rest = whole.split_off(512).expect("in range");
        let elements = [rest.element(), whole.element(), whole.slice(0..2).expect("in range").element()];
        assert_eq!(elements, [half; 3]);
        let (before, behind) = whole.split_at_mut(4).expect("in range");
        assert_eq!([before.view().element(), behind.slice(0..8).expect("in range").view().element()], [half; 2]);
        let ([read, _], [written, _]) = whole.parts([0..8, 0..0], [16..32, 0..0]).expect("apart");
        assert_eq!([read.element(), written.view().element()], [half; 2]);
        assert_eq!(written.typed(ElementType::Bytes).view().element(), ElementType::Bytes);
        assert_eq!(buffer(4).element(), ElementType::Bytes);
    }

    #[test]
    fn parts_that_are_written_share_no_byte_with_another() {
        let device = noop::open("noop".parse().expect("a name")).expect("always there");
        let mut buffer = device.allocate(64, "a buffer").expect("memory");
        let lengths = |buffer: &mut Buffer, read: [Range<usize>; 2], write: [Range<usize>; 2]| {
            let (read, write) = buffer.parts(read, write)?;
            Ok::<_, HalError>((read.map(|view| view.len()), write.map(|view| view.view().len())))
        };
        // Read ranges may overlap each other, and empty ranges overlap nothing.
        let good = lengths(&mut buffer, [0..16, 8..16], [16..32, 20..20]).expect("they are apart");
        assert_eq!(good, ([16, 8], [16, 0]));
        for (read, write) in [([0..17, 0..0], [16..32, 40..64]), ([0..0, 0..0], [16..32, 31..64])] {
            assert!(matches!(lengths(&mut buffer, read, write), Err(HalError::Overlap { .. })));
        }
        assert!(matches!(lengths(&mut buffer, [0..65, 0..0], [0..0, 0..0]), Err(HalError::OutOfBounds { .. })));
    }
}
