//! Timeline: start and end of every kernel and copy
//! in its place, as CUPTI records them.
//!
//! Launches keep their order, overlap and graphs.
//! Events between launches, as in a profile of
//! single kernels, would part them.

mod cupti;
mod entry;

use std::sync::{Mutex, PoisonError};

use qgemm_hal::{Device, HalError};

use crate::gpu::Gpu;
use cupti::Cupti;

pub use cupti::CUPTI_VARIABLE;
pub use entry::TimelineEntry;

/// Runs `work` and returns what CUDA devices
/// did meanwhile, sorted by start.
/// `work` waits for the device before it returns.
///
/// One recording runs at a time; others wait for it.
/// It costs a few percent, and more for
/// launching a graph.
///
/// # Errors
/// [`HalError::Unsupported`] when CUPTI is not found, or another profiler
/// uses it. [`HalError::WrongDevice`] for a device that is no CUDA device.
pub fn record_timeline<R>(device: &dyn Device, work: impl FnOnce() -> R) -> Result<(R, Vec<TimelineEntry>), HalError> {
    static ONE: Mutex<()> = Mutex::new(());
    let id = Gpu::of(device)?.context().id();
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let refused = |why: String| HalError::Unsupported { device: id, what: "a timeline".into(), why };
    let cupti = Cupti::get().map_err(refused)?;
    cupti.start().map_err(refused)?;
    let result = work();
    let mut entries = cupti.stop().map_err(refused)?;
    entries.sort_by_key(|entry| entry.start);
    Ok((result, entries))
}
