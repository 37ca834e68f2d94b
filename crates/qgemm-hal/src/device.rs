//! Traits that a backend implements: device, stream, event.

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
    /// Identity and capabilities.
    fn info(&self) -> &DeviceInfo;

    /// Allocates `bytes` zeroed bytes, aligned to at least 256 bytes,
    /// of unknown element type. `what` names the allocation in errors.
    ///
    /// # Errors
    /// [`HalError::OutOfMemory`] or a driver error.
    fn allocate(&self, bytes: usize, what: &'static str) -> Result<Buffer, HalError>;

    /// The default stream.
    fn default_stream(&self) -> Stream;

    /// Creates a stream. Work is ordered only within a stream.
    ///
    /// # Errors
    /// A driver error.
    fn new_stream(&self) -> Result<Stream, HalError>;

    /// Copies `src` to the start of `dst`. `src`
    /// may be reused on return.
    ///
    /// # Errors
    /// [`HalError::OutOfBounds`], [`HalError::WrongDevice`] or a driver error.
    fn upload(&self, stream: &Stream, src: &[u8], dst: BufferMut<'_>) -> Result<(), HalError>;

    /// As [`Device::upload`], for work of `stream` alone. A device may
    /// return before the copy is done.
    ///
    /// # Errors
    /// As [`Device::upload`].
    fn enqueue_upload(&self, stream: &Stream, src: &[u8], dst: BufferMut<'_>) -> Result<(), HalError> {
        self.upload(stream, src, dst)
    }

    /// Waits for the stream, then copies the first
    /// `dst.len()` bytes of `src`.
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

    /// Records an event at the current end of `stream`.
    ///
    /// # Errors
    /// A driver error.
    fn record(&self, stream: &Stream) -> Result<Event, HalError>;

    /// Makes later work of `stream` wait for `event`, which may be
    /// of another stream. The host does not wait.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] or a driver error.
    fn wait(&self, stream: &Stream, event: &Event) -> Result<(), HalError>;

    /// Time between two recorded events. Waits for `end`.
    ///
    /// # Errors
    /// A driver error.
    fn elapsed(&self, start: &Event, end: &Event) -> Result<Duration, HalError>;

    /// Fragment layout that this device's kernels read weights of `format` in.
    fn fragment_layout(&self, format: Format) -> FragmentLayout;

    /// Packs `weight` into new device memory with the layout of
    /// [`Device::fragment_layout`]. The buffer is ready for `stream` on return.
    /// Packs on the host unless the device has a packing kernel.
    ///
    /// # Errors
    /// [`HalError::OutOfMemory`], an error of loading
    /// kernels, or a driver error.
    fn pack(&self, stream: &Stream, weight: &HostWeight) -> Result<Buffer, HalError> {
        let packed = PackedLayout::new(weight.format(), self.fragment_layout(weight.format())).map(|l| l.pack(weight));
        let bytes = packed.as_deref().unwrap_or(weight.blocks());
        let mut buffer = self.allocate(bytes.len(), "a weight")?;
        self.upload(stream, bytes, (&mut buffer).into())?;
        Ok(buffer)
    }

    /// Kernel families of each operation, for `qgemm-sched`.
    fn catalog(&self) -> Catalog;

    /// The concrete type, for downcasts by its backend.
    fn as_any(&self) -> &dyn Any;
}

/// A backend's stream behind a [`Stream`].
pub trait RawStream: Any + Send + Sync + fmt::Debug {
    /// Its device.
    fn device(&self) -> DeviceId;
    /// The concrete type, for downcasts by its backend.
    fn as_any(&self) -> &dyn Any;
}

/// A stream: a queue of work on a
/// device. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Stream(Arc<dyn RawStream>);

impl Stream {
    /// Wraps a backend's stream.
    pub fn from_raw(raw: Arc<dyn RawStream>) -> Self {
        Self(raw)
    }

    /// Its device.
    pub fn device(&self) -> DeviceId {
        self.0.device()
    }

    /// The backend's object.
    pub fn raw(&self) -> &dyn RawStream {
        &*self.0
    }
}

/// A backend's event behind an [`Event`].
pub trait RawEvent: Any + Send + Sync + fmt::Debug {
    /// The concrete type, for downcasts by its backend.
    fn as_any(&self) -> &dyn Any;
}

/// An event: a point in a stream's work.
#[derive(Clone, Debug)]
pub struct Event(Arc<dyn RawEvent>);

impl Event {
    /// Wraps a backend's event.
    pub fn from_raw(raw: Arc<dyn RawEvent>) -> Self {
        Self(raw)
    }

    /// The backend's object.
    pub fn raw(&self) -> &dyn RawEvent {
        &*self.0
    }
}
