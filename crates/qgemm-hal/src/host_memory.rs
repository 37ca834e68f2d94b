//! Buffers in host memory, for devices that run on
//! the host (`cpu`, `noop`).
//!
//! A [`HostMemory`] exists only inside a [`Buffer`] or a [`HostSlice`]. A
//! buffer cannot be cloned and its parts share no bytes; a
//! slice borrows its bytes. Borrows of these objects therefore are borrows
//! of the bytes, and views can be turned into slices safely.

use std::alloc::{Layout, alloc, dealloc};
use std::any::Any;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;

use qgemm_formats::ElementType;

use crate::buffer::{Buffer, BufferMut, BufferRef, RawBuffer};
use crate::caps::DeviceId;
use crate::error::HalError;

/// Alignment of every allocation in bytes, as
/// [`Device::allocate`](crate::Device::allocate) promises.
const ALIGNMENT: usize = 256;
/// Bytes of a guard band. The front band also keeps
/// the usable bytes aligned.
const GUARD_BYTES: usize = if cfg!(debug_assertions) { ALIGNMENT } else { 0 };
/// Fill byte of guard bands: a conspicuous float
/// and an implausible index.
const GUARD_PATTERN: u8 = 0xa5;
/// Huge page size; larger allocations are aligned to it. Weights are
/// read once from end to end, and a TLB miss for
/// every 4 KiB costs about a tenth of the bandwidth.
const HUGE_PAGE: usize = 2 << 20;

/// Host memory behind a [`Buffer`].
#[derive(Debug)]
pub struct HostMemory {
    device: DeviceId,
    /// First usable byte.
    start: NonNull<u8>,
    len: usize,
    /// The whole allocation with its guard bands; `None`
    /// for caller-owned memory.
    allocation: Option<Layout>,
}

// SAFETY: the bytes are only reached through views of the
// `Buffer` that owns this object, so they are shared and
// mutated under the same rules as those of a `Vec<u8>`,
// which is `Send` and `Sync`.
unsafe impl Send for HostMemory {}
// SAFETY: as above; no method of a shared `HostMemory` writes, and
// guard bands are written only at creation.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates `len` zeroed bytes for `device`, aligned to 256 bytes. Debug
    /// builds add guard bands. `what` names the allocation in errors.
    ///
    /// # Errors
    /// [`HalError::OutOfMemory`].
    pub fn allocate(device: DeviceId, len: usize, what: &'static str) -> Result<Buffer, HalError> {
        let out_of_memory = || HalError::OutOfMemory { device, bytes: len, what, free: None };
        let layout = len
            .max(1)
            .checked_add(2 * GUARD_BYTES)
            .and_then(|bytes| {
                let alignment = if bytes < HUGE_PAGE { ALIGNMENT } else { HUGE_PAGE };
                Layout::from_size_align(bytes, alignment).ok()
            })
            .ok_or_else(out_of_memory)?;
        // SAFETY: the layout's size is at least 1.
        let base = NonNull::new(unsafe { alloc(layout) }).ok_or_else(out_of_memory)?;
        if layout.align() == HUGE_PAGE {
            ask_for_huge_pages(base, layout.size());
        }
        // SAFETY: the allocation is GUARD_BYTES + max(len, 1) +
        // GUARD_BYTES long, so the front band, the first usable byte and
        // the band behind the last usable byte all lie within it;
        // nobody else knows of it yet.
        let start = unsafe {
            base.as_ptr().write_bytes(GUARD_PATTERN, GUARD_BYTES);
            let start = base.add(GUARD_BYTES);
            start.as_ptr().write_bytes(0, len.max(1));
            start.as_ptr().add(len).write_bytes(GUARD_PATTERN, GUARD_BYTES);
            start
        };
        let memory = Self { device, start, len, allocation: Some(layout) };
        Ok(Buffer::from_raw(Arc::new(memory), len))
    }

    /// A buffer over `len` caller-owned bytes, without a
    /// copy and without guard bands.
    ///
    /// # Safety
    /// Until the buffer is dropped, `start..start + len` must be initialised
    /// memory that nothing else writes. Nothing else may read it while
    /// a [`BufferMut`] of the buffer lives.
    pub unsafe fn borrow(device: DeviceId, start: NonNull<u8>, len: usize) -> Buffer {
        Buffer::from_raw(Arc::new(Self { device, start, len, allocation: None }), len)
    }

    /// Bytes of a view, or `None` when it
    /// is not host memory.
    pub fn bytes(view: BufferRef<'_>) -> Option<&[u8]> {
        let memory = view.raw().as_any().downcast_ref::<Self>()?;
        assert!(view.offset() <= memory.len && view.len() <= memory.len - view.offset(), "views lie in their buffer");
        // SAFETY: the range lies in the memory (asserted), which is initialised
        // and lives as long as the buffer that `view` borrows; that
        // borrow also keeps every `BufferMut` of the buffer away.
        Some(unsafe { std::slice::from_raw_parts(memory.start.as_ptr().add(view.offset()), view.len()) })
    }

    /// Bytes of a writable view, or `None` when
    /// it is not host memory.
    pub fn bytes_mut(view: BufferMut<'_>) -> Option<&mut [u8]> {
        let (offset, len) = (view.view().offset(), view.view().len());
        let memory = view.view().raw().as_any().downcast_ref::<Self>()?;
        assert!(offset <= memory.len && len <= memory.len - offset, "views lie in their buffer");
        let start = memory.start;
        // SAFETY: as in `bytes`; and `view`, consumed here, is the only
        // view of the buffer for its lifetime.
        Some(unsafe { std::slice::from_raw_parts_mut(start.as_ptr().add(offset), len) })
    }

    /// Address of a view's first byte, or `None` when it is
    /// not host memory. For devices whose kernels take addresses: a kernel
    /// may only access what the views of its launch allow.
    pub fn address(view: BufferRef<'_>) -> Option<NonNull<u8>> {
        let memory = view.raw().as_any().downcast_ref::<Self>()?;
        assert!(view.offset() <= memory.len && view.len() <= memory.len - view.offset(), "views lie in their buffer");
        // SAFETY: the offset lies in the memory (asserted).
        Some(unsafe { memory.start.add(view.offset()) })
    }

    /// Copies `src` to the start of `dst`.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`], or [`HalError::WrongDevice`] when
    /// `dst` does not belong to `device`.
    pub fn upload(device: DeviceId, src: &[u8], dst: BufferMut<'_>) -> Result<(), HalError> {
        let bytes = Self::of_device_mut(device, dst, "destination of an upload")?;
        let len = bytes.len();
        let Some(to) = bytes.get_mut(..src.len()) else {
            return Err(HalError::OutOfBounds { what: "upload", start: 0, end: src.len(), len });
        };
        to.copy_from_slice(src);
        Ok(())
    }

    /// Copies the first `dst.len()` bytes of `src` to `dst`.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`], or [`HalError::WrongDevice`] when
    /// `src` does not belong to `device`.
    pub fn download(device: DeviceId, src: BufferRef<'_>, dst: &mut [u8]) -> Result<(), HalError> {
        let bytes = Self::of_device(device, src, "source of a download")?;
        let Some(from) = bytes.get(..dst.len()) else {
            return Err(HalError::OutOfBounds { what: "download", start: 0, end: dst.len(), len: bytes.len() });
        };
        dst.copy_from_slice(from);
        Ok(())
    }

    /// Sets every byte of `dst` to `value`.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] when `dst` does not belong to `device`.
    pub fn fill(device: DeviceId, dst: BufferMut<'_>, value: u8) -> Result<(), HalError> {
        Self::of_device_mut(device, dst, "destination of a fill")?.fill(value);
        Ok(())
    }

    /// Bytes of a view of `device`'s memory;
    /// `what` names it in errors.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`].
    pub fn of_device<'a>(device: DeviceId, view: BufferRef<'a>, what: &'static str) -> Result<&'a [u8], HalError> {
        if view.device() != device {
            return Err(HalError::WrongDevice { device, what });
        }
        Self::bytes(view).ok_or(HalError::WrongDevice { device, what })
    }

    /// Bytes of a writable view of `device`'s memory;
    /// `what` names it in errors.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`].
    pub fn of_device_mut<'a>(
        device: DeviceId,
        view: BufferMut<'a>,
        what: &'static str,
    ) -> Result<&'a mut [u8], HalError> {
        if view.view().device() != device {
            return Err(HalError::WrongDevice { device, what });
        }
        Self::bytes_mut(view).ok_or(HalError::WrongDevice { device, what })
    }

    /// The overwritten guard band, if any.
    fn broken_guard(&self) -> Option<&'static str> {
        self.allocation?;
        let intact = |offset: isize| {
            // SAFETY: an owned allocation has GUARD_BYTES bytes before `start` and
            // after `start + len`, written once at creation. Only a faulty
            // kernel writes there, which is the bug this looks for.
            let band = unsafe { std::slice::from_raw_parts(self.start.as_ptr().offset(offset), GUARD_BYTES) };
            band.iter().all(|&b| b == GUARD_PATTERN)
        };
        match (intact(-(GUARD_BYTES as isize)), intact(self.len as isize)) {
            (true, true) => None,
            (false, _) => Some("the band in front"),
            (true, false) => Some("the band behind"),
        }
    }
}

/// Caller-owned bytes as an operand on a host device,
/// without a copy or an allocation.
#[derive(Debug)]
pub struct HostSlice<'a> {
    memory: HostMemory,
    element: ElementType,
    bytes: PhantomData<&'a [u8]>,
}

impl<'a> HostSlice<'a> {
    /// Wraps `bytes` of type `element` as memory of `device`.
    pub fn new(device: DeviceId, bytes: &'a [u8], element: ElementType) -> Self {
        let memory = HostMemory { device, start: NonNull::from(bytes).cast(), len: bytes.len(), allocation: None };
        Self { memory, element, bytes: PhantomData }
    }
}

impl<'v> From<&'v HostSlice<'_>> for BufferRef<'v> {
    fn from(slice: &'v HostSlice<'_>) -> Self {
        // SAFETY: the memory is all of the slice's, which is borrowed for longer than `'v`, to be read.
        unsafe { BufferRef::from_raw(&slice.memory, 0, slice.memory.len) }.typed(slice.element)
    }
}

/// Caller-owned bytes as a writable operand; see [`HostSlice`].
#[derive(Debug)]
pub struct HostSliceMut<'a> {
    memory: HostMemory,
    element: ElementType,
    bytes: PhantomData<&'a mut [u8]>,
}

impl<'a> HostSliceMut<'a> {
    /// Wraps `bytes` of type `element` as memory of `device`.
    pub fn new(device: DeviceId, bytes: &'a mut [u8], element: ElementType) -> Self {
        let len = bytes.len();
        let memory = HostMemory { device, start: NonNull::from(bytes).cast(), len, allocation: None };
        Self { memory, element, bytes: PhantomData }
    }
}

impl<'v> From<&'v HostSliceMut<'_>> for BufferRef<'v> {
    fn from(slice: &'v HostSliceMut<'_>) -> Self {
        // SAFETY: the memory is all of the slice's, which is borrowed for longer than `'v`; while `slice` is borrowed to be
        // read, no writable view is made of it.
        unsafe { BufferRef::from_raw(&slice.memory, 0, slice.memory.len) }.typed(slice.element)
    }
}

impl<'v> From<&'v mut HostSliceMut<'_>> for BufferMut<'v> {
    fn from(slice: &'v mut HostSliceMut<'_>) -> Self {
        // SAFETY: the memory is all of the slice's, which is borrowed to be written for longer than `'v`, and `slice` makes
        // no other view meanwhile.
        unsafe { BufferMut::from_raw(&slice.memory, 0, slice.memory.len) }.typed(slice.element)
    }
}

impl RawBuffer for HostMemory {
    fn device(&self) -> DeviceId {
        self.device
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn alignment(&self) -> usize {
        ALIGNMENT.min(1 << self.start.as_ptr().addr().trailing_zeros())
    }

    fn check_guards(&self) -> Result<(), HalError> {
        match self.broken_guard() {
            None => Ok(()),
            Some(what) => Err(HalError::GuardBand { device: self.device, len: self.len, what }),
        }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let Some(layout) = self.allocation else { return };
        if let Some(what) = self.broken_guard() {
            tracing::error!(device = %self.device, len = self.len, what, "a write left its buffer");
        }
        // SAFETY: `start - GUARD_BYTES` is the pointer that
        // `alloc` returned for this layout.
        unsafe { dealloc(self.start.as_ptr().sub(GUARD_BYTES), layout) }
    }
}

/// Asks the system for huge pages behind `len` untouched
/// bytes. A refusal is harmless.
fn ask_for_huge_pages(start: NonNull<u8>, len: usize) {
    #[cfg(target_os = "linux")]
    // SAFETY: the range is our allocation, and the advice
    // does not change its contents.
    unsafe {
        libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, len);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(len: usize) -> Buffer {
        HostMemory::allocate(DeviceId::CPU, len, "test").expect("memory")
    }

    #[test]
    fn allocations_are_zeroed_aligned_and_guarded() {
        for len in [0, 1, 255, 256, 1000] {
            let buffer = buffer(len);
            let bytes = HostMemory::bytes((&buffer).into()).expect("host memory");
            assert_eq!((bytes.len(), bytes.as_ptr() as usize % ALIGNMENT), (len, 0));
            assert!(bytes.iter().all(|&b| b == 0));
            buffer.raw().check_guards().expect("intact");
        }
    }

    #[test]
    fn copies_move_bytes_and_refuse_what_does_not_fit() {
        let mut b = buffer(4);
        HostMemory::upload(DeviceId::CPU, &[1, 2, 3], (&mut b).into()).expect("fits");
        HostMemory::fill(DeviceId::CPU, b.slice_mut(1..2).expect("in range"), 9).expect("fits");
        let mut out = [7; 4];
        HostMemory::download(DeviceId::CPU, (&b).into(), &mut out).expect("fits");
        assert_eq!(out, [1, 9, 3, 0]);
        let long = HostMemory::upload(DeviceId::CPU, &[0; 5], (&mut b).into());
        assert!(matches!(long, Err(HalError::OutOfBounds { end: 5, len: 4, .. })));
        let long = HostMemory::download(DeviceId::CPU, b.slice(2..4).expect("in range"), &mut out);
        assert!(matches!(long, Err(HalError::OutOfBounds { end: 4, len: 2, .. })));
        let other: DeviceId = "noop".parse().expect("a device name");
        assert!(matches!(HostMemory::fill(other, (&mut b).into(), 0), Err(HalError::WrongDevice { .. })));
    }

    #[test]
    fn an_impossible_size_is_an_error() {
        let error = HostMemory::allocate(DeviceId::CPU, usize::MAX - 8, "test").expect_err("too large");
        assert!(matches!(error, HalError::OutOfMemory { what: "test", .. }), "{error}");
    }

    #[test]
    fn borrowed_memory_is_the_callers() {
        let mut owned = [0u8; 8];
        // SAFETY: `owned` outlives the buffer and is not touched meanwhile.
        let mut buffer = unsafe { HostMemory::borrow(DeviceId::CPU, NonNull::from(&mut owned).cast(), 8) };
        HostMemory::fill(DeviceId::CPU, (&mut buffer).into(), 3).expect("host memory");
        assert_eq!(buffer.raw().alignment(), 256.min(1 << owned.as_ptr().addr().trailing_zeros()));
        buffer.raw().check_guards().expect("no guards to break");
        drop(buffer);
        assert_eq!(owned, [3; 8]);
    }

    #[test]
    fn slices_are_read_and_written_in_place() {
        let (read, mut written) = ([1u8, 2, 3], [0u8; 4]);
        let source = HostSlice::new(DeviceId::CPU, &read, ElementType::Bytes);
        let mut target = HostSliceMut::new(DeviceId::CPU, &mut written, ElementType::Bytes);
        let view = BufferRef::from(&source).slice(1..3).expect("in range");
        HostMemory::upload(DeviceId::CPU, HostMemory::bytes(view).expect("host memory"), (&mut target).into())
            .expect("fits");
        assert_eq!(HostMemory::bytes((&target).into()), Some(&[2, 3, 0, 0][..]));
        assert!(HostMemory::upload(DeviceId::CPU, &[0; 5], (&mut target).into()).is_err());
        assert_eq!(written, [2, 3, 0, 0]);
    }

    #[cfg(debug_assertions)]
    #[test]
    fn writes_beyond_either_end_are_found() {
        for (at, what) in [(-1isize, "the band in front"), (10, "the band behind")] {
            let buffer = buffer(10);
            let memory = buffer.raw().as_any().downcast_ref::<HostMemory>().expect("host memory");
            // SAFETY: the byte lies in a guard band of this allocation.
            unsafe { memory.start.as_ptr().offset(at).write(0) };
            let error = buffer.raw().check_guards().expect_err("a broken band");
            assert!(matches!(error, HalError::GuardBand { what: w, len: 10, .. } if w == what));
        }
    }
}
