//! A device that does nothing, for testing higher
//! layers without a backend.
//!
//! Its memory is real (zeroed host RAM). Its one kernel family
//! accepts every operation and leaves the output unchanged.

use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use qgemm_formats::Format;
use qgemm_formats::prepack::FragmentLayout;

use crate::buffer::{Buffer, BufferMut, BufferRef};
use crate::caps::{DeviceId, DeviceInfo, DeviceKind, Math};
use crate::device::{Device, Event, Stream};
use crate::error::{HalError, Unsupported};
use crate::family::{Catalog, Family};
use crate::host_memory::HostMemory;
use crate::host_stream::{HostEvent, HostStream};
use crate::op::{Operand, OperandDesc, Operation};
use crate::operands::Operands;
use crate::sequence::{Geometry, Kernel, LaunchSequence, LaunchStep};

const ID: DeviceId = DeviceId { kind: DeviceKind::Noop, ordinal: 0 };

/// Opens the no-op device.
///
/// # Errors
/// [`HalError::NoDevice`] when `id` is not `noop`.
pub fn open(id: DeviceId) -> Result<Arc<dyn Device>, HalError> {
    if id != ID {
        return Err(HalError::NoDevice { device: id.to_string(), why: "there is one no-op device, `noop`".into() });
    }
    Ok(Arc::new(NoopDevice::new()))
}

/// All no-op devices: one.
pub fn devices() -> Vec<DeviceInfo> {
    vec![NoopDevice::new().info]
}

/// The no-op device.
#[derive(Debug)]
pub struct NoopDevice {
    info: DeviceInfo,
    default_stream: Stream,
    launches: Arc<AtomicU64>,
}

impl NoopDevice {
    fn new() -> Self {
        let info = DeviceInfo {
            id: ID,
            name: "no-op device".into(),
            arch: "none".into(),
            variant: None,
            driver: String::new(),
            units: 4,
            memory_bytes: 0,
            bandwidth: 1e9,
            cache_bytes: 0,
            shared_bytes: 0,
            max_buffer_bytes: isize::MAX as u64,
            rates: vec![(Math::FmaF32, 1e9)],
            launch_seconds: 0.0,
            features: BTreeSet::new(),
        };
        Self { info, default_stream: HostStream::stream(ID), launches: Arc::default() }
    }

    /// Kernel launches so far.
    pub fn launches(&self) -> u64 {
        self.launches.load(Ordering::Relaxed)
    }
}

impl Device for NoopDevice {
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
        FragmentLayout::Canonical
    }

    fn catalog(&self) -> Catalog {
        macro_rules! catalog {
            ($($name:ident: $op:ident($($part:ident),*) [$($text:literal $spec:ident($keys:ident)),*] $summary:literal,)*) => {
                Catalog { $($name: &[&NoopFamily],)* }
            };
        }
        crate::with_operations!(catalog)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// The family `noop` of every operation. Its `gemm` config supports
/// split-K, so that some plans have a workspace.
#[derive(Debug)]
struct NoopFamily;

impl<O: Operation> Family<O> for NoopFamily {
    fn name(&self) -> &'static str {
        "noop"
    }

    fn configs(&self, op: &O, _info: &DeviceInfo) -> Result<Vec<O::Config>, Unsupported> {
        Ok(vec![op.noop_config()?])
    }

    /// A sequence of one step without operands.
    fn prepare(&self, device: &dyn Device, op: &O, plan: &O::Plan) -> Result<LaunchSequence, HalError> {
        let device = device
            .as_any()
            .downcast_ref::<NoopDevice>()
            .ok_or(HalError::WrongDevice { device: device.info().id, what: "the family `noop`" })?;
        let kernel = NoopKernel { operands: O::Operand::ALL, launches: device.launches.clone() };
        let geometry = Geometry { grid: [1, 1, 1], threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<O::Operand>(op.kernel_id(plan), geometry, Arc::new(kernel)).of_operation();
        Ok(LaunchSequence::new::<O::Operand>(op.plan_name("noop"), vec![step]))
    }

    fn source_hash(&self, _: &O, _: &O::Config) -> u64 {
        0
    }
}

#[derive(Debug)]
struct NoopKernel {
    operands: &'static [OperandDesc],
    launches: Arc<AtomicU64>,
}

impl Kernel for NoopKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(ID, stream)?;
        for (slot, desc) in self.operands.iter().enumerate() {
            operands.at(slot).map(|view| HostMemory::of_device(ID, view, desc.name)).transpose()?;
        }
        self.launches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn takes_portions(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_by_name_only() {
        let device = open("noop".parse().expect("a name")).expect("always there");
        assert_eq!(device.info().id.to_string(), "noop");
        assert!(matches!(open(DeviceId::CPU), Err(HalError::NoDevice { .. })));
        assert_eq!(devices().len(), 1);
    }

    #[test]
    fn memory_and_events_work() {
        let device = open(ID).expect("always there");
        let stream = device.default_stream();
        let mut buffer = device.allocate(16, "test").expect("memory");
        let start = device.record(&stream).expect("an event");
        device.upload(&stream, &[5; 8], (&mut buffer).into()).expect("fits");
        let end = device.record(&stream).expect("an event");
        let mut out = [1; 16];
        device.download(&stream, (&buffer).into(), &mut out).expect("fits");
        assert_eq!((&out[..8], &out[8..]), (&[5u8; 8][..], &[0u8; 8][..]));
        assert!(device.elapsed(&start, &end).is_ok());
        let foreign = HostStream::stream(DeviceId::CPU);
        assert!(matches!(device.synchronize(&foreign), Err(HalError::WrongDevice { what: "stream", .. })));
    }
}
