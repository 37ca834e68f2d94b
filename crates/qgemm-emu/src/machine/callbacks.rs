//! Callbacks of kernels: the functions of `kernels/emu.cuh`. They run
//! on the calling thread's stack.

use std::cell::Cell;
use std::ffi::c_void;
use std::os::raw::c_char;
use std::slice;

use super::block::{self, Block, Wait};
use super::collective::Meeting;
use super::shared::Refused;
use super::tensor_copy::{MOST_DIMENSIONS, TensorMap};
use super::warpgroup::{Factor, LaneShare, Wgmma};
use crate::counters::Doing;
use crate::fault::Site;
use crate::model::WgmmaOperands;

/// Position of a thread (`EmuPlace` in `kernels/emu.cuh`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub thread: u32,
    pub threads: u32,
    pub block: [u32; 3],
    pub blocks: [u32; 3],
    pub shared: *mut u8,
}

thread_local! {
    /// The CTA that this host thread runs.
    static CURRENT: Cell<*mut Block<'static>> = const { Cell::new(std::ptr::null_mut()) };
}

/// Calls `run` with `block` as the current CTA of callbacks.
///
/// # Safety
/// `run` must use the CTA through the pointer only.
pub(super) unsafe fn with_current<R>(block: &mut Block<'_>, run: impl FnOnce(*mut Block<'_>) -> R) -> R {
    let pointer: *mut Block<'_> = block;
    let outer = CURRENT.replace(pointer.cast());
    let result = run(pointer);
    CURRENT.set(outer);
    result
}

/// The CTA of the calling thread.
///
/// # Safety
/// Callbacks only: a kernel runs, and no other reference to
/// its CTA is alive. The reference must not be held across
/// a switch to another thread.
unsafe fn current<'b>() -> &'b mut Block<'static> {
    // SAFETY: set by `with_current` around every run of kernels.
    unsafe { &mut *CURRENT.get() }
}

/// The CTA of the calling thread for a memory access. Stops
/// the CTA after too many accesses.
///
/// # Safety
/// As [`current`].
unsafe fn accessing<'b>(site: Site) -> &'b mut Block<'static> {
    // SAFETY: by the contract; the reference is not used
    // again when the CTA stops.
    unsafe {
        let block = current();
        if !block.note_access(site) {
            stop()
        }
        block
    }
}

/// Stops the CTA: switches to the scheduler, which never returns.
unsafe fn stop() -> ! {
    loop {
        // SAFETY: called on a fibre, with no
        // reference to the CTA alive.
        unsafe { block::suspend(CURRENT.get()) };
    }
}

/// Returns the value, or records the fault and stops the CTA.
///
/// # Safety
/// As [`current`]. A CTA reference held by the caller is not
/// used again after a fault, because the caller does not continue.
unsafe fn check<T>(result: Result<T, Refused>, site: Site) -> T {
    match result {
        Ok(value) => value,
        Err(refused) => {
            // SAFETY: by the contract.
            unsafe {
                current().fail(refused, site);
                stop()
            }
        }
    }
}

/// Waits for the other lanes of the warp
/// if this lane must.
///
/// # Safety
/// As [`check`].
unsafe fn wait_for_lanes(must: Result<bool, Refused>, site: Site) {
    // SAFETY: by the contract.
    unsafe {
        if check(must, site) {
            block::suspend(CURRENT.get());
        }
    }
}

/// Copies the bytes of one access, inline for instruction sizes.
///
/// # Safety
/// As [`pointer::copy_to_nonoverlapping`].
#[inline]
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: by the contract.
    unsafe {
        match bytes {
            16 => to.copy_from_nonoverlapping(from, 16),
            8 => to.copy_from_nonoverlapping(from, 8),
            4 => to.copy_from_nonoverlapping(from, 4),
            2 => to.copy_from_nonoverlapping(from, 2),
            _ => to.copy_from_nonoverlapping(from, bytes),
        }
    }
}

pub(super) extern "C" fn place() -> *const Place {
    // SAFETY: called by a kernel. The position's address stays
    // valid while the launch runs.
    unsafe { &raw const current().grid.place }
}

pub(super) unsafe extern "C" fn load_shared(
    address: *const u8,
    bytes: u32,
    out: *mut u8,
    file: *const c_char,
    line: u32,
) {
    let (site, bytes) = (Site { file, line }, bytes as usize);
    // SAFETY: called by a kernel; `out` has room for `bytes` bytes.
    unsafe {
        let block = accessing(site);
        let thread = block.current;
        let offset = check(block.grid.shared.offset(address.addr(), bytes, "reads"), site);
        check(block.grid.shared.read(offset, bytes, thread, &block.clocks), site);
        block.note_shared(Doing::Loads, site, thread, offset, bytes);
        copy(block.grid.shared.get(offset, bytes).as_ptr(), out, bytes);
    }
}

pub(super) unsafe extern "C" fn store_shared(
    address: *mut u8,
    bytes: u32,
    data: *const u8,
    file: *const c_char,
    line: u32,
) {
    let (site, bytes) = (Site { file, line }, bytes as usize);
    // SAFETY: called by a kernel; `data` is `bytes` bytes long.
    unsafe {
        let block = accessing(site);
        let thread = block.current;
        let offset = check(block.grid.shared.offset(address.addr(), bytes, "writes"), site);
        check(block.grid.shared.write(offset, bytes, thread, &block.clocks), site);
        block.note_shared(Doing::Stores, site, thread, offset, bytes);
        block.grid.shared.set(offset, slice::from_raw_parts(data, bytes));
    }
}

pub(super) unsafe extern "C" fn load_global(
    address: *const u8,
    bytes: u32,
    out: *mut u8,
    read_only: u32,
    file: *const c_char,
    line: u32,
) {
    let (site, bytes) = (Site { file, line }, bytes as usize);
    // SAFETY: called by a kernel; `out` has room for `bytes`
    // bytes. Once `place` has accepted the address, it is in an
    // operand that the launch may read.
    unsafe {
        let block = accessing(site);
        let thread = block.current;
        let waited = block.threads[thread].waited;
        let memory = &mut block.grid.memory;
        let place = check(memory.place(address.addr(), bytes, "reads"), site);
        check(memory.read(place, thread, &block.clocks, read_only != 0, waited), site);
        block.note_global(Doing::Loads, site, thread, address.addr(), bytes);
        copy(address, out, bytes);
    }
}

pub(super) unsafe extern "C" fn store_global(
    address: *mut u8,
    bytes: u32,
    data: *const u8,
    file: *const c_char,
    line: u32,
) {
    let (site, bytes) = (Site { file, line }, bytes as usize);
    // SAFETY: called by a kernel; `data` is `bytes` bytes long.
    // Once `write` has accepted the address, it is in an
    // operand that the launch may write.
    unsafe {
        let block = accessing(site);
        let thread = block.current;
        let waited = block.threads[thread].waited;
        let memory = &mut block.grid.memory;
        let place = check(memory.place(address.addr(), bytes, "writes"), site);
        check(memory.write(place, thread, &block.clocks, waited), site);
        block.note_global(Doing::Stores, site, thread, address.addr(), bytes);
        copy(data, address, bytes);
    }
}

/// `atom.add.acq_rel.gpu`, or `.relaxed`.
pub(super) unsafe extern "C" fn atomic_add(
    address: *mut u32,
    value: u32,
    relaxed: u32,
    file: *const c_char,
    line: u32,
) -> u32 {
    let site = Site { file, line };
    // SAFETY: called by a kernel. Once accepted, the address is in
    // an operand that the launch may write.
    unsafe {
        let ordered = accessing(site).order_atomic_add(address.addr(), relaxed != 0);
        check(ordered, site);
        let old = address.read();
        address.write(old.wrapping_add(value));
        old
    }
}

/// `atom.shared.add`.
pub(super) unsafe extern "C" fn atomic_add_shared(
    address: *mut u32,
    value: u32,
    file: *const c_char,
    line: u32,
) -> u32 {
    let site = Site { file, line };
    // SAFETY: called by a kernel. Once accepted, the
    // word is in shared memory.
    unsafe {
        let block = accessing(site);
        let thread = block.current;
        let offset = check(block.grid.shared.offset(address.addr(), size_of::<u32>(), "atom.add on"), site);
        check(block.grid.shared.add_atomically(offset, thread, &block.clocks), site);
        let old = address.read();
        address.write(old.wrapping_add(value));
        old
    }
}

/// `st.relaxed.gpu`.
pub(super) unsafe extern "C" fn store_relaxed(address: *mut u32, value: u32, file: *const c_char, line: u32) {
    let site = Site { file, line };
    // SAFETY: as `atomic_add`.
    unsafe {
        let ordered = current().order_relaxed_store(address.addr());
        check(ordered, site);
        address.write(value);
    }
}

/// `fence.acq_rel.gpu`.
pub(super) unsafe extern "C" fn fence() {
    // SAFETY: called by a kernel.
    let block = unsafe { current() };
    block.clocks.fence(block.current);
}

pub(super) unsafe extern "C" fn barrier(id: u32, threads: u32, waits: u32, file: *const c_char, line: u32) {
    let site = Site { file, line };
    // SAFETY: called by a kernel; no reference is
    // held across the switch.
    unsafe {
        let block = current();
        let arrived = block.arrive(id as usize, threads as usize, waits != 0, site);
        if check(arrived, site) {
            let block = current();
            block.threads[block.current].wait = Wait::Barrier(id as usize);
            block::suspend(CURRENT.get());
        }
    }
}

pub(super) unsafe extern "C" fn collective(
    op: u32,
    words: *const u32,
    word_count: u32,
    out: *mut u32,
    out_words: u32,
    file: *const c_char,
    line: u32,
) {
    let site = Site { file, line };
    // SAFETY: called by a kernel with `word_count` words at
    // `words` and room for `out_words` at `out`; no reference
    // is held across the switch.
    unsafe {
        // A barrier passes no words, and its pointer may be null.
        let words = if word_count == 0 { &[] } else { slice::from_raw_parts(words, word_count as usize) };
        wait_for_lanes(current().meet_lanes(Meeting::Registers(op as usize), words, site), site);
        let result = current().result(out_words as usize);
        out.copy_from_nonoverlapping(result.as_ptr(), result.len());
    }
}

pub(super) unsafe extern "C" fn ldmatrix(
    count: u32,
    transposed: u32,
    row: *const c_void,
    out: *mut u32,
    file: *const c_char,
    line: u32,
) {
    let site = Site { file, line };
    let meeting = Meeting::LoadMatrices { count: count as usize, transposed: transposed != 0 };
    // SAFETY: called by a kernel with room for `count` words at
    // `out`; no reference is held across the switch.
    unsafe {
        wait_for_lanes(current().meet_for_matrices(meeting, &[], row.addr(), site), site);
        let result = current().result(count as usize);
        out.copy_from_nonoverlapping(result.as_ptr(), result.len());
    }
}

pub(super) unsafe extern "C" fn stmatrix(
    count: u32,
    transposed: u32,
    row: *mut c_void,
    registers: *const u32,
    file: *const c_char,
    line: u32,
) {
    let site = Site { file, line };
    let meeting = Meeting::StoreMatrices { count: count as usize, transposed: transposed != 0 };
    // SAFETY: called by a kernel with `count` words at `registers`; no
    // reference is held across the switch.
    unsafe {
        let words = slice::from_raw_parts(registers, count as usize);
        wait_for_lanes(current().meet_for_matrices(meeting, words, row.addr(), site), site);
    }
}

pub(super) unsafe extern "C" fn cp_async(
    to: *mut u8,
    from: *const u8,
    bytes: u32,
    source_bytes: u32,
    file: *const c_char,
    line: u32,
) {
    let site = Site { file, line };
    // Read when the copy is waited for.
    let from = from.expose_provenance();
    // SAFETY: called by a kernel.
    unsafe {
        let copied = current().copy_async(to.addr(), from, bytes as usize, source_bytes as usize, site);
        check(copied, site);
    }
}

pub(super) unsafe extern "C" fn cp_async_commit() {
    // SAFETY: called by a kernel.
    let block = unsafe { current() };
    block.threads[block.current].copies.commit();
}

pub(super) unsafe extern "C" fn cp_async_wait(pending: u32, file: *const c_char, line: u32) {
    // SAFETY: called by a kernel.
    unsafe {
        let waited = current().wait_copies(pending as usize);
        check(waited, Site { file, line });
    }
}

/// `cp.async.mbarrier.arrive.noinc`.
pub(super) unsafe extern "C" fn cp_async_arrive(barrier: *mut u64, file: *const c_char, line: u32) {
    let site = Site { file, line };
    // SAFETY: called by a kernel.
    unsafe {
        let arrives = current().arrive_with_copies(barrier.addr(), site);
        check(arrives, site);
    }
}

/// `cp.async.bulk`.
pub(super) unsafe extern "C" fn bulk_copy(
    to: *mut u8,
    from: *const u8,
    bytes: u32,
    barrier: *mut u64,
    file: *const c_char,
    line: u32,
) {
    let site = Site { file, line };
    // Read when the copy arrives.
    let from = from.expose_provenance();
    // SAFETY: called by a kernel.
    unsafe {
        let asked = current().copy_bulk(to.addr(), from, bytes as usize, barrier.addr(), site);
        check(asked, site);
    }
}

/// `griddepcontrol.wait`.
pub(super) unsafe extern "C" fn grid_wait() {
    // SAFETY: called by a kernel.
    let block = unsafe { current() };
    block.threads[block.current].waited = true;
}

pub(super) unsafe extern "C" fn mbarrier_init(barrier: *mut u64, count: u32, file: *const c_char, line: u32) {
    // SAFETY: called by a kernel.
    unsafe {
        let made = current().make_barrier(barrier.addr(), count);
        check(made, Site { file, line });
    }
}

/// `fence.mbarrier_init`.
pub(super) unsafe extern "C" fn mbarrier_fence() {
    // SAFETY: called by a kernel.
    unsafe { current() }.tell_of_barriers();
}

pub(super) unsafe extern "C" fn mbarrier_arrive(barrier: *mut u64, bytes: u32, file: *const c_char, line: u32) {
    // SAFETY: called by a kernel.
    unsafe {
        let arrived = current().arrive_at(barrier.addr(), bytes);
        check(arrived, Site { file, line });
    }
}

pub(super) unsafe extern "C" fn mbarrier_wait(barrier: *mut u64, parity: u32, file: *const c_char, line: u32) {
    let site = Site { file, line };
    // SAFETY: called by a kernel; no reference is
    // held across the switch.
    unsafe {
        loop {
            let waits = current().wait_at(barrier.addr(), parity, site);
            if !check(waits, site) {
                return;
            }
            block::suspend(CURRENT.get());
        }
    }
}

/// `cp.async.bulk.tensor`.
pub(super) unsafe extern "C" fn tensor_copy(
    to: *mut u8,
    map: *const c_void,
    at: *const i32,
    dimensions: u32,
    barrier: *mut u64,
    file: *const c_char,
    line: u32,
) {
    let site = Site { file, line };
    // SAFETY: called by a kernel. A tensor map is 128
    // bytes in the kernel's parameter, and there is a
    // coordinate for each dimension.
    unsafe {
        let map = TensorMap::decode(&map.cast::<[u64; 16]>().read_unaligned());
        let mut first = [0; MOST_DIMENSIONS];
        for (first, &at) in first.iter_mut().zip(slice::from_raw_parts(at, dimensions as usize)) {
            *first = at;
        }
        let asked = current().copy_tensor(to.addr(), map, first, barrier.addr(), site);
        check(asked, site);
    }
}

/// `fence.proxy.async`.
pub(super) unsafe extern "C" fn proxy_fence() {
    // SAFETY: called by a kernel.
    let block = unsafe { current() };
    block.clocks.fence_proxy(block.current);
}

pub(super) unsafe extern "C" fn wgmma_fence() {
    // SAFETY: called by a kernel.
    unsafe { current() }.fence_warpgroup();
}

pub(super) unsafe extern "C" fn wgmma(
    d: *mut f32,
    accumulators: u32,
    a: *const u32,
    descriptor: u64,
    b_mn: u32,
    operands: u32,
    adds: u32,
    file: *const c_char,
    line: u32,
) {
    let site = Site { file, line };
    let b = Factor { descriptor, is_mn_major: b_mn != 0 };
    let Some(operands) = WgmmaOperands::of(operands) else { return };
    let what = Wgmma { accumulators: accumulators as usize, a: None, b, operands, adds: adds != 0 };
    let meeting = Meeting::Warpgroup(what);
    // SAFETY: called by a kernel with four words at `a` and
    // `accumulators` floats at `d`. These are arrays of the
    // thread that it must not use before it waits. No reference
    // is held across the switch.
    unsafe {
        let a = Some((a.expose_provenance(), a.cast::<[u32; 4]>().read()));
        let share = LaneShare { d: d.expose_provenance(), a };
        wait_for_lanes(current().meet_for_wgmma(meeting, share, site), site);
    }
}

pub(super) unsafe extern "C" fn wgmma_shared(
    d: *mut f32,
    accumulators: u32,
    a_descriptor: u64,
    b_descriptor: u64,
    a_mn: u32,
    b_mn: u32,
    operands: u32,
    adds: u32,
    file: *const c_char,
    line: u32,
) {
    let site = Site { file, line };
    let a = Factor { descriptor: a_descriptor, is_mn_major: a_mn != 0 };
    let b = Factor { descriptor: b_descriptor, is_mn_major: b_mn != 0 };
    let Some(operands) = WgmmaOperands::of(operands) else { return };
    let what = Wgmma { accumulators: accumulators as usize, a: Some(a), b, operands, adds: adds != 0 };
    let meeting = Meeting::Warpgroup(what);
    // SAFETY: called by a kernel with `accumulators` floats at `d`, an
    // array of the thread that it must not use before it
    // waits. No reference is held across the switch.
    unsafe {
        let share = LaneShare { d: d.expose_provenance(), a: None };
        wait_for_lanes(current().meet_for_wgmma(meeting, share, site), site);
    }
}

pub(super) unsafe extern "C" fn wgmma_commit() {
    // SAFETY: called by a kernel.
    unsafe { current() }.commit_warpgroup();
}

pub(super) unsafe extern "C" fn wgmma_wait(pending: u32, file: *const c_char, line: u32) {
    // SAFETY: called by a kernel.
    unsafe {
        let waited = current().wait_warpgroup(pending as usize);
        check(waited, Site { file, line });
    }
}

/// `setmaxnreg`.
pub(super) unsafe extern "C" fn set_registers(count: u32, file: *const c_char, line: u32) {
    let site = Site { file, line };
    // SAFETY: called by a kernel; no reference is
    // held across the switch.
    unsafe {
        if current().set_registers(count, site) {
            block::suspend(CURRENT.get());
        }
    }
}
