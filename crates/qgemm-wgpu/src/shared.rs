//! Shared state of an opened device: wgpu handles, and the
//! conversion of wgpu errors.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use qgemm_hal::{DeviceId, HalError};
use wgpu::ErrorFilter;

use crate::adapter::CooperativeMatrices;
use crate::bind_groups::BindGroups;
use crate::pipeline::{Binding, Pipelines};

/// Maximum launches per submission, because submitting takes longer than
/// many kernels. The first launch after a wait is submitted at
/// once, then two, four and so on, so that the device
/// does not idle while the host batches.
const MOST_TOGETHER: usize = 16;

/// An opened wgpu device. Buffers, streams, events and kernels
/// hold it, and are compared by it.
pub(crate) struct Shared {
    pub id: DeviceId,
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub limits: wgpu::Limits,
    pub timestamps: bool,
    /// Supported cooperative matrices.
    pub matrices: Option<CooperativeMatrices>,
    pub pipelines: Pipelines,
    pub groups: BindGroups,
    /// Bound for absent operands that are read.
    pub absent: wgpu::Buffer,
    /// Bound for absent operands that are written. A dispatch must
    /// not use one buffer both ways.
    pub absent_written: wgpu::Buffer,
    /// Launches that have not been submitted.
    pending: Mutex<Pending>,
    /// Maximum batched launches.
    most_together: usize,
    /// Why the device is unusable: it was lost, or an error
    /// occurred outside every scope.
    broken: Arc<OnceLock<Fault>>,
}

/// Launches that have not been submitted.
#[derive(Default)]
struct Pending {
    open: Option<Open>,
    /// Launches in the open pass.
    count: usize,
    /// Number of launches to submit together next.
    together: usize,
}

/// An open pass that collects launches. One pass for all is
/// cheaper for host and device than one for each.
struct Open {
    // Dropped before its encoder.
    pass: wgpu::ComputePass<'static>,
    encoder: wgpu::CommandEncoder,
}

impl Open {
    fn new(device: &wgpu::Device) -> Self {
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()).forget_lifetime();
        Self { pass, encoder }
    }

    fn finish(self) -> wgpu::CommandBuffer {
        drop(self.pass);
        self.encoder.finish()
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.id)
    }
}

impl Shared {
    pub fn new(
        id: DeviceId,
        device: wgpu::Device,
        queue: wgpu::Queue,
        matrices: Option<CooperativeMatrices>,
        owner: Owner,
    ) -> Result<Arc<Self>, HalError> {
        let broken = Arc::new(OnceLock::new());
        // A device has one callback of each kind, and a
        // caller-owned device keeps the caller's.
        if owner == Owner::Backend {
            watch(id, &device, &broken);
        }
        let (pipelines, [absent, absent_written]) = scoped(&device, || {
            let absent = ["absent operand", "absent result"].map(|label| {
                device.create_buffer(&wgpu::BufferDescriptor {
                    label: Some(label),
                    size: 16,
                    usage: wgpu::BufferUsages::STORAGE,
                    mapped_at_creation: false,
                })
            });
            (Pipelines::new(&device), absent)
        })
        .map_err(|fault| fault.into_hal(id, "setting the device up"))?;
        Ok(Arc::new(Self {
            id,
            limits: device.limits(),
            timestamps: device.features().contains(wgpu::Features::TIMESTAMP_QUERY_INSIDE_ENCODERS),
            matrices,
            pipelines,
            groups: BindGroups::default(),
            absent,
            absent_written,
            pending: Mutex::default(),
            // Submissions of the caller after a launch must come after it.
            most_together: if owner == Owner::Backend { MOST_TOGETHER } else { 1 },
            broken,
            device,
            queue,
        }))
    }

    /// Whether every call fails.
    pub fn is_broken(&self) -> bool {
        self.broken.get().is_some()
    }

    /// Makes every later call fail with `reason`.
    pub fn lose(&self, reason: String) {
        self.broken.get_or_init(|| lost(&reason));
    }

    /// Whether `buffer`, which shaders may read, belongs to this device.
    pub fn owns(&self, buffer: &wgpu::Buffer) -> Result<bool, HalError> {
        let interface = &crate::families::gemm::INTERFACE;
        let entry = |(i, (binding, written)): (usize, (u32, bool))| wgpu::BindGroupEntry {
            binding,
            resource: wgpu::BindingResource::Buffer(match (i, written) {
                (0, _) => wgpu::BufferBinding { buffer, offset: 0, size: wgpu::BufferSize::new(4) },
                (_, false) => self.absent.as_entire_buffer_binding(),
                (_, true) => self.absent_written.as_entire_buffer_binding(),
            }),
        };
        let entries: Vec<_> = interface.bindings().enumerate().map(entry).collect();
        let bound = self.try_scoped("wrapping a buffer", || {
            self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &self.pipelines.layout(interface, Binding::Apart).bindings,
                entries: &entries,
            })
        })?;
        Ok(bound.is_ok())
    }

    /// Runs `work` and returns errors that wgpu reports
    /// meanwhile; `call` names the activity.
    pub fn scoped<T>(&self, call: &'static str, work: impl FnOnce() -> T) -> Result<T, HalError> {
        self.try_scoped(call, work)?.map_err(|fault| fault.into_hal(self.id, call))
    }

    /// As [`Shared::scoped`], but the caller interprets the fault.
    pub fn try_scoped<T>(&self, call: &'static str, work: impl FnOnce() -> T) -> Result<Result<T, Fault>, HalError> {
        self.check(call)?;
        let result = scoped(&self.device, work);
        // A device loss is not reported to scopes; objects
        // created after it are dead.
        self.check(call)?;
        Ok(result)
    }

    /// Adds a launch, which `record` writes into a pass, to
    /// the current batch. The batch is submitted at the
    /// latest before other work.
    pub fn launch(&self, record: impl FnOnce(&mut wgpu::ComputePass<'static>)) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        record(&mut pending.open.get_or_insert_with(|| Open::new(&self.device)).pass);
        pending.count += 1;
        if pending.count >= pending.together.clamp(1, self.most_together) {
            pending.together = (pending.count * 2).min(self.most_together);
            self.submit(&mut pending);
        }
    }

    /// Submits all batched launches. Must be called before
    /// any other work is queued.
    pub fn flush(&self) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        pending.together = 1;
        self.submit(&mut pending);
    }

    fn submit(&self, pending: &mut Pending) {
        pending.count = 0;
        if let Some(open) = pending.open.take() {
            self.queue.submit([open.finish()]);
        }
    }

    /// Waits for all submitted work.
    pub fn wait(&self, call: &'static str) -> Result<(), HalError> {
        self.scoped(call, || self.flush())?;
        self.device.poll(wgpu::PollType::wait_indefinitely()).map_err(|e| self.driver(call, e.to_string()))?;
        self.check(call)
    }

    /// Creates a driver error.
    pub fn driver(&self, call: &'static str, message: String) -> HalError {
        HalError::Driver { device: self.id, call, message }
    }

    fn check(&self, call: &'static str) -> Result<(), HalError> {
        match self.broken.get() {
            Some(broken) => Err(broken.clone().into_hal(self.id, call)),
            None => Ok(()),
        }
    }
}

/// Installs callbacks that mark the device as broken.
fn watch(id: DeviceId, device: &wgpu::Device, broken: &Arc<OnceLock<Fault>>) {
    let of_loss = broken.clone();
    device.set_device_lost_callback(move |reason, message| {
        // Dropping a device also reports a loss,
        // which must not be logged.
        if reason != wgpu::DeviceLostReason::Destroyed {
            tracing::error!(device = %id, message, "device lost");
        }
        of_loss.get_or_init(|| lost(&format!("{reason:?}: {message}")));
    });
    let uncaught = broken.clone();
    device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
        tracing::error!(device = %id, %error, "error outside any operation");
        uncaught.get_or_init(|| Fault::Other(error.to_string()));
    }));
}

fn lost(reason: &str) -> Fault {
    Fault::Lost(reason.to_owned())
}

/// Owner of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// This crate.
    Backend,
    /// The caller's code.
    Caller,
}

/// A device fault.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    Lost(String),
    OutOfMemory(String),
    Other(String),
}

impl Fault {
    pub fn into_hal(self, device: DeviceId, call: &'static str) -> HalError {
        match self {
            Fault::Lost(reason) => HalError::DeviceLost { device, call, reason },
            Fault::OutOfMemory(message) => {
                HalError::Driver { device, call, message: format!("out of memory: {message}") }
            }
            Fault::Other(message) => HalError::Driver { device, call, message },
        }
    }

    pub fn into_message(self) -> String {
        match self {
            Fault::Lost(message) | Fault::OutOfMemory(message) | Fault::Other(message) => message,
        }
    }
}

fn scoped<T>(device: &wgpu::Device, work: impl FnOnce() -> T) -> Result<T, Fault> {
    let memory = device.push_error_scope(ErrorFilter::OutOfMemory);
    let internal = device.push_error_scope(ErrorFilter::Internal);
    let validation = device.push_error_scope(ErrorFilter::Validation);
    let value = work();
    let validation = pollster::block_on(validation.pop());
    let internal = pollster::block_on(internal.pop());
    let memory = pollster::block_on(memory.pop());
    if let Some(error) = memory {
        return Err(Fault::OutOfMemory(error.to_string()));
    }
    match validation.or(internal) {
        Some(error) => Err(Fault::Other(error.to_string())),
        None => Ok(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::open_for_test;
    use crate::caller::shared_of;

    #[test]
    fn a_lost_device_is_an_error_of_every_call() {
        let Some(opened) = open_for_test() else { return };
        let shared = shared_of(&*opened).expect("our own");
        let stream = opened.default_stream();
        let mut buffer = opened.allocate(8, "test").expect("small");
        shared.device.destroy();
        let error = opened.synchronize(&stream).expect_err("lost");
        assert!(matches!(&error, HalError::DeviceLost { .. }), "{error}");
        let errors = [
            (opened.allocate(8, "test").expect_err("lost"), "allocating a buffer"),
            (opened.upload(&stream, &[0; 8], (&mut buffer).into()).expect_err("lost"), "uploading"),
            (opened.download(&stream, (&buffer).into(), &mut [0; 8]).expect_err("lost"), "downloading"),
            (opened.fill(&stream, (&mut buffer).into(), 0).expect_err("lost"), "filling a buffer"),
            (opened.record(&stream).expect_err("lost"), "recording an event"),
        ];
        for (error, doing) in errors {
            assert!(matches!(&error, HalError::DeviceLost { call, .. } if *call == doing), "{error}");
        }
    }

    #[test]
    fn exhausted_memory_is_named_with_the_call() {
        let error = Fault::OutOfMemory("no heap".into()).into_hal(DeviceId::CPU, "launching a kernel");
        assert_eq!(error.to_string(), "cpu: launching a kernel failed: out of memory: no heap");
    }

    #[test]
    fn what_wgpu_refuses_is_an_error_with_the_call() {
        let Some(opened) = open_for_test() else { return };
        let shared = shared_of(&*opened).expect("our own");
        let error = shared.scoped("trying", || {
            shared.device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: 8,
                usage: wgpu::BufferUsages::empty(),
                mapped_at_creation: false,
            })
        });
        assert!(matches!(error, Err(HalError::Driver { call: "trying", .. })));
        let shader = crate::shader::Shader { prelude: "const A = 1;".into(), source: "not WGSL".into() };
        let error =
            crate::pipeline::pipeline(shared, &crate::families::gemm::INTERFACE, Binding::Apart, "broken", shader)
                .expect_err("broken");
        let HalError::Compile { kernel, log, .. } = &error else { panic!("{error}") };
        assert!(kernel == "broken" && log.contains("WGSL"), "{log}");
        assert!(opened.allocate(8, "test").is_ok(), "later calls are not affected");
    }
}
