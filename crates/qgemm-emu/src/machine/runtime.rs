//! Function table that kernels call the emulator through.

use std::ffi::c_void;
use std::os::raw::c_char;

use super::callbacks::{self, Place};

/// Function table (`EmuRuntime` in `kernels/emu.cuh`).
#[repr(C)]
pub(crate) struct Runtime {
    place: extern "C" fn() -> *const Place,
    load_shared: unsafe extern "C" fn(*const u8, u32, *mut u8, *const c_char, u32),
    store_shared: unsafe extern "C" fn(*mut u8, u32, *const u8, *const c_char, u32),
    load_global: unsafe extern "C" fn(*const u8, u32, *mut u8, u32, *const c_char, u32),
    store_global: unsafe extern "C" fn(*mut u8, u32, *const u8, *const c_char, u32),
    atomic_add: unsafe extern "C" fn(*mut u32, u32, u32, *const c_char, u32) -> u32,
    atomic_add_shared: unsafe extern "C" fn(*mut u32, u32, *const c_char, u32) -> u32,
    store_relaxed: unsafe extern "C" fn(*mut u32, u32, *const c_char, u32),
    fence: unsafe extern "C" fn(),
    barrier: unsafe extern "C" fn(u32, u32, u32, *const c_char, u32),
    collective: unsafe extern "C" fn(u32, *const u32, u32, *mut u32, u32, *const c_char, u32),
    ldmatrix: unsafe extern "C" fn(u32, u32, *const c_void, *mut u32, *const c_char, u32),
    stmatrix: unsafe extern "C" fn(u32, u32, *mut c_void, *const u32, *const c_char, u32),
    cp_async: unsafe extern "C" fn(*mut u8, *const u8, u32, u32, *const c_char, u32),
    cp_async_commit: unsafe extern "C" fn(),
    cp_async_wait: unsafe extern "C" fn(u32, *const c_char, u32),
    cp_async_arrive: unsafe extern "C" fn(*mut u64, *const c_char, u32),
    bulk_copy: unsafe extern "C" fn(*mut u8, *const u8, u32, *mut u64, *const c_char, u32),
    grid_wait: unsafe extern "C" fn(),
    mbarrier_init: unsafe extern "C" fn(*mut u64, u32, *const c_char, u32),
    mbarrier_fence: unsafe extern "C" fn(),
    mbarrier_arrive: unsafe extern "C" fn(*mut u64, u32, *const c_char, u32),
    mbarrier_wait: unsafe extern "C" fn(*mut u64, u32, *const c_char, u32),
    tensor_copy: unsafe extern "C" fn(*mut u8, *const c_void, *const i32, u32, *mut u64, *const c_char, u32),
    proxy_fence: unsafe extern "C" fn(),
    wgmma_fence: unsafe extern "C" fn(),
    wgmma: unsafe extern "C" fn(*mut f32, u32, *const u32, u64, u32, u32, u32, *const c_char, u32),
    wgmma_shared: unsafe extern "C" fn(*mut f32, u32, u64, u64, u32, u32, u32, u32, *const c_char, u32),
    wgmma_commit: unsafe extern "C" fn(),
    wgmma_wait: unsafe extern "C" fn(u32, *const c_char, u32),
    set_registers: unsafe extern "C" fn(u32, *const c_char, u32),
}

impl Runtime {
    /// The function table of this emulator.
    pub(crate) const TABLE: Runtime = Runtime {
        place: callbacks::place,
        load_shared: callbacks::load_shared,
        store_shared: callbacks::store_shared,
        load_global: callbacks::load_global,
        store_global: callbacks::store_global,
        atomic_add: callbacks::atomic_add,
        atomic_add_shared: callbacks::atomic_add_shared,
        store_relaxed: callbacks::store_relaxed,
        fence: callbacks::fence,
        barrier: callbacks::barrier,
        collective: callbacks::collective,
        ldmatrix: callbacks::ldmatrix,
        stmatrix: callbacks::stmatrix,
        cp_async: callbacks::cp_async,
        cp_async_commit: callbacks::cp_async_commit,
        cp_async_wait: callbacks::cp_async_wait,
        cp_async_arrive: callbacks::cp_async_arrive,
        bulk_copy: callbacks::bulk_copy,
        grid_wait: callbacks::grid_wait,
        mbarrier_init: callbacks::mbarrier_init,
        mbarrier_fence: callbacks::mbarrier_fence,
        mbarrier_arrive: callbacks::mbarrier_arrive,
        mbarrier_wait: callbacks::mbarrier_wait,
        tensor_copy: callbacks::tensor_copy,
        proxy_fence: callbacks::proxy_fence,
        wgmma_fence: callbacks::wgmma_fence,
        wgmma: callbacks::wgmma,
        wgmma_shared: callbacks::wgmma_shared,
        wgmma_commit: callbacks::wgmma_commit,
        wgmma_wait: callbacks::wgmma_wait,
        set_registers: callbacks::set_registers,
    };
}
