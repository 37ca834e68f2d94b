//! The CPU as a device.

use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use qgemm_formats::Format;
use qgemm_formats::prepack::FragmentLayout;
use qgemm_hal::{
    Buffer, BufferMut, BufferRef, Catalog, Device, DeviceId, DeviceInfo, Event, Feature, HalError, Host, HostEvent,
    HostMemory, HostStream, Math, SimdLevel, Stream,
};
use rayon::ThreadPool;

use crate::families;
use crate::pool::Pool;
use crate::processor::{CLOCK, Processor};
use crate::simd::Simd;

const ID: DeviceId = DeviceId::CPU;

/// FMA units of a core with vector instructions.
const FMA_UNITS: f64 = 2.0;
/// Time for waking a pool's sleeping threads from outside and waiting
/// for them. Single-threaded launches avoid it.
const LAUNCH_SECONDS: f64 = 1e-5;

/// The CPU device. Streams are synchronous, and buffers are host memory.
pub struct CpuDevice {
    info: DeviceInfo,
    default_stream: Stream,
    processor: Processor,
}

impl CpuDevice {
    /// The CPU with its best SIMD level and rayon's global thread
    /// pool. The first device of a process measures the memory bandwidth,
    /// which takes some tens of milliseconds.
    pub fn new() -> Self {
        let (host, simd) = (Host::detect(), Simd::best());
        Self {
            info: info(host, simd.level(), host.cores),
            default_stream: HostStream::stream(ID),
            processor: Processor { simd, pool: Pool::default() },
        }
    }

    /// Runs kernels on `pool`, except small ones that the calling
    /// thread finishes sooner alone.
    #[must_use]
    pub fn with_pool(mut self, pool: Arc<ThreadPool>) -> Self {
        let threads = u32::try_from(pool.current_num_threads()).unwrap_or(u32::MAX);
        self.info.rates = rates(self.processor.simd.level(), threads);
        self.info.units = threads;
        self.processor.pool = Pool::new(pool);
        self
    }

    /// Uses the kernels of `level`, which may be below the best.
    ///
    /// # Errors
    /// [`HalError::Unsupported`] when the CPU does not support it,
    /// or the crate was built without the feature `simd`.
    pub fn with_simd(mut self, level: SimdLevel) -> Result<Self, HalError> {
        self.processor.simd = Simd::new(level).ok_or_else(|| HalError::Unsupported {
            device: ID,
            what: format!("the SIMD level {}", level.name()),
            why: format!("this processor and build have {}", Simd::best().level().name()),
        })?;
        self.info.arch = level.name().to_owned();
        self.info.features = features(level);
        self.info.rates = rates(level, self.info.units);
        Ok(self)
    }
}

impl Default for CpuDevice {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for CpuDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuDevice").field("info", &self.info).finish_non_exhaustive()
    }
}

fn info(host: &Host, level: SimdLevel, units: u32) -> DeviceInfo {
    DeviceInfo {
        id: ID,
        name: host.name.clone(),
        arch: level.name().to_owned(),
        variant: None,
        // Unused: the kernels' source hash tells which measurements are stale.
        driver: String::new(),
        units,
        memory_bytes: host.memory_bytes,
        bandwidth: host.bandwidth(),
        cache_bytes: host.cache_bytes,
        shared_bytes: 0,
        max_buffer_bytes: isize::MAX as u64,
        rates: rates(level, units),
        launch_seconds: LAUNCH_SECONDS,
        features: features(level),
    }
}

fn rates(level: SimdLevel, units: u32) -> Vec<(Math, f64)> {
    let per_cycle = f64::from(level.f32_lanes()) * if level == SimdLevel::Scalar { 1.0 } else { FMA_UNITS };
    // Without dot-product instructions, INT8 runs at the f32 rate.
    let dot_products = matches!(level, SimdLevel::NeonDotprod | SimdLevel::AvxVnni | SimdLevel::Avx512Vnni);
    let bytes_per_lane = if dot_products { 4.0 } else { 1.0 };
    let rate = |macs: f64| f64::from(units) * CLOCK * macs;
    vec![(Math::FmaF32, rate(per_cycle)), (Math::DotI8, rate(per_cycle * bytes_per_lane))]
}

/// The level and those that it includes.
fn features(level: SimdLevel) -> BTreeSet<Feature> {
    let included: &[Feature] = match level {
        SimdLevel::Scalar => &[],
        SimdLevel::Neon => &[Feature::Neon],
        SimdLevel::NeonDotprod => &[Feature::Neon, Feature::NeonDotprod],
        SimdLevel::Avx2 => &[Feature::Avx2],
        SimdLevel::AvxVnni => &[Feature::Avx2, Feature::AvxVnni],
        SimdLevel::Avx512 => &[Feature::Avx2, Feature::Avx512],
        SimdLevel::Avx512Vnni => &[Feature::Avx2, Feature::Avx512, Feature::Avx512Vnni],
    };
    included.iter().copied().collect()
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn allocate(&self, bytes: usize, what: &'static str) -> Result<Buffer, HalError> {
        HostMemory::allocate(ID, bytes, what)
    }

    fn default_stream(&self) -> Stream {
        self.default_stream.clone()
    }

    fn new_stream(&self) -> Result<Stream, HalError> {
        Ok(HostStream::stream(ID))
    }

    fn upload(&self, stream: &Stream, src: &[u8], dst: BufferMut<'_>) -> Result<(), HalError> {
        HostStream::check(ID, stream)?;
        HostMemory::upload(ID, src, dst)
    }

    fn download(&self, stream: &Stream, src: BufferRef<'_>, dst: &mut [u8]) -> Result<(), HalError> {
        HostStream::check(ID, stream)?;
        HostMemory::download(ID, src, dst)
    }

    fn fill(&self, stream: &Stream, dst: BufferMut<'_>, value: u8) -> Result<(), HalError> {
        HostStream::check(ID, stream)?;
        HostMemory::fill(ID, dst, value)
    }

    fn synchronize(&self, stream: &Stream) -> Result<(), HalError> {
        HostStream::check(ID, stream)
    }

    fn record(&self, stream: &Stream) -> Result<Event, HalError> {
        HostStream::check(ID, stream)?;
        Ok(HostEvent::now())
    }

    fn wait(&self, stream: &Stream, event: &Event) -> Result<(), HalError> {
        HostStream::check(ID, stream)?;
        HostEvent::check(ID, event)
    }

    fn elapsed(&self, start: &Event, end: &Event) -> Result<Duration, HalError> {
        HostEvent::elapsed(ID, start, end)
    }

    fn fragment_layout(&self, _format: Format) -> FragmentLayout {
        FragmentLayout::Simd16
    }

    fn catalog(&self) -> Catalog {
        families::CATALOG
    }

    fn as_any(&self) -> &dyn Any {
        &self.processor
    }
}
