//! Kernels that no plan may use.

use qgemm_hal::{DeviceInfo, KernelId};
use serde::{Deserialize, Serialize};

use crate::measured::as_text;

/// A kernel that no plan uses, for example one
/// that a driver miscompiles.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AvoidedKernel {
    /// The kernel.
    #[serde(with = "as_text")]
    pub kernel: KernelId,
    /// Device name to avoid it on; all devices when absent.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub device: Option<String>,
    /// Why it is avoided.
    pub why: String,
}

impl AvoidedKernel {
    /// Avoids `kernel` on all devices.
    pub fn new(kernel: KernelId, why: impl Into<String>) -> Self {
        Self { kernel, device: None, why: why.into() }
    }

    /// Avoids the kernel only on devices of this name ([`DeviceInfo::name`]).
    pub fn on(mut self, device: impl Into<String>) -> Self {
        self.device = Some(device.into());
        self
    }

    /// Whether it applies to a device like `info`.
    pub(super) fn is(&self, info: &DeviceInfo, kernel: &KernelId) -> bool {
        self.kernel == *kernel && self.device.as_ref().is_none_or(|name| *name == info.name)
    }
}
