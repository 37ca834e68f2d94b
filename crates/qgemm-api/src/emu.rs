//! Emulator counters (`emu:sm75`): memory transactions and matrix instructions of a
//! kernel, for tuning without the chip.

use std::collections::BTreeMap;

pub use qgemm_emu::{AccessSite, KernelCounters, Space, Traffic};

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
