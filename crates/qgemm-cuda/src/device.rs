//! [`CudaDevice`]: the HAL device for CUDA.

use std::any::Any;
use std::ops::Range;
use std::time::Duration;

use cudarc::driver::result;
use qgemm_formats::prepack::FragmentLayout;
use qgemm_formats::{Format, HostWeight};
use qgemm_hal::{
    Buffer, BufferMut, BufferRef, Catalog, Device, DeviceId, DeviceInfo, Event, Geometry, HalError, Stream,
};

use crate::arch;
use crate::families::{self, Repack};
use crate::function::Start;
use crate::gpu::Gpu;
use crate::memory::{CudaBuffer, device_address};
use crate::probe;
use crate::stream::{self, CudaStream};

/// Bytes read to measure the bandwidth when the driver
/// does not report clocks.
const PROBE_BYTES: usize = 256 << 20;

/// An opened NVIDIA GPU.
#[derive(Debug)]
pub(crate) struct CudaDevice {
    gpu: Gpu,
    default_stream: Stream,
    /// For internal work that the caller's stream must not delay,
    /// such as zeroing fresh memory.
    own_stream: CudaStream,
}

impl CudaDevice {
    /// Opens device `ordinal`.
    pub(crate) fn open(ordinal: u32) -> Result<Self, HalError> {
        let _span = tracing::info_span!("open", ordinal).entered();
        let gpu = Gpu::open(ordinal)?;
        let default_stream = CudaStream::new(gpu.context())?.into_stream();
        let own_stream = CudaStream::new(gpu.context())?;
        let mut device = Self { gpu, default_stream, own_stream };
        if device.gpu.chip().info.bandwidth == 0.0 {
            let measured = probe::read_bandwidth(&device, PROBE_BYTES)?;
            device.gpu.set_bandwidth(measured);
        }
        Ok(device)
    }

    fn id(&self) -> DeviceId {
        self.gpu.id()
    }
}

/// Longest pageable memory that the driver stages when it is copied to
/// a device (CUDA driver API, synchronization behaviour of copies).
const STAGED_BYTES: usize = 64 << 10;

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.gpu.chip().info
    }

    fn allocate(&self, bytes: usize, what: &'static str) -> Result<Buffer, HalError> {
        Ok(CudaBuffer::allocate(self.gpu.context(), self.own_stream.handle(), bytes, what)?.into_buffer())
    }

    fn default_stream(&self) -> Stream {
        self.default_stream.clone()
    }

    fn new_stream(&self) -> Result<Stream, HalError> {
        Ok(CudaStream::new(self.gpu.context())?.into_stream())
    }

    fn upload(&self, stream: &Stream, src: &[u8], dst: BufferMut<'_>) -> Result<(), HalError> {
        let stream = CudaStream::of(self.id(), stream)?;
        check_fits("upload", 0..src.len(), dst.view().len())?;
        let address = device_address(self.id(), dst.view(), "the destination")?;
        if src.is_empty() {
            return Ok(());
        }
        self.gpu.context().bind()?;
        // SAFETY: the destination is on this device and at least as
        // long as the source. The stream is waited for below.
        let copied = unsafe { result::memcpy_htod_async(address, src, stream.handle()) };
        self.gpu.context().check("cuMemcpyHtoDAsync", copied)?;
        stream.synchronize()
    }

    fn enqueue_upload(&self, stream: &Stream, src: &[u8], dst: BufferMut<'_>) -> Result<(), HalError> {
        if src.len() > STAGED_BYTES || src.is_empty() {
            return self.upload(stream, src, dst);
        }
        let stream = CudaStream::of(self.id(), stream)?;
        check_fits("upload", 0..src.len(), dst.view().len())?;
        let address = device_address(self.id(), dst.view(), "the destination")?;
        self.gpu.context().bind()?;
        // The caller's memory may be pinned, which the driver reads
        // later.
        let pageable = src.to_vec();
        // SAFETY: the destination is on this device and at least as
        // long as the source, which the driver has read on return.
        let copied = unsafe { result::memcpy_htod_async(address, &pageable, stream.handle()) };
        self.gpu.context().check("cuMemcpyHtoDAsync", copied)
    }

    fn download(&self, stream: &Stream, src: BufferRef<'_>, dst: &mut [u8]) -> Result<(), HalError> {
        let stream = CudaStream::of(self.id(), stream)?;
        check_fits("download", 0..dst.len(), src.len())?;
        let address = device_address(self.id(), src, "the source")?;
        if !dst.is_empty() {
            self.gpu.context().bind()?;
            // SAFETY: the source is on this device and at least as
            // long as the destination, which stays borrowed until the
            // copy has been waited for below.
            let copied = unsafe { result::memcpy_dtoh_async(dst, address, stream.handle()) };
            self.gpu.context().check("cuMemcpyDtoHAsync", copied)?;
        }
        stream.synchronize()
    }

    fn fill(&self, stream: &Stream, dst: BufferMut<'_>, value: u8) -> Result<(), HalError> {
        let stream = CudaStream::of(self.id(), stream)?;
        let address = device_address(self.id(), dst.view(), "the destination")?;
        if dst.view().is_empty() {
            return Ok(());
        }
        self.gpu.context().bind()?;
        // SAFETY: the bytes are on this device and
        // belong to the view.
        let filled = unsafe { result::memset_d8_async(address, value, dst.view().len(), stream.handle()) };
        self.gpu.context().check("cuMemsetD8Async", filled)
    }

    fn synchronize(&self, stream: &Stream) -> Result<(), HalError> {
        CudaStream::of(self.id(), stream)?.synchronize()
    }

    fn record(&self, stream: &Stream) -> Result<Event, HalError> {
        CudaStream::of(self.id(), stream)?.record()
    }

    fn wait(&self, stream: &Stream, event: &Event) -> Result<(), HalError> {
        CudaStream::of(self.id(), stream)?.wait(event)
    }

    fn elapsed(&self, start: &Event, end: &Event) -> Result<Duration, HalError> {
        stream::elapsed(self.gpu.context(), start, end)
    }

    fn fragment_layout(&self, _format: Format) -> FragmentLayout {
        arch::fragment_layout(self.gpu.chip().variant)
    }

    fn pack(&self, stream: &Stream, weight: &HostWeight) -> Result<Buffer, HalError> {
        let repack = Repack::of(&self.gpu, weight.format())?;
        let function = self.gpu.kernel(repack.spec())?;
        repack.run(self, stream, weight, |launch| {
            let params = launch.params(|view, what| device_address(self.id(), view, what))?;
            let Geometry { grid, threads, shared_bytes } = launch.geometry;
            // SAFETY: the parameter is the kernel's, made by `Repack` for
            // views of this length. They live until the stream was waited
            // for, and nothing else uses them.
            unsafe { function.launch(stream, grid, threads, shared_bytes, bytemuck::bytes_of(&params), Start::InOrder) }
        })
    }

    fn catalog(&self) -> Catalog {
        families::CATALOG
    }

    fn as_any(&self) -> &dyn Any {
        // The object that `Gpu::of` looks for.
        &self.gpu
    }
}

fn check_fits(what: &'static str, range: Range<usize>, len: usize) -> Result<(), HalError> {
    if range.end > len {
        return Err(HalError::OutOfBounds { what, start: range.start, end: range.end, len });
    }
    Ok(())
}
