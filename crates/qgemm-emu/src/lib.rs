//! Emulator for the CUDA backend's kernels. One device for each
//! kernel variant (`emu:sm70` to `emu:sm120`) runs the same
//! sources on the host, finds faults that a GPU hides, and
//! counts what a GPU would do.
//!
//! The host's C++ compiler builds a kernel's sources and prelude,
//! with models from this crate instead of the PTX atoms
//! (`kernels/atoms`). Every thread of a CTA has its own stack. Warp
//! collectives compute from the registers of all lanes. Every memory
//! access is checked against the operands of the launch, earlier
//! writes, and the ordering of threads. A [`Fault`] ends the launch
//! and names kernel, file, line, CTA and thread.
//!
//! It is meant for tests: a launch takes thousands of
//! times as long as on a GPU.
#![deny(missing_docs)]

mod chips;
mod compile;
mod counters;
mod device;
mod families;
mod fault;
mod kernel;
mod machine;
pub mod model;
mod objects;
mod sources;

use std::collections::BTreeMap;
use std::sync::Arc;

use qgemm_cuda::KernelSpec;
use qgemm_hal::{BufferRef, Device, DeviceId, DeviceInfo, DeviceKind, Feature, HalError, Variant};

pub use counters::{AccessSite, KernelCounters, Space, Traffic};
pub use device::Geometry;
pub use fault::{Fault, FaultKind};
pub use machine::{Access, MOST_DIMENSIONS, Region, Swizzle, TensorMap};
pub use qgemm_cuda::ChipNumbers;

use compile::Compiler;
use device::EmuDevice;

/// All emulated devices.
///
/// # Errors
/// [`HalError::NoDevice`] when there is no working C++ compiler.
pub fn devices() -> Result<Vec<DeviceInfo>, HalError> {
    Compiler::get().map_err(|why| HalError::NoDevice { device: "emu".into(), why })?;
    Ok(Variant::ALL.into_iter().map(chips::info).collect())
}

/// Opens the device that emulates the variant with this
/// [number](Variant::number).
///
/// # Errors
/// [`HalError::NoDevice`] when the variant or a working
/// C++ compiler does not exist.
pub fn open(variant: u32) -> Result<Arc<dyn Device>, HalError> {
    let known = Variant::ALL.into_iter().find(|v| v.number() == variant);
    let unknown = || HalError::NoDevice { device: format!("emu:sm{variant}"), why: "there is no such variant".into() };
    let variant = known.ok_or_else(unknown)?;
    Ok(EmuDevice::open(variant, chips::info(variant))?)
}

/// Opens a device that emulates the variant of a chip, and plans as on
/// that chip.
///
/// # Errors
/// [`HalError::NoDevice`] when no kernels or no working C++ compiler
/// exist for it.
pub fn describe(chip: &ChipNumbers<'_>) -> Result<Arc<dyn Device>, HalError> {
    let absent = |why| HalError::NoDevice { device: chip.name.to_owned(), why };
    let id = |ordinal| DeviceId { kind: DeviceKind::Emu, ordinal };
    let info = chip.info(id(chip.arch)).map_err(absent)?;
    let variant = info.variant.ok_or_else(|| absent("it has no kernel variant".to_owned()))?;
    let features = [Feature::Emulated].into();
    Ok(EmuDevice::open(variant, DeviceInfo { id: id(variant.number()), features, ..info })?)
}

/// Makes `device` count memory accesses, which slows it down.
///
/// # Errors
/// [`HalError::Unsupported`] when it is not emulated.
pub fn count_accesses(device: &dyn Device) -> Result<(), HalError> {
    counting(device)?.count_accesses();
    Ok(())
}

/// Counters since the last call, by kernel name.
///
/// # Errors
/// [`HalError::Unsupported`] when `device` is not emulated.
pub fn take_counters(device: &dyn Device) -> Result<BTreeMap<String, KernelCounters>, HalError> {
    Ok(counting(device)?.take_counters())
}

fn counting(device: &dyn Device) -> Result<&EmuDevice, HalError> {
    EmuDevice::of(device).map_err(|_| HalError::Unsupported {
        device: device.info().id,
        what: "counting".into(),
        why: "only emulated devices such as emu:sm75 count".into(),
    })
}

/// Sets the CTA order of later launches: in order for `seed`
/// 0, otherwise shuffled. Results must not depend on it.
///
/// # Errors
/// [`HalError::WrongDevice`] when `device` is not emulated.
pub fn set_block_order(device: &dyn Device, seed: u64) -> Result<(), HalError> {
    EmuDevice::of(device)?.set_seed(seed);
    Ok(())
}

/// Sets the summation model of matrix instructions for later launches: that
/// of another chip, to compare with its results, or f64.
///
/// # Errors
/// [`HalError::WrongDevice`] when `device` is not emulated.
pub fn set_precision(device: &dyn Device, precision: model::Precision) -> Result<(), HalError> {
    EmuDevice::of(device)?.set_precision(precision);
    Ok(())
}

/// Address of the first byte of a view of `device`'s
/// memory, for a kernel's parameter.
///
/// # Errors
/// [`HalError::WrongDevice`].
pub fn device_address(device: &dyn Device, view: BufferRef<'_>) -> Result<u64, HalError> {
    families::address(device.info().id, view, "the view")
}

/// Runs any kernel `spec` with the operands `regions`, for tests
/// of atoms and of single kernels.
///
/// # Errors
/// [`HalError::Compile`], or [`HalError::KernelFault`]
/// with the kernel's fault.
///
/// # Safety
/// `geometry.params` must have the layout of the kernel's parameter.
/// Nothing else may use the memory of `regions` meanwhile, except for
/// reading what the launch only reads.
pub unsafe fn launch_spec(
    device: &dyn Device,
    spec: &KernelSpec,
    geometry: Geometry<'_>,
    regions: &[Region],
) -> Result<(), HalError> {
    let emu = EmuDevice::of(device)?;
    let slot = emu.kernel(spec)?;
    let Some(kernel) = slot.get() else {
        return Err(HalError::WrongDevice { device: device.info().id, what: "the kernel" });
    };
    // SAFETY: by the contract of this function.
    unsafe { emu.launch(&spec.name, kernel, geometry, regions) }
}
