//! Bandwidth probes: read and copy bandwidth, the yardsticks for kernels.

use std::time::Duration;

use bytemuck::{Pod, Zeroable};
use cudarc::driver::result;
use qgemm_hal::{Device, HalError, KernelId, ProbeSpec, Spec, Stream};

use crate::function::Start;
use crate::gpu::Gpu;
use crate::memory::device_address;
use crate::source;
use crate::spec::KernelSpec;
use crate::stream::CudaStream;

const THREADS: u32 = 512;
const BLOCKS_PER_UNIT: u32 = 4;
const WORD_BYTES: usize = 16;
const RUNS: usize = 7;

/// The kernel that reads a buffer.
pub(crate) fn spec() -> KernelSpec {
    KernelSpec {
        name: KernelId::new("read", None, Spec::Probe(ProbeSpec { bytes: WORD_BYTES as u32 })).to_string(),
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

/// Read bandwidth of a kernel over a buffer of `bytes` bytes,
/// in bytes per second: the best of seven runs. Use at
/// least 2 GB, so that caches do not matter.
///
/// # Errors
/// [`HalError::OutOfMemory`], [`HalError::WrongDevice`] for a device of
/// another backend, or an error of loading or launching the kernel.
pub fn read_bandwidth(device: &dyn Device, bytes: usize) -> Result<f64, HalError> {
    let gpu = Gpu::of(device)?;
    let id = device.info().id;
    let words = bytes / WORD_BYTES;
    let data = device.allocate(words * WORD_BYTES, "the bandwidth probe")?;
    let sink = device.allocate(4, "the bandwidth probe's result")?;
    let params = ReadProbe {
        data: device_address(id, (&data).into(), "the data")?,
        words: words as u64,
        sink: device_address(id, (&sink).into(), "the sink")?,
    };
    let function = gpu.kernel(&spec())?;
    let stream = device.default_stream();
    let grid = [device.info().units * BLOCKS_PER_UNIT, 1, 1];
    let best = best_time(device, &stream, || {
        // SAFETY: `ReadProbe` is the kernel's parameter. The kernel reads `words`
        // words of `data`, which live until the end of this function,
        // after the last run was waited for.
        unsafe { function.launch(&stream, grid, THREADS, 0, bytemuck::bytes_of(&params), Start::InOrder) }
    })?;
    Ok((words * WORD_BYTES) as f64 / best)
}

/// Copy bandwidth of the driver within device memory, in
/// bytes read and written per second: the best of seven
/// runs with `bytes` bytes.
///
/// # Errors
/// [`HalError::OutOfMemory`], [`HalError::WrongDevice`] for a device of
/// another backend, or a driver error.
pub fn copy_bandwidth(device: &dyn Device, bytes: usize) -> Result<f64, HalError> {
    let gpu = Gpu::of(device)?;
    let id = device.info().id;
    let (from, to) = (device.allocate(bytes, "the copy probe")?, device.allocate(bytes, "the copy probe")?);
    let source = device_address(id, (&from).into(), "the source")?;
    let destination = device_address(id, (&to).into(), "the destination")?;
    let stream = device.default_stream();
    let handle = CudaStream::of(id, &stream)?.handle();
    let best = best_time(device, &stream, || {
        gpu.context().bind()?;
        // SAFETY: both are allocations of `bytes` bytes that live until the
        // end of this function, after the last copy was waited for.
        let copied = unsafe { result::memcpy_dtod_async(destination, source, bytes, handle) };
        gpu.context().check("cuMemcpyDtoDAsync", copied)
    })?;
    Ok(2.0 * bytes as f64 / best)
}

/// Shortest time in seconds between two events around
/// `submit`, after one warm-up run.
pub(crate) fn best_time(
    device: &dyn Device,
    stream: &Stream,
    mut submit: impl FnMut() -> Result<(), HalError>,
) -> Result<f64, HalError> {
    submit()?;
    let mut best = Duration::MAX;
    for _ in 0..RUNS {
        let start = device.record(stream)?;
        submit()?;
        let end = device.record(stream)?;
        best = best.min(device.elapsed(&start, &end)?);
    }
    Ok(best.as_secs_f64().max(1e-9))
}
