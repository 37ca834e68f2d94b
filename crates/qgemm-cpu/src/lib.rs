//! The CPU backend: every format, every activation type, all cores, vector instructions chosen at run time.
//!
//! Weights are packed so that a vector register is sixteen rows. Where activations may be quantized and weights are integers,
//! codes are unpacked to bytes and multiplied as integers (`gemm_int8`); else they are decoded to f32 a few columns at a time
//! and multiplied in f32 (`gemm`). Products are accumulated in the order of the columns, parts of a long K one after the other: an order
//! that depends on N and K alone, neither on M nor on the number of threads. So results are bit-identical between runs and a row's
//! result does not depend on its batch. (They differ in the last bits between processors with different vector instructions.)
//!
//! # What a launch does besides computing
//!
//! A launch returns when its result is there. Where the plan says one thread ([`TileConfig::threads`](qgemm_hal::TileConfig::threads)), the
//! calling thread computes it: no other is woken, no lock taken, and nothing allocated once the thread has run a plan of that size
//! (planning reserves the memory of the thread that plans). Where the plan says more, a thread pool does:
//!
//! - From a thread of that pool, nothing is locked or allocated but by the pool, whose queues grow when they are full. While it waits for
//!   others, it may begin another launch, which then takes memory of its own.
//! - From another thread, that thread sleeps on a mutex until the result is there, and about every sixtieth launch allocates a block of
//!   rayon's queue.
//! - Planning has the pool's threads reserve their memory, without waiting for them: a thread that is busy until it works on a launch
//!   reserves it then.
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
mod simd;
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
/// Whose thread pools kernels run on.
pub use rayon;

/// Opens the processor, which is the device `cpu` (ordinal 0).
///
/// # Errors
/// [`HalError::NoDevice`] for another ordinal.
pub fn open(ordinal: u32) -> Result<Arc<dyn Device>, HalError> {
    if ordinal != DeviceId::CPU.ordinal {
        return Err(HalError::NoDevice {
            device: format!("cpu:{ordinal}"),
            why: "the host is one device, `cpu`".into(),
        });
    }
    Ok(Arc::new(CpuDevice::new()))
}

/// The processor.
///
/// # Errors
/// None: every host has one. The signature is that of all backends.
pub fn devices() -> Result<Vec<DeviceInfo>, HalError> {
    Ok(vec![CpuDevice::new().info().clone()])
}

/// The processor, whose kernels run on `pool`: an engine shares its threads instead of having more of them than cores.
pub fn open_with_pool(pool: Arc<ThreadPool>) -> Arc<dyn Device> {
    Arc::new(CpuDevice::new().with_pool(pool))
}

/// Most threads of a pool that [`open_with_threads`] starts.
pub const MOST_THREADS: usize = 4096;

/// The processor with `threads` threads of its own; as many as there are cores for 0.
///
/// # Errors
/// [`HalError::Unsupported`] for more than [`MOST_THREADS`], [`HalError::Driver`] when the system starts no more threads.
pub fn open_with_threads(threads: usize) -> Result<Arc<dyn Device>, HalError> {
    if threads > MOST_THREADS {
        let (what, why) = (format!("a pool of {threads} threads"), format!("expected at most {MOST_THREADS}"));
        return Err(HalError::Unsupported { device: DeviceId::CPU, what, why });
    }
    let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("qgemm-{i}")).build();
    let failed = |e: rayon::ThreadPoolBuildError| HalError::Driver {
        device: DeviceId::CPU,
        call: "starting threads",
        message: e.to_string(),
    };
    Ok(open_with_pool(Arc::new(pool.map_err(failed)?)))
}

/// A buffer over the caller's own `len` bytes at `start`, without copying, on every device of this backend. What they hold is not known,
/// so plans take the buffer for operands of any element type; [`Buffer::typed`] states one, which plans then check.
///
/// # Safety
/// Until the buffer is dropped, the bytes must be initialised memory that nothing else writes, and that nothing else reads while
/// the buffer is borrowed mutably.
pub unsafe fn wrap(start: NonNull<u8>, len: usize) -> Buffer {
    // SAFETY: the caller's promise is the same.
    unsafe { HostMemory::borrow(DeviceId::CPU, start, len) }
}
