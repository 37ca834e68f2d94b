//! [`AddressSpace`]: memory of the caller's by its addresses.

use qgemm_hal::{BufferMut, BufferRef, Device, HalError};

use crate::gpu::Gpu;
use crate::memory::CudaBuffer;

/// All addresses of a device, to view the caller's memory with: where every tensor is a pointer of somebody else's, a view of
/// it takes neither an allocation nor a count of references.
#[derive(Debug)]
pub struct AddressSpace {
    all: CudaBuffer,
}

impl AddressSpace {
    /// The addresses of `device`.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] when it is not a CUDA device.
    pub fn new(device: &dyn Device) -> Result<Self, HalError> {
        let context = Gpu::of(device)?.context();
        // SAFETY: only views that callers vouch for are made of it.
        Ok(Self { all: unsafe { CudaBuffer::wrap(context, 0, usize::MAX) } })
    }

    /// A view of `len` bytes at `address`. What they hold is not known, so plans take the view for operands of any element type;
    /// [`BufferRef::typed`] states one, which plans then check.
    ///
    /// # Safety
    /// The bytes must be device memory accessible from the primary context of the device, and must stay allocated until
    /// all work that was given the view is done. That work and what else writes them must be ordered among themselves.
    pub unsafe fn view(&self, address: u64, len: usize) -> BufferRef<'_> {
        // SAFETY: the object begins at address 0; the rest is the caller's promise.
        unsafe { BufferRef::from_raw(&self.all, address as usize, len) }
    }

    /// A view of `len` bytes at `address`, to be written; of unknown elements, as [`AddressSpace::view`].
    ///
    /// # Safety
    /// As [`AddressSpace::view`]; and work that was given the view and what else reads the bytes must be ordered, too.
    pub unsafe fn view_mut(&self, address: u64, len: usize) -> BufferMut<'_> {
        // SAFETY: as in `view`.
        unsafe { BufferMut::from_raw(&self.all, address as usize, len) }
    }
}
