//! [`Processor`]: SIMD level and thread pool of a device, which is
//! all that kernel families know of it.

use qgemm_hal::{Device, HalError};

use crate::pool::Pool;
use crate::simd::Simd;

/// Clock for estimating rates, in cycles per second. Only their
/// ratio to the bandwidth matters.
pub(crate) const CLOCK: f64 = 2.5e9;

/// Processor with its thread pool, for kernels. `CpuDevice`
/// returns it as its [`Device::as_any`].
pub(crate) struct Processor {
    pub simd: &'static Simd,
    pub pool: Pool,
}

impl Processor {
    /// The processor of a device.
    ///
    /// # Errors
    /// [`HalError::WrongDevice`] for another backend's device.
    pub fn of(device: &dyn Device) -> Result<&Self, HalError> {
        let wrong = HalError::WrongDevice { device: device.info().id, what: "a kernel family of the CPU" };
        device.as_any().downcast_ref().ok_or(wrong)
    }

    pub fn simd(&self) -> &'static Simd {
        self.simd
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }
}
