//! Device memory: own allocations with optional guard
//! bands, and caller-owned memory.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, OnceLock};

use cudarc::driver::{result, sys};
use qgemm_hal::{Buffer, BufferRef, DeviceId, HalError, RawBuffer};

use crate::driver::{self, DeviceContext};

/// Guard bytes before and after an allocation. A multiple
/// of the alignment that `Device::allocate` promises, so
/// that the usable part keeps it.
const GUARD_BYTES: usize = 256;
const GUARD_PATTERN: u8 = 0xa5;

/// Enables guard bands in release builds, too.
const GUARD_VARIABLE: &str = "QGEMM_GUARDS";

/// The memory object behind a [`Buffer`].
pub(crate) struct CudaBuffer {
    context: Arc<DeviceContext>,
    address: sys::CUdeviceptr,
    len: usize,
    ownership: Ownership,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ownership {
    /// Allocated here, with `guard` bytes before and after the usable part.
    Ours { guard: usize },
    /// Caller-owned; never freed.
    Caller,
}

impl CudaBuffer {
    /// Allocates `len` zeroed bytes. `stream` does the
    /// zeroing and is waited for.
    pub(crate) fn allocate(
        context: &Arc<DeviceContext>,
        stream: sys::CUstream,
        len: usize,
        what: &'static str,
    ) -> Result<Self, HalError> {
        context.bind()?;
        let guard = if guards_are_on() { GUARD_BYTES } else { 0 };
        let out_of_memory = |free| HalError::OutOfMemory { device: context.id(), bytes: len, what, free };
        // The driver refuses to allocate 0 bytes.
        let total = len.checked_add(2 * guard).ok_or_else(|| out_of_memory(None))?.max(1);
        // SAFETY: the context is current; the memory is written
        // below before anything reads it.
        let base = unsafe { result::malloc_sync(total) }.map_err(|e| match e.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                out_of_memory(result::mem_get_info().ok().map(|(free, _)| free as u64))
            }
            _ => HalError::Driver { device: context.id(), call: "cuMemAlloc", message: driver::describe(e) },
        })?;
        let buffer =
            Self { context: context.clone(), address: base + guard as u64, len, ownership: Ownership::Ours { guard } };
        buffer.initialise(stream, base, total, guard)?;
        Ok(buffer)
    }

    fn initialise(&self, stream: sys::CUstream, base: u64, total: usize, guard: usize) -> Result<(), HalError> {
        let context = &self.context;
        // SAFETY: `base .. base + total` was just allocated, and the
        // usable part lies within it.
        unsafe {
            if guard > 0 {
                context.check("cuMemsetD8Async", result::memset_d8_async(base, GUARD_PATTERN, total, stream))?;
            }
            if self.len > 0 {
                context.check("cuMemsetD8Async", result::memset_d8_async(self.address, 0, self.len, stream))?;
            }
        }
        // SAFETY: the stream belongs to the device in use.
        context.check("cuStreamSynchronize", unsafe { result::stream::synchronize(stream) })
    }

    /// Wraps caller-owned memory.
    ///
    /// # Safety
    /// As [`crate::wrap_device_ptr`].
    pub(crate) unsafe fn wrap(context: &Arc<DeviceContext>, address: u64, len: usize) -> Self {
        Self { context: context.clone(), address, len, ownership: Ownership::Caller }
    }

    pub(crate) fn into_buffer(self) -> Buffer {
        let len = self.len;
        Buffer::from_raw(Arc::new(self), len)
    }

    /// Compares one guard band with the pattern.
    fn check_band(&self, address: u64, bytes: usize, what: &'static str) -> Result<(), HalError> {
        let mut band = vec![0u8; bytes];
        // SAFETY: the band is part of this allocation, and the
        // destination is as long as the copy.
        self.context.check("cuMemcpyDtoH", unsafe { result::memcpy_dtoh_sync(&mut band, address) })?;
        if band.iter().any(|&b| b != GUARD_PATTERN) {
            return Err(HalError::GuardBand { device: self.context.id(), len: self.len, what });
        }
        Ok(())
    }
}

fn guards_are_on() -> bool {
    static ON: OnceLock<bool> = OnceLock::new();
    *ON.get_or_init(|| cfg!(debug_assertions) || std::env::var_os(GUARD_VARIABLE).is_some_and(|v| v == "1"))
}

impl RawBuffer for CudaBuffer {
    fn device(&self) -> DeviceId {
        self.context.id()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn alignment(&self) -> usize {
        1 << self.address.trailing_zeros().min(8)
    }

    fn check_guards(&self) -> Result<(), HalError> {
        let Ownership::Ours { guard } = self.ownership else { return Ok(()) };
        if guard == 0 {
            return Ok(());
        }
        self.context.bind()?;
        // Kernels on any stream may still be writing.
        self.context.check("cuCtxSynchronize", result::ctx::synchronize())?;
        self.check_band(self.address - guard as u64, guard, "before its first byte")?;
        self.check_band(self.address + self.len as u64, guard, "after its last byte")
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        let Ownership::Ours { guard } = self.ownership else { return };
        let freed = self.context.bind().and_then(|()| {
            // SAFETY: the address was returned by the driver and is freed
            // once. `cuMemFree` waits for work that uses the memory.
            self.context.check("cuMemFree", unsafe { result::free_sync(self.address - guard as u64) })
        });
        if let Err(error) = freed {
            tracing::warn!(%error, "device memory could not be freed");
        }
    }
}

impl fmt::Debug for CudaBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = if self.ownership == Ownership::Caller { ", the caller's" } else { "" };
        write!(f, "CudaBuffer({}, {:#x}, {} bytes{owner})", self.context.id(), self.address, self.len)
    }
}

/// Device address of the first byte of `view`; `what`
/// names the argument in errors.
///
/// # Errors
/// [`HalError::WrongDevice`] when the view is not memory of `device`.
pub(crate) fn device_address(device: DeviceId, view: BufferRef<'_>, what: &'static str) -> Result<u64, HalError> {
    match view.raw().as_any().downcast_ref::<CudaBuffer>() {
        Some(buffer) if buffer.context.id() == device => Ok(buffer.address + view.offset() as u64),
        _ => Err(HalError::WrongDevice { device, what }),
    }
}
