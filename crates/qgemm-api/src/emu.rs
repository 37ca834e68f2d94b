//! Emulated GPUs (`emu:sm75`): memory transactions and matrix instructions of a kernel, and
//! plans for chips that are not here.

use std::collections::BTreeMap;

pub use qgemm_emu::{AccessSite, ChipNumbers, KernelCounters, Space, Traffic};

use crate::context::Context;
use crate::error::Error;

/// Enables counting of memory accesses, which is slower.
///
/// # Errors
/// When the device is not emulated.
pub fn count_accesses(ctx: &Context) -> Result<(), Error> {
    Ok(qgemm_emu::count_accesses(&**ctx.device())?)
}

/// Counters of each kernel since the last call, by name and configuration
/// (`gemm_nt_q4_k_f16_m16_r1`).
///
/// ```
/// use qgemm_api::{Context, XPrecision, emu, quantize};
/// # let without_compiler = |e: &qgemm_api::Error| matches!(e, qgemm_api::Error::Hal(qgemm_api::HalError::NoDevice { .. }));
/// # let ctx = match Context::open("emu:sm75") { Err(e) if without_compiler(&e) => return Ok(()), ctx => ctx? };
/// # stringify! {
/// let ctx = Context::open("emu:sm75")?;
/// # };
/// emu::count_accesses(&ctx)?;
/// let (host, _) = quantize(&[0.25; 64 * 128], 64, 128, "q8_0".parse()?)?;
/// ctx.linear(&ctx.load(&host)?, &[1.0; 128], 1, XPrecision::Auto)?;
///
/// let counters = emu::take_counters(&ctx)?;
/// let kernel = counters.values().next().expect("one kernel ran");
/// let shared = kernel.total(emu::Space::Shared);
/// assert!(kernel.launches == 1 && shared.units >= shared.ideal);
/// # Ok::<(), qgemm_api::Error>(())
/// ```
///
/// # Errors
/// When the device is not emulated.
pub fn take_counters(ctx: &Context) -> Result<BTreeMap<String, KernelCounters>, Error> {
    Ok(qgemm_emu::take_counters(&**ctx.device())?)
}

/// Context that plans as on `chip`, by its numbers. Kernels of its
/// variant run emulated.
///
/// ```
/// use qgemm_api::emu::{self, ChipNumbers};
/// # let without_compiler = |e: &qgemm_api::Error| matches!(e, qgemm_api::Error::Hal(qgemm_api::HalError::NoDevice { .. }));
///
/// let l4 = ChipNumbers { name: "L4", arch: 89, units: 58, clock: 2.04e9, bandwidth: 3.0e11, shared_bytes: 99 << 10 };
/// # let ctx = match emu::describe(&l4) { Err(e) if without_compiler(&e) => return Ok(()), ctx => ctx? };
/// # stringify! {
/// let ctx = emu::describe(&l4)?;
/// # };
/// let weight = ctx.describe_weight("q4_k".parse()?, 4096, 4096)?;
/// let record = ctx.explain(&weight.problem(8))?;
/// assert_eq!((record.device.units, record.chosen().is_some()), (58, true));
/// # Ok::<(), qgemm_api::Error>(())
/// ```
///
/// # Errors
/// When no kernels or no working C++ compiler exist for it.
pub fn describe(chip: &ChipNumbers<'_>) -> Result<Context, Error> {
    Ok(Context::from_device(qgemm_emu::describe(chip)?))
}
