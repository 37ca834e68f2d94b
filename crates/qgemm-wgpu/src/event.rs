//! Streams and events. A device has one queue, and all its
//! streams are that queue: work is ordered among them, too.

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use qgemm_hal::{DeviceId, Event, HalError, RawEvent, RawStream, Stream};

use crate::memory;
use crate::shared::Shared;

/// The queue.
#[derive(Debug)]
pub(crate) struct WgpuStream {
    shared: Arc<Shared>,
}

impl RawStream for WgpuStream {
    fn device(&self) -> DeviceId {
        self.shared.id
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl WgpuStream {
    pub fn stream(shared: &Arc<Shared>) -> Stream {
        Stream::from_raw(Arc::new(WgpuStream { shared: shared.clone() }))
    }

    /// Checks that `stream` belongs to `shared`.
    pub fn check(shared: &Arc<Shared>, stream: &Stream) -> Result<(), HalError> {
        match stream.raw().as_any().downcast_ref::<WgpuStream>() {
            Some(own) if Arc::ptr_eq(&own.shared, shared) => Ok(()),
            _ => Err(HalError::WrongDevice { device: shared.id, what: "the stream" }),
        }
    }
}

/// A point in the queue.
#[derive(Debug)]
struct WgpuEvent {
    shared: Arc<Shared>,
    mark: Mark,
}

#[derive(Debug)]
enum Mark {
    /// A device timestamp.
    Query(wgpu::QuerySet),
    /// Host time after all earlier work had finished, for
    /// adapters without timestamps.
    Host(Instant),
}

impl RawEvent for WgpuEvent {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Records an event at the current end of the queue. Without
/// timestamps it waits for the queue.
pub(crate) fn record(shared: &Arc<Shared>) -> Result<Event, HalError> {
    let mark = if shared.timestamps {
        Mark::Query(shared.scoped("recording an event", || {
            let query = shared.device.create_query_set(&wgpu::QuerySetDescriptor {
                label: Some("event"),
                ty: wgpu::QueryType::Timestamp,
                count: 1,
            });
            let mut encoder = shared.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
            encoder.write_timestamp(&query, 0);
            shared.flush();
            shared.queue.submit([encoder.finish()]);
            query
        })?)
    } else {
        shared.wait("recording an event")?;
        Mark::Host(Instant::now())
    };
    Ok(Event::from_raw(Arc::new(WgpuEvent { shared: shared.clone(), mark })))
}

/// Checks that `event` belongs to `shared`.
pub(crate) fn check(shared: &Arc<Shared>, event: &Event) -> Result<(), HalError> {
    mark(shared, event).map(|_| ())
}

/// Time from `start` to `end`; 0 when `end` was recorded first.
pub(crate) fn elapsed(shared: &Arc<Shared>, start: &Event, end: &Event) -> Result<Duration, HalError> {
    match (mark(shared, start)?, mark(shared, end)?) {
        (Mark::Host(start), Mark::Host(end)) => Ok(end.saturating_duration_since(*start)),
        (Mark::Query(start), Mark::Query(end)) => {
            let ticks = ticks(shared, end)?.saturating_sub(ticks(shared, start)?);
            let nanoseconds = ticks as f64 * f64::from(shared.queue.get_timestamp_period());
            Ok(Duration::from_nanos(nanoseconds as u64))
        }
        // All events of a device have the same kind.
        _ => unreachable!("events of one device are of one kind"),
    }
}

fn mark<'a>(shared: &Arc<Shared>, event: &'a Event) -> Result<&'a Mark, HalError> {
    match event.raw().as_any().downcast_ref::<WgpuEvent>() {
        Some(own) if Arc::ptr_eq(&own.shared, shared) => Ok(&own.mark),
        _ => Err(HalError::WrongDevice { device: shared.id, what: "the event" }),
    }
}

fn ticks(shared: &Arc<Shared>, query: &wgpu::QuerySet) -> Result<u64, HalError> {
    let resolved = shared.scoped("reading an event", || {
        let resolved = shared.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("event"),
            size: 8,
            usage: wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: false,
        });
        let mut encoder = shared.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.resolve_query_set(query, 0..1, &resolved, 0);
        shared.queue.submit([encoder.finish()]);
        resolved
    })?;
    let mut bytes = [0; 8];
    memory::read(shared, &resolved, 0, &mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}
