//! The traits that a backend implements for a device, its streams and its events.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_formats::{Format, HostWeight};

use crate::buffer::{Buffer, BufferMut, BufferRef};
use crate::caps::{DeviceId, DeviceInfo};
use crate::error::HalError;
use crate::family::Catalog;

/// An opened device.
pub trait Device: Any + Send + Sync + fmt::Debug {
    /// What it is and can do.
    fn info(&self) -> &DeviceInfo;

    /// Memory of `bytes` bytes, aligned to at least 256 bytes and zeroed, whose element type nobody stated; `what` names it in errors.
    ///
    /// # Errors
    /// [`HalError::OutOfMemory`] or a driver error.
    fn allocate(&self, bytes: usize, what: &'static str) -> Result<Buffer, HalError>;

    /// The stream that calls without one of their own use.
    fn default_stream(&self) -> Stream;

    /// A new stream, whose work is ordered only within itself.
    ///
    /// # Errors
    /// A driver error.
    fn new_stream(&self) -> Result<Stream, HalError>;

    /// Copies `src` to the start of `dst`; `src` may be reused when this returns.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`], [`HalError::WrongDevice`] or a driver error.
    fn upload(&self, stream: &Stream, src: &[u8], dst: BufferMut<'_>) -> Result<(), HalError>;

    /// Waits for the stream and copies the first `dst.len()` bytes of `src`.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`], [`HalError::WrongDevice`] or a driver error.
    fn download(&self, stream: &Stream, src: BufferRef<'_>, dst: &mut [u8]) -> Result<(), HalError>;

    /// Sets every byte of `dst` to `value`.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] or a driver error.
    fn fill(&self, stream: &Stream, dst: BufferMut<'_>, value: u8) -> Result<(), HalError>;

    /// Waits until all work of `stream` is done.
    ///
    /// # Errors
    /// Errors of that work, such as a fault in a kernel.
    fn synchronize(&self, stream: &Stream) -> Result<(), HalError>;

    /// Marks the present end of `stream`.
    ///
    /// # Errors
    /// A driver error.
    fn record(&self, stream: &Stream) -> Result<Event, HalError>;

    /// Makes work that is submitted to `stream` from here on begin after the work before `event`, which may be another
    /// stream's. The host does not wait.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] or a driver error.
    fn wait(&self, stream: &Stream, event: &Event) -> Result<(), HalError>;

    /// Time between two recorded events; waits for `end`.
    ///
    /// # Errors
    /// A driver error.
    fn elapsed(&self, start: &Event, end: &Event) -> Result<Duration, HalError>;

    /// The layout in which this device's kernels read weights of `format`.
    fn fragment_layout(&self, format: Format) -> FragmentLayout;

    /// New memory that holds the blocks of `weight` in the layout of [`Device::fragment_layout`]; ready for `stream` when this
    /// returns. Packs on the host where the device does not do it itself.
    ///
    /// # Errors
    /// [`HalError::OutOfMemory`], what kernels can fail with, or a driver error.
    fn pack(&self, stream: &Stream, weight: &HostWeight) -> Result<Buffer, HalError> {
        let packed = PackedLayout::new(weight.format(), self.fragment_layout(weight.format())).map(|l| l.pack(weight));
        let bytes = packed.as_deref().unwrap_or(weight.blocks());
        let mut buffer = self.allocate(bytes.len(), "a weight")?;
        self.upload(stream, bytes, (&mut buffer).into())?;
        Ok(buffer)
    }

    /// What it offers of each operation, which `qgemm-sched` chooses from.
    fn catalog(&self) -> Catalog;

    /// The concrete type, for the backend that made it.
    fn as_any(&self) -> &dyn Any;
}

/// A backend's own stream behind a [`Stream`].
pub trait RawStream: Any + Send + Sync + fmt::Debug {
    /// The device it belongs to.
    fn device(&self) -> DeviceId;
    /// The concrete type, for the backend that made it.
    fn as_any(&self) -> &dyn Any;
}

/// A queue of work on a device. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Stream(Arc<dyn RawStream>);

impl Stream {
    /// Wraps a backend's stream.
    pub fn from_raw(raw: Arc<dyn RawStream>) -> Self {
        Self(raw)
    }

    /// The device it belongs to.
    pub fn device(&self) -> DeviceId {
        self.0.device()
    }

    /// The backend's own object.
    pub fn raw(&self) -> &dyn RawStream {
        &*self.0
    }
}

/// A backend's own event behind an [`Event`].
pub trait RawEvent: Any + Send + Sync + fmt::Debug {
    /// The concrete type, for the backend that made it.
    fn as_any(&self) -> &dyn Any;
}

/// A point in a stream's work.
#[derive(Clone, Debug)]
pub struct Event(Arc<dyn RawEvent>);

impl Event {
    /// Wraps a backend's event.
    pub fn from_raw(raw: Arc<dyn RawEvent>) -> Self {
        Self(raw)
    }

    /// The backend's own object.
    pub fn raw(&self) -> &dyn RawEvent {
        &*self.0
    }
}
