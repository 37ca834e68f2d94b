//! CPU backend: every format and activation type, all cores,
//! SIMD level chosen at run time.
//!
//! Weights are packed so that a vector register holds sixteen rows.
//! For integer weights and activations that may be quantized, codes are
//! unpacked to bytes and multiplied as integers (`gemm_int8`).
//! Otherwise weights are decoded to f32 a few columns at a
//! time and multiplied in f32 (`gemm`).
//!
//! Products are accumulated in column order, with the parts of a
//! long K added one after the other. This order depends only
//! on N and K, not on M or the number of
//! threads. Results are therefore bit-identical between runs, and a
//! row's result does not depend on its batch. (They differ in
//! the last bits between SIMD levels.)
//!
//! # What a launch does besides computing
//!
//! A launch returns when its result is ready. If the plan
//! has one thread
//! ([`TileConfig::threads`](qgemm_hal::TileConfig::threads)), the calling
//! thread computes it: it wakes no thread, takes no lock, and
//! does not allocate once the thread has run a plan of
//! that size (planning reserves the memory of the planning thread). With
//! more threads, a thread pool computes it:
//!
//! - From a thread of that pool, only the pool itself locks
//!   or allocates, when its queues grow. While the thread waits for
//!   others, it may begin another launch, which then uses separate memory.
//! - From another thread, that thread sleeps on a mutex until
//!   the result is ready, and about every sixtieth launch
//!   allocates a block of rayon's queue.
//! - Planning lets the pool's threads reserve their memory
//!   without waiting for them: a busy thread reserves it when
//!   it first works on a launch.
#![deny(missing_docs)]

mod arena;
mod convert;
mod device;
mod families;
mod given_codes;
mod job;
mod operand;
mod ordered;
mod packed;
mod planes;
mod pool;
mod processor;
// Public for `tests/simd`.
#[doc(hidden)]
pub mod simd;
mod source_hash;

use std::ptr::NonNull;
use std::sync::Arc;

use qgemm_hal::{Buffer, Device, DeviceId, DeviceInfo, HalError, HostMemory};
use rayon::{ThreadPool, ThreadPoolBuilder};

pub use device::CpuDevice;
pub use families::attention::{ATTENTION, AttentionFamily};
pub use families::convert::{CONVERT, ConvertFamily};
pub use families::gemm::{GEMM, GEMM_INT8, GemmFamily, GemmInt8Family};
pub use families::indexer::{INDEXER, IndexerFamily};
pub use families::kv_append::{KV_APPEND, KvAppendFamily};
pub use families::matmul::{MATMUL, MatmulFamily};
pub use families::norm::{NORM, NormFamily};
pub use families::optimizer::{OPTIMIZER, OptimizerFamily};
pub use families::quantize::{QUANTIZE, QuantizeFamily};
pub use families::routing::{ROUTING, RoutingFamily};
pub use pool::start_threads;
/// Kernels run on rayon's thread pools.
pub use rayon;

/// Opens the CPU, which is the device `cpu` (ordinal 0).
///
/// # Errors
/// [`HalError::NoDevice`] for another ordinal; those of [`start_threads`].
pub fn open(ordinal: u32) -> Result<Arc<dyn Device>, HalError> {
    if ordinal != DeviceId::CPU.ordinal {
        return Err(HalError::NoDevice {
            device: format!("cpu:{ordinal}"),
            why: "the host is one device, `cpu`".into(),
        });
    }
    start_threads()?;
    Ok(Arc::new(CpuDevice::new()))
}

/// The CPU.
///
/// # Errors
/// None: every host has a CPU. The signature is
/// that of all backends.
pub fn devices() -> Result<Vec<DeviceInfo>, HalError> {
    Ok(vec![CpuDevice::new().info().clone()])
}

/// The CPU with kernels running on `pool`, so that an engine
/// shares its threads instead of having more of them than cores.
pub fn open_with_pool(pool: Arc<ThreadPool>) -> Arc<dyn Device> {
    Arc::new(CpuDevice::new().with_pool(pool))
}

/// Most threads of a pool that [`open_with_threads`] starts.
pub const MOST_THREADS: usize = 4096;

/// The CPU with `threads` separate threads; 0 means one per core.
///
/// # Errors
/// [`HalError::Unsupported`] for more than [`MOST_THREADS`], [`HalError::Driver`] when the system starts no more threads.
pub fn open_with_threads(threads: usize) -> Result<Arc<dyn Device>, HalError> {
    if threads > MOST_THREADS {
        let (what, why) = (format!("a pool of {threads} threads"), format!("expected at most {MOST_THREADS}"));
        return Err(HalError::Unsupported { device: DeviceId::CPU, what, why });
    }
    let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("qgemm-{i}"));
    let pool = pool.spawn_handler(pool::start_thread).build();
    Ok(open_with_pool(Arc::new(pool.map_err(pool::not_started)?)))
}

/// Wraps `len` caller-owned bytes at `start` without copying, for
/// every device of this backend. The element type is unknown: plans accept
/// the buffer for any operand, unless [`Buffer::typed`] states a type.
///
/// # Safety
/// Until the buffer is dropped, the bytes must be initialised
/// memory that nothing else writes, and that nothing else reads
/// while the buffer is borrowed mutably.
pub unsafe fn wrap(start: NonNull<u8>, len: usize) -> Buffer {
    // SAFETY: the caller promises the same.
    unsafe { HostMemory::borrow(DeviceId::CPU, start, len) }
}
