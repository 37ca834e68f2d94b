//! Streams and events of synchronous devices.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::caps::DeviceId;
use crate::device::{Event, RawEvent, RawStream, Stream};
use crate::error::HalError;

/// A stream of a synchronous device, which queues nothing.
#[derive(Debug)]
pub struct HostStream {
    device: DeviceId,
}

impl HostStream {
    /// Creates a stream of `device`.
    pub fn stream(device: DeviceId) -> Stream {
        Stream::from_raw(Arc::new(Self { device }))
    }

    /// Checks that `stream` belongs to `device`.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`].
    pub fn check(device: DeviceId, stream: &Stream) -> Result<(), HalError> {
        if stream.device() == device { Ok(()) } else { Err(HalError::WrongDevice { device, what: "stream" }) }
    }
}

impl RawStream for HostStream {
    fn device(&self) -> DeviceId {
        self.device
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Time at which an event was recorded.
#[derive(Debug)]
pub struct HostEvent {
    at: Instant,
}

impl HostEvent {
    /// An event at the current time.
    pub fn now() -> Event {
        Event::from_raw(Arc::new(Self { at: Instant::now() }))
    }

    /// Checks that `event` is a host event. Its
    /// work is always done.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`].
    pub fn check(device: DeviceId, event: &Event) -> Result<(), HalError> {
        match event.raw().as_any().is::<Self>() {
            true => Ok(()),
            false => Err(HalError::WrongDevice { device, what: "event" }),
        }
    }

    /// Time from `start` to `end`; zero when `end` came first.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] when either is not a host event.
    pub fn elapsed(device: DeviceId, start: &Event, end: &Event) -> Result<Duration, HalError> {
        let at = |event: &Event| event.raw().as_any().downcast_ref::<Self>().map(|e| e.at);
        match (at(start), at(end)) {
            (Some(start), Some(end)) => Ok(end.saturating_duration_since(start)),
            _ => Err(HalError::WrongDevice { device, what: "event" }),
        }
    }
}

impl RawEvent for HostEvent {
    fn as_any(&self) -> &dyn Any {
        self
    }
}
