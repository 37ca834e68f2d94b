//! Memory that other GPUs write: of this process by peer access,
//! of other processes by IPC handles.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{ptr, slice};

use cudarc::driver::{result, sys};
use qgemm_hal::HalError;

use crate::driver::DeviceContext;

/// Unit of allocations: a smaller one may share its pages with others,
/// which a handle would give away, too (CUDA driver API,
/// `cuIpcGetMemHandle`).
const PAGE: usize = 2 << 20;
/// Bytes of a handle that another process opens.
pub const HANDLE_BYTES: usize = 64;

/// Device memory, zeroed.
#[derive(Debug)]
pub struct PeerMemory {
    context: Arc<DeviceContext>,
    address: u64,
    /// Whether it is another process's.
    is_opened: bool,
}

impl PeerMemory {
    /// Allocates `bytes` zeroed bytes, or more.
    pub fn allocate(context: &Arc<DeviceContext>, bytes: usize) -> Result<Self, HalError> {
        let bytes = bytes.next_multiple_of(PAGE);
        context.bind()?;
        // SAFETY: the context is current; the memory is zeroed below.
        let address = context.check("cuMemAlloc", unsafe { result::malloc_sync(bytes) })?;
        let memory = Self { context: Arc::clone(context), address, is_opened: false };
        // SAFETY: the bytes were just allocated.
        context.check("cuMemsetD8", unsafe { result::memset_d8_sync(address, 0, bytes) })?;
        context.check("cuCtxSynchronize", result::ctx::synchronize())?;
        Ok(memory)
    }

    /// Device address on every GPU that may access it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Handle by which another process opens it.
    pub fn handle(&self) -> Result<[u8; HANDLE_BYTES], HalError> {
        self.context.bind()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: the driver writes one handle, which lives through the
        // call, of an allocation's first byte.
        let status = unsafe { sys::cuIpcGetMemHandle(&mut handle, self.address) };
        self.context.check("cuIpcGetMemHandle", status.result())?;
        Ok(bytemuck::cast(handle.reserved))
    }

    /// Opens another process's memory for the device of `context`.
    pub fn open(context: &Arc<DeviceContext>, handle: [u8; HANDLE_BYTES]) -> Result<Self, HalError> {
        context.bind()?;
        let handle = sys::CUipcMemHandle { reserved: bytemuck::cast(handle) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: the driver checks the handle, and writes one address,
        // which lives through the call.
        let status = unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, flags) };
        context.check("cuIpcOpenMemHandle", status.result())?;
        Ok(Self { context: Arc::clone(context), address, is_opened: true })
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        let Self { context, address, is_opened } = self;
        let freed = context.bind().and_then(|()| match is_opened {
            // SAFETY: the address was opened once, and is closed once.
            true => context.check("cuIpcCloseMemHandle", unsafe { sys::cuIpcCloseMemHandle(*address) }.result()),
            // SAFETY: the address was allocated once, and is freed once.
            false => context.check("cuMemFree", unsafe { result::free_sync(*address) }),
        });
        if let Err(error) = freed {
            tracing::warn!(%error, "memory of a group of ranks could not be freed");
        }
    }
}

/// Whether the device of `context` may access memory of `peer`, from now
/// on.
pub fn enable_access(context: &DeviceContext, peer: &DeviceContext) -> Result<bool, HalError> {
    let device =
        |context: &DeviceContext| context.check("cuDeviceGet", result::device::get(context.id().ordinal as i32));
    let mut can = 0;
    // SAFETY: both devices exist; the driver writes one integer, which
    // lives through the call.
    let status = unsafe { sys::cuDeviceCanAccessPeer(&mut can, device(context)?, device(peer)?) };
    context.check("cuDeviceCanAccessPeer", status.result())?;
    if can == 0 {
        return Ok(false);
    }
    context.bind()?;
    // SAFETY: the context is current, and the peer's is alive.
    match unsafe { sys::cuCtxEnablePeerAccess(peer.handle(), 0) } {
        sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(true),
        status => context.check("cuCtxEnablePeerAccess", status.result()).map(|()| true),
    }
}

/// Words in host memory that kernels read and write.
#[derive(Debug)]
pub struct HostWords<const N: usize> {
    context: Arc<DeviceContext>,
    words: *mut AtomicU32,
    address: u64,
}

// SAFETY: the words are atomic, and live as long as this.
unsafe impl<const N: usize> Send for HostWords<N> {}
// SAFETY: as above.
unsafe impl<const N: usize> Sync for HostWords<N> {}

impl<const N: usize> HostWords<N> {
    /// Allocates zeroed words.
    pub fn allocate(context: &Arc<DeviceContext>) -> Result<Self, HalError> {
        context.bind()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the context is current; the words are zeroed below.
        let pointer = unsafe { result::malloc_host(N * size_of::<AtomicU32>(), flags) };
        let words = context.check("cuMemHostAlloc", pointer)?.cast::<AtomicU32>();
        // SAFETY: the allocation has room for `N` words, aligned to pages.
        unsafe { ptr::write_bytes(words, 0, N) };
        let mut made = Self { context: Arc::clone(context), words, address: 0 };
        // SAFETY: the memory was allocated with `DEVICEMAP`; the driver writes
        // one address, which lives through the call.
        let status = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut made.address, words.cast(), 0) };
        context.check("cuMemHostGetDevicePointer", status.result())?;
        Ok(made)
    }

    fn words(&self) -> &[AtomicU32] {
        // SAFETY: `N` words were allocated and zeroed, and are only
        // accessed as atomics while `self` lives.
        unsafe { slice::from_raw_parts(self.words, N) }
    }

    /// Address for kernels.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Word `i`.
    pub fn load(&self, i: usize) -> u32 {
        self.words()[i].load(Ordering::Relaxed)
    }

    /// Sets word `i`.
    pub fn store(&self, i: usize, value: u32) {
        self.words()[i].store(value, Ordering::Relaxed);
    }
}

impl<const N: usize> Drop for HostWords<N> {
    fn drop(&mut self) {
        let freed = self.context.bind().and_then(|()| {
            // SAFETY: the pointer was allocated once, and is freed once;
            // `OneShot` waits for its kernels before.
            self.context.check("cuMemFreeHost", unsafe { result::free_host(self.words.cast()) })
        });
        if let Err(error) = freed {
            tracing::warn!(%error, "memory of a group of ranks could not be freed");
        }
    }
}
