//! [`Gpu`]: an opened GPU for the rest of the crate. Layering: HAL device, then families, then this.

use std::sync::Arc;

use qgemm_hal::{Device, DeviceId, Feature, HalError};

use crate::cache::Cache;
use crate::chip::{self, Chip};
use crate::driver::DeviceContext;
use crate::function::Function;
use crate::spec::KernelSpec;
use crate::store::KernelStore;
use crate::target::Target;

/// A GPU with its context and loaded kernels.
#[derive(Debug)]
pub(crate) struct Gpu {
    context: Arc<DeviceContext>,
    chip: Chip,
    store: KernelStore,
}

impl Gpu {
    /// Opens GPU `ordinal`.
    pub(crate) fn open(ordinal: u32) -> Result<Self, HalError> {
        let context = Arc::new(DeviceContext::open(ordinal)?);
        let chip = chip::read(ordinal)?;
        if chip.info.features.contains(&Feature::OlderKernels) {
            let (name, arch) = (&chip.info.name, &chip.info.arch);
            tracing::warn!("{name} ({arch}) runs Ampere's kernels: there are none for its own matrix instructions yet");
        }
        let store = KernelStore::new(chip.arch, chip.target(), Cache::of_user());
        Ok(Self { context, chip, store })
    }

    /// The GPU behind `device`.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] when `device` belongs to another backend.
    pub(crate) fn of(device: &dyn Device) -> Result<&Self, HalError> {
        device.as_any().downcast_ref().ok_or(HalError::WrongDevice { device: device.info().id, what: "a CUDA kernel" })
    }

    /// The device id.
    pub(crate) fn id(&self) -> DeviceId {
        self.context.id()
    }

    /// The context shared by all objects of this GPU.
    pub(crate) fn context(&self) -> &Arc<DeviceContext> {
        &self.context
    }

    /// Chip properties.
    pub(crate) fn chip(&self) -> &Chip {
        &self.chip
    }

    /// Stores the measured bandwidth, in bytes per second.
    pub(crate) fn set_bandwidth(&mut self, bandwidth: f64) {
        self.chip.info.bandwidth = bandwidth;
    }

    /// The kernel `spec`: found or compiled, and loaded once.
    ///
    /// # Errors
    /// [`HalError::Compile`],
    /// [`HalError::KernelUnavailable`] or a driver error.
    pub(crate) fn kernel(&self, spec: &KernelSpec) -> Result<Function, HalError> {
        self.load(spec, None)
    }

    /// The kernel `spec`, compiled for exactly `target`.
    ///
    /// # Errors
    /// As [`Gpu::kernel`].
    pub(crate) fn kernel_for(&self, spec: &KernelSpec, target: Target) -> Result<Function, HalError> {
        self.load(spec, Some(target))
    }

    fn load(&self, spec: &KernelSpec, target: Option<Target>) -> Result<Function, HalError> {
        self.store.get(&self.context, self.chip.info.shared_bytes, spec, target)
    }
}
