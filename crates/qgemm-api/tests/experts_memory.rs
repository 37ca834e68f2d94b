//! Expert layers that exceed the device's memory.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use qgemm_api::{Context, Error, HostExperts, HostWeight};
use qgemm_formats::Format;
use qgemm_formats::prepack::FragmentLayout;
use qgemm_hal::{Buffer, BufferMut, BufferRef, Catalog, Device, DeviceInfo, Event, HalError, Stream, noop};

/// Device with this many bytes in all.
/// It counts copied bytes.
#[derive(Debug)]
struct Small {
    device: Arc<dyn Device>,
    free: AtomicUsize,
    uploads: AtomicUsize,
}

impl Device for Small {
    fn info(&self) -> &DeviceInfo {
        self.device.info()
    }
    fn allocate(&self, bytes: usize, what: &'static str) -> Result<Buffer, HalError> {
        let left = |free: usize| free.checked_sub(bytes);
        match self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left) {
            Ok(_) => self.device.allocate(bytes, what),
            Err(free) => Err(HalError::OutOfMemory { device: self.info().id, bytes, what, free: Some(free as u64) }),
        }
    }
    fn default_stream(&self) -> Stream {
        self.device.default_stream()
    }
    fn new_stream(&self) -> Result<Stream, HalError> {
        self.device.new_stream()
    }
    fn upload(&self, stream: &Stream, src: &[u8], dst: BufferMut<'_>) -> Result<(), HalError> {
        self.uploads.fetch_add(1, Ordering::Relaxed);
        self.device.upload(stream, src, dst)
    }
    fn download(&self, stream: &Stream, src: BufferRef<'_>, dst: &mut [u8]) -> Result<(), HalError> {
        self.device.download(stream, src, dst)
    }
    fn fill(&self, stream: &Stream, dst: BufferMut<'_>, value: u8) -> Result<(), HalError> {
        self.device.fill(stream, dst, value)
    }
    fn synchronize(&self, stream: &Stream) -> Result<(), HalError> {
        self.device.synchronize(stream)
    }
    fn record(&self, stream: &Stream) -> Result<Event, HalError> {
        self.device.record(stream)
    }
    fn wait(&self, stream: &Stream, event: &Event) -> Result<(), HalError> {
        self.device.wait(stream, event)
    }
    fn elapsed(&self, start: &Event, end: &Event) -> Result<Duration, HalError> {
        self.device.elapsed(start, end)
    }
    fn fragment_layout(&self, format: Format) -> FragmentLayout {
        self.device.fragment_layout(format)
    }
    fn catalog(&self) -> Catalog {
        self.device.catalog()
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[test]
fn experts_that_do_not_fit_are_refused_before_anything_is_uploaded() {
    let order: Vec<u32> = (0..64).rev().collect();
    let one = || {
        let format: Format = "q8_0".parse().expect("a format");
        let blocks = vec![0; 3 * format.row_bytes(64)];
        let weight = HostWeight::with_k_order(format, 3, 64, blocks.into(), order.clone()).expect("it suits");
        weight.with_row_scale(vec![1.0; 3]).expect("one a row")
    };
    let host = HostExperts::new(&[one(), one()]).expect("alike");
    let load = |free: usize| {
        let device = noop::open("noop".parse().expect("a name")).expect("always there");
        let small = Arc::new(Small { device, free: AtomicUsize::new(free), uploads: AtomicUsize::new(0) });
        let loaded = Context::from_device(small.clone()).load_experts(&host);
        (loaded, small.uploads.load(Ordering::Relaxed))
    };
    let (loaded, uploads) = load(usize::MAX);
    let bytes = loaded.expect("it has room").bytes();
    assert_eq!(uploads, 3);
    assert!(load(bytes).0.is_ok());
    for free in [bytes - 1, bytes / 2, 0] {
        let (refused, uploads) = load(free);
        assert!(matches!(refused, Err(Error::Hal(HalError::OutOfMemory { .. }))), "{refused:?}");
        assert_eq!(uploads, 0, "{free} bytes");
    }
}
