//! [`WgpuDevice`], the backend's [`Device`].

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use qgemm_formats::Format;
use qgemm_formats::prepack::FragmentLayout;
use qgemm_hal::{Buffer, BufferMut, BufferRef, Catalog, Device, DeviceInfo, Event, HalError, Stream};

use crate::event::{self, WgpuStream};
use crate::families::CATALOG;
use crate::memory;
use crate::shared::Shared;
use crate::weight_code::CLASS;

/// An opened adapter.
#[derive(Debug)]
pub(crate) struct WgpuDevice {
    info: DeviceInfo,
    pub shared: Arc<Shared>,
    default_stream: Stream,
}

impl WgpuDevice {
    pub fn new(info: DeviceInfo, shared: Arc<Shared>) -> Self {
        Self { info, default_stream: WgpuStream::stream(&shared), shared }
    }
}

/// Shared state of a device, which must belong to this backend.
pub(crate) fn shared_of<'d>(device: &'d dyn Device, what: &'static str) -> Result<&'d Arc<Shared>, HalError> {
    match device.as_any().downcast_ref::<WgpuDevice>() {
        Some(device) => Ok(&device.shared),
        None => Err(HalError::WrongDevice { device: device.info().id, what }),
    }
}

impl Device for WgpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn allocate(&self, bytes: usize, what: &'static str) -> Result<Buffer, HalError> {
        memory::allocate(&self.shared, bytes, what)
    }

    fn default_stream(&self) -> Stream {
        self.default_stream.clone()
    }

    fn new_stream(&self) -> Result<Stream, HalError> {
        Ok(WgpuStream::stream(&self.shared))
    }

    fn upload(&self, stream: &Stream, src: &[u8], dst: BufferMut<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        memory::upload(&self.shared, src, dst.view())
    }

    fn download(&self, stream: &Stream, src: BufferRef<'_>, dst: &mut [u8]) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        memory::download(&self.shared, src, dst)
    }

    fn fill(&self, stream: &Stream, dst: BufferMut<'_>, value: u8) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        memory::fill(&self.shared, dst.view(), value)
    }

    fn synchronize(&self, stream: &Stream) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        self.shared.wait("waiting for the stream")
    }

    fn record(&self, stream: &Stream) -> Result<Event, HalError> {
        WgpuStream::check(&self.shared, stream)?;
        event::record(&self.shared)
    }

    fn wait(&self, stream: &Stream, event: &Event) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        // All streams are the same queue, which
        // runs its work in order.
        event::check(&self.shared, event)
    }

    fn elapsed(&self, start: &Event, end: &Event) -> Result<Duration, HalError> {
        event::elapsed(&self.shared, start, end)
    }

    fn fragment_layout(&self, _format: Format) -> FragmentLayout {
        CLASS
    }

    fn catalog(&self) -> Catalog {
        CATALOG
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
