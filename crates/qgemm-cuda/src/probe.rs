//! Read bandwidth, measured: the yardstick that kernels are compared with.

use std::time::Duration;

use bytemuck::{Pod, Zeroable};
use qgemm_hal::{Device, HalError};

use crate::device::CudaDevice;
use crate::function::Start;
use crate::memory::device_address;
use crate::source;
use crate::spec::KernelSpec;

const THREADS: u32 = 512;
const BLOCKS_PER_UNIT: u32 = 4;
const WORD_BYTES: usize = 16;
const RUNS: usize = 7;

/// The kernel that reads a buffer.
pub(crate) fn spec() -> KernelSpec {
    KernelSpec {
        name: "read_probe".into(),
        entry: "entry/read_probe.cu",
        text: source::entry("entry/read_probe.cu"),
        symbol: "read_probe",
        prelude: String::new(),
        arch_specific: false,
    }
}

/// The kernel's parameter (`ReadProbe` in `entry/read_probe.cu`).
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct ReadProbe {
    data: u64,
    words: u64,
    sink: u64,
}

/// Bytes a second at which a kernel reads a buffer of `bytes` bytes (take at least 2 GB, so that caches do not
/// count): the best of seven runs.
///
/// # Errors
/// [`HalError::OutOfMemory`], [`HalError::WrongDevice`] for a device of another backend, or what kernels can fail
/// with.
pub fn read_bandwidth(device: &dyn Device, bytes: usize) -> Result<f64, HalError> {
    let cuda = CudaDevice::of(device)?;
    let id = device.info().id;
    let words = bytes / WORD_BYTES;
    let data = device.allocate(words * WORD_BYTES, "the bandwidth probe")?;
    let sink = device.allocate(4, "the bandwidth probe's result")?;
    let params = ReadProbe {
        data: device_address(id, (&data).into(), "the data")?,
        words: words as u64,
        sink: device_address(id, (&sink).into(), "the sink")?,
    };
    let function = cuda.kernel(&spec())?;
    let stream = device.default_stream();
    let grid = [device.info().units * BLOCKS_PER_UNIT, 1, 1];
    let mut best = Duration::MAX;
    for _ in 0..RUNS {
        let start = device.record(&stream)?;
        // SAFETY: `ReadProbe` is the kernel's parameter; the kernel reads `words` words of `data`, which live to the
        // end of this function, after the last run was waited for.
        unsafe { function.launch(&stream, grid, THREADS, 0, bytemuck::bytes_of(&params), Start::InOrder)? };
        let end = device.record(&stream)?;
        best = best.min(device.elapsed(&start, &end)?);
    }
    Ok((words * WORD_BYTES) as f64 / best.as_secs_f64().max(1e-9))
}
