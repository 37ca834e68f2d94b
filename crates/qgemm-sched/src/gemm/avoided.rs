//! Kernels that are known to be bad.

use qgemm_hal::{DeviceInfo, KernelId};
use serde::{Deserialize, Serialize};

use super::tuned::as_text;

/// A kernel that no plan takes, such as one that a driver compiles wrongly.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AvoidedKernel {
    /// The kernel.
    #[serde(with = "as_text")]
    pub kernel: KernelId,
    /// Name of the devices on which it is avoided; all when absent.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub device: Option<String>,
    /// What is bad about it.
    pub why: String,
}

impl AvoidedKernel {
    /// Avoids `kernel` on all devices.
    pub fn new(kernel: KernelId, why: impl Into<String>) -> Self {
        Self { kernel, device: None, why: why.into() }
    }

    /// Avoids it on devices of this name ([`DeviceInfo::name`]) only.
    pub fn on(mut self, device: impl Into<String>) -> Self {
        self.device = Some(device.into());
        self
    }

    /// Whether it is meant on a device like `info`.
    pub(super) fn is(&self, info: &DeviceInfo, kernel: &KernelId) -> bool {
        self.kernel == *kernel && self.device.as_ref().is_none_or(|name| *name == info.name)
    }
}
