//! Streams and events: own ones, the caller's raw handles, and cudarc's.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{result, sys};
use qgemm_hal::{DeviceId, Event, HalError, RawEvent, RawStream, Stream};

use crate::driver::{self, DeviceContext};

/// The stream behind a [`Stream`].
pub(crate) struct CudaStream {
    context: Arc<DeviceContext>,
    raw: sys::CUstream,
    owner: Owner,
}

enum Owner {
    /// Created here, destroyed on drop.
    Ours,
    /// Caller-owned; never destroyed.
    Caller,
    /// A cudarc stream, kept alive by the reference.
    Cudarc { _stream: Arc<cudarc::driver::CudaStream> },
}

// SAFETY: a stream handle may be used from every thread; the
// driver serialises the calls.
unsafe impl Send for CudaStream {}
// SAFETY: as above.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    /// Creates a stream that does not synchronise with
    /// the legacy default stream.
    pub(crate) fn new(context: &Arc<DeviceContext>) -> Result<Self, HalError> {
        context.bind()?;
        let kind = result::stream::StreamKind::NonBlocking;
        let raw = context.check("cuStreamCreate", result::stream::create(kind))?;
        Ok(Self { context: context.clone(), raw, owner: Owner::Ours })
    }

    /// Wraps a caller-owned stream.
    ///
    /// # Safety
    /// As [`crate::wrap_stream`].
    pub(crate) unsafe fn wrap(context: &Arc<DeviceContext>, raw: sys::CUstream) -> Self {
        Self { context: context.clone(), raw, owner: Owner::Caller }
    }

    /// Wraps a cudarc stream, which must belong to the same context.
    pub(crate) fn from_cudarc(
        context: &Arc<DeviceContext>,
        stream: Arc<cudarc::driver::CudaStream>,
    ) -> Result<Self, HalError> {
        if stream.context().cu_ctx() != context.handle() {
            return Err(HalError::WrongDevice { device: context.id(), what: "the cudarc stream" });
        }
        let raw = stream.cu_stream();
        Ok(Self { context: context.clone(), raw, owner: Owner::Cudarc { _stream: stream } })
    }

    pub(crate) fn into_stream(self) -> Stream {
        Stream::from_raw(Arc::new(self))
    }

    /// The CUDA stream behind `stream`.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] when it is not a stream of `device`.
    pub(crate) fn of(device: DeviceId, stream: &Stream) -> Result<&Self, HalError> {
        match stream.raw().as_any().downcast_ref::<CudaStream>() {
            Some(cuda) if cuda.context.id() == device => Ok(cuda),
            _ => Err(HalError::WrongDevice { device, what: "the stream" }),
        }
    }

    /// The driver's handle.
    pub(crate) fn handle(&self) -> sys::CUstream {
        self.raw
    }

    /// Waits until all its work is done.
    pub(crate) fn synchronize(&self) -> Result<(), HalError> {
        self.context.bind()?;
        // SAFETY: the handle is valid as long as `self`.
        self.context.check("cuStreamSynchronize", unsafe { result::stream::synchronize(self.raw) })
    }

    /// Records an event at the current end of the stream.
    pub(crate) fn record(&self) -> Result<Event, HalError> {
        self.context.bind()?;
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let raw = self.context.check("cuEventCreate", result::event::create(flags))?;
        let event = CudaEvent { context: self.context.clone(), raw };
        // SAFETY: both handles are valid and of the same context.
        self.context.check("cuEventRecord", unsafe { result::event::record(event.raw, self.raw) })?;
        Ok(Event::from_raw(Arc::new(event)))
    }

    /// Makes later work of the stream wait for `event`.
    pub(crate) fn wait(&self, event: &Event) -> Result<(), HalError> {
        let event = CudaEvent::of(self.context.id(), event, "the event")?;
        self.context.bind()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles are valid and of the same context. The
        // driver keeps what it needs of the event, which may be
        // destroyed before the stream reaches the wait.
        let waits = unsafe { result::stream::wait_event(self.raw, event.raw, flags) };
        self.context.check("cuStreamWaitEvent", waits)
    }
}

impl RawStream for CudaStream {
    fn device(&self) -> DeviceId {
        self.context.id()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if !matches!(self.owner, Owner::Ours) {
            return;
        }
        let destroyed = self.context.bind().and_then(|()| {
            // SAFETY: the handle was created here and is destroyed once;
            // pending work still completes.
            self.context.check("cuStreamDestroy", unsafe { result::stream::destroy(self.raw) })
        });
        if let Err(error) = destroyed {
            tracing::warn!(%error, "a stream could not be destroyed");
        }
    }
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaStream({}, {:p})", self.context.id(), self.raw)
    }
}

/// The event behind an [`Event`].
pub(crate) struct CudaEvent {
    context: Arc<DeviceContext>,
    raw: sys::CUevent,
}

// SAFETY: an event handle may be used from every thread; the
// driver serialises the calls.
unsafe impl Send for CudaEvent {}
// SAFETY: as above.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    fn of<'a>(device: DeviceId, event: &'a Event, what: &'static str) -> Result<&'a Self, HalError> {
        match event.raw().as_any().downcast_ref::<CudaEvent>() {
            Some(cuda) if cuda.context.id() == device => Ok(cuda),
            _ => Err(HalError::WrongDevice { device, what }),
        }
    }
}

/// Time from `start` to `end`. Waits for `end`.
pub(crate) fn elapsed(context: &DeviceContext, start: &Event, end: &Event) -> Result<Duration, HalError> {
    let start = CudaEvent::of(context.id(), start, "the start event")?;
    let end = CudaEvent::of(context.id(), end, "the end event")?;
    context.bind()?;
    // SAFETY: both events are valid, were recorded when they were
    // made, and belong to this context.
    let milliseconds = unsafe {
        context.check("cuEventSynchronize", result::event::synchronize(end.raw))?;
        driver::elapsed_milliseconds(context, start.raw, end.raw)?
    };
    Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) * 1e-3))
}

impl RawEvent for CudaEvent {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        let destroyed = self.context.bind().and_then(|()| {
            // SAFETY: the handle was created by
            // `CudaStream::record` and is destroyed once.
            self.context.check("cuEventDestroy", unsafe { result::event::destroy(self.raw) })
        });
        if let Err(error) = destroyed {
            tracing::warn!(%error, "an event could not be destroyed");
        }
    }
}

impl fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaEvent({}, {:p})", self.context.id(), self.raw)
    }
}
