//! The CPU backend: every format, every activation type, all cores, vector instructions chosen at run time.
//!
//! Weights are packed so that a vector register is sixteen rows. Where activations may be quantized and weights are integers,
//! codes are unpacked to bytes and multiplied as integers (`gemm_int8`); else they are decoded to f32 a few columns at a time
//! and multiplied in f32 (`gemm`). Products are accumulated in the order of the columns, which depends on neither M nor the number of
//! threads, so results are bit-identical between runs and a row's result does not depend on its batch. (They differ in the last
//! bits between processors with different vector instructions.)
#![deny(missing_docs)]

mod arena;
mod convert;
mod device;
mod families;
mod job;
mod operand;
mod ordered;
mod packed;
mod simd;
mod source_hash;

use std::sync::Arc;

use qgemm_hal::{Device, DeviceId, DeviceInfo, HalError};

pub use device::CpuDevice;
pub use families::convert::{CONVERT, ConvertFamily};
pub use families::gemm::{GEMM, GEMM_INT8, GemmFamily, GemmInt8Family};
pub use families::routing::{ROUTING, RoutingFamily};

/// Opens the processor, which is the device `cpu` (ordinal 0).
///
/// # Errors
/// [`HalError::NoDevice`] for another ordinal.
pub fn open(ordinal: u32) -> Result<Arc<dyn Device>, HalError> {
    if ordinal != DeviceId::CPU.ordinal {
        return Err(HalError::NoDevice {
            device: format!("cpu:{ordinal}"),
            why: "the host is one device, `cpu`".into(),
        });
    }
    Ok(Arc::new(CpuDevice::new()))
}

/// The processor.
///
/// # Errors
/// None: every host has one. The signature is that of all backends.
pub fn devices() -> Result<Vec<DeviceInfo>, HalError> {
    Ok(vec![CpuDevice::new().info().clone()])
}
