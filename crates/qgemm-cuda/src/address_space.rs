//! [`AddressSpace`]: views of caller-owned memory by address.

use qgemm_hal::{BufferMut, BufferRef, Device, HalError};

use crate::gpu::Gpu;
use crate::memory::CudaBuffer;

/// The whole address space of a device, for viewing caller-owned memory.
/// When every tensor is a foreign pointer, a view needs neither an
/// allocation nor a reference count.
#[derive(Debug)]
pub struct AddressSpace {
    all: CudaBuffer,
}

impl AddressSpace {
    /// The address space of `device`.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] when it is not a CUDA device.
    pub fn new(device: &dyn Device) -> Result<Self, HalError> {
        let context = Gpu::of(device)?.context();
        // SAFETY: views of it are only made by unsafe functions,
        // whose callers vouch for them.
        Ok(Self { all: unsafe { CudaBuffer::wrap(context, 0, usize::MAX) } })
    }

    /// View of `len` bytes at `address`, without an element type. Plans accept it for
    /// operands of any type; [`BufferRef::typed`] sets a type.
    ///
    /// # Safety
    /// The bytes must be device memory accessible from the primary context of the
    /// device, and must stay allocated until all work that was given the view is done.
    /// The caller must order that work with other writers of the bytes.
    pub unsafe fn view(&self, address: u64, len: usize) -> BufferRef<'_> {
        // SAFETY: the object begins at address 0; the caller promises the rest.
        unsafe { BufferRef::from_raw(&self.all, address as usize, len) }
    }

    /// A writable view of `len` bytes at `address`, of unknown element type.
    ///
    /// # Safety
    /// As [`AddressSpace::view`]. The caller must also order work that was given
    /// the view with other readers of the bytes.
    pub unsafe fn view_mut(&self, address: u64, len: usize) -> BufferMut<'_> {
        // SAFETY: as in `view`.
        unsafe { BufferMut::from_raw(&self.all, address as usize, len) }
    }
}
