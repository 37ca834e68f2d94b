//! What the objects of one opened device share: wgpu's handles, and how its errors become ours.

use std::fmt;
use std::sync::{Arc, OnceLock};

use qgemm_hal::{DeviceId, HalError};
use wgpu::ErrorFilter;

use crate::pipeline::Pipelines;

/// An opened wgpu device. Buffers, streams, events and kernels hold it and know each other by it.
pub(crate) struct Shared {
    pub id: DeviceId,
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    pub limits: wgpu::Limits,
    pub timestamps: bool,
    pub pipelines: Pipelines,
    /// Bound where a kernel has no such operand.
    pub absent: wgpu::Buffer,
    /// Why the device can no longer be used: it was lost, or an error came that no scope caught.
    broken: Arc<OnceLock<String>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.id)
    }
}

impl Shared {
    pub fn new(id: DeviceId, device: wgpu::Device, queue: wgpu::Queue) -> Result<Arc<Self>, HalError> {
        let broken = Arc::new(OnceLock::new());
        let lost = broken.clone();
        device.set_device_lost_callback(move |reason, message| {
            // Dropping a device reports a loss too, which is nothing to log.
            if reason != wgpu::DeviceLostReason::Destroyed {
                tracing::error!(device = %id, message, "device lost");
            }
            lost.get_or_init(|| format!("the device was lost ({reason:?}): {message}"));
        });
        let uncaught = broken.clone();
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            tracing::error!(device = %id, %error, "error outside any operation");
            uncaught.get_or_init(|| error.to_string());
        }));
        let (pipelines, absent) = scoped(&device, || {
            let absent = device.create_buffer(&wgpu::BufferDescriptor {
                label: Some("absent operand"),
                size: 16,
                usage: wgpu::BufferUsages::STORAGE,
                mapped_at_creation: false,
            });
            (Pipelines::new(&device), absent)
        })
        .map_err(|fault| fault.into_hal(id, "setting the device up"))?;
        let timestamps = device.features().contains(wgpu::Features::TIMESTAMP_QUERY_INSIDE_ENCODERS);
        Ok(Arc::new(Self { id, limits: device.limits(), timestamps, pipelines, absent, broken, device, queue }))
    }

    /// Runs `work`, and makes an error of what wgpu reports meanwhile; `call` says what was being done.
    pub fn scoped<T>(&self, call: &'static str, work: impl FnOnce() -> T) -> Result<T, HalError> {
        self.try_scoped(call, work)?.map_err(|fault| fault.into_hal(self.id, call))
    }

    /// As [`Shared::scoped`], leaving the meaning of the fault to the caller.
    pub fn try_scoped<T>(&self, call: &'static str, work: impl FnOnce() -> T) -> Result<Result<T, Fault>, HalError> {
        self.check(call)?;
        let result = scoped(&self.device, work);
        // A loss reaches no scope; objects made after it are dead.
        self.check(call)?;
        Ok(result)
    }

    /// Waits for all submitted work.
    pub fn wait(&self, call: &'static str) -> Result<(), HalError> {
        self.device.poll(wgpu::PollType::wait_indefinitely()).map_err(|e| self.driver(call, e.to_string()))?;
        self.check(call)
    }

    /// An error of the driver.
    pub fn driver(&self, call: &'static str, message: String) -> HalError {
        HalError::Driver { device: self.id, call, message }
    }

    fn check(&self, call: &'static str) -> Result<(), HalError> {
        match self.broken.get() {
            Some(message) => Err(self.driver(call, message.clone())),
            None => Ok(()),
        }
    }
}

/// What an error scope caught.
pub(crate) enum Fault {
    OutOfMemory(String),
    Other(String),
}

impl Fault {
    pub fn into_hal(self, device: DeviceId, call: &'static str) -> HalError {
        HalError::Driver { device, call, message: self.into_message() }
    }

    pub fn into_message(self) -> String {
        match self {
            Fault::OutOfMemory(message) | Fault::Other(message) => message,
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
    use crate::device::WgpuDevice;

    #[test]
    fn a_lost_device_is_an_error_of_every_call() {
        let opened = match crate::open(0) {
            Ok(opened) => opened,
            Err(HalError::NoDevice { why, .. }) => return eprintln!("skipped: {why}"),
            Err(error) => panic!("{error}"),
        };
        let shared = &opened.as_any().downcast_ref::<WgpuDevice>().expect("our own").shared;
        let stream = opened.default_stream();
        let mut buffer = opened.allocate(8, "test").expect("small");
        shared.device.destroy();
        let error = opened.synchronize(&stream).expect_err("lost");
        assert!(matches!(&error, HalError::Driver { message, .. } if message.contains("lost")), "{error}");
        let errors = [
            opened.allocate(8, "test").expect_err("lost"),
            opened.upload(&stream, &[0; 8], (&mut buffer).into()).expect_err("lost"),
            opened.download(&stream, (&buffer).into(), &mut [0; 8]).expect_err("lost"),
            opened.fill(&stream, (&mut buffer).into(), 0).expect_err("lost"),
            opened.record(&stream).expect_err("lost"),
        ];
        for error in errors {
            assert!(matches!(&error, HalError::Driver { message, .. } if message.contains("lost")), "{error}");
        }
    }

    #[test]
    fn what_wgpu_refuses_is_an_error_with_the_call() {
        let opened = match crate::open(0) {
            Ok(opened) => opened,
            Err(HalError::NoDevice { why, .. }) => return eprintln!("skipped: {why}"),
            Err(error) => panic!("{error}"),
        };
        let shared = &opened.as_any().downcast_ref::<WgpuDevice>().expect("our own").shared;
        let error = shared.scoped("trying", || {
            shared.device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: 8,
                usage: wgpu::BufferUsages::empty(),
                mapped_at_creation: false,
            })
        });
        assert!(matches!(error, Err(HalError::Driver { call: "trying", .. })));
        let error = crate::pipeline::pipeline(shared, "broken", "const A = 1;", "not WGSL".into()).expect_err("broken");
        let HalError::Compile { kernel, log, .. } = &error else { panic!("{error}") };
        assert!(kernel == "broken" && log.contains("WGSL"), "{log}");
        assert!(opened.allocate(8, "test").is_ok(), "later calls are not affected");
    }
}
