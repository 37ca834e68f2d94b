//! Timeline: start and end of every kernel and copy in its place,
//! as NVIDIA's profiling library (CUPTI) records them.
//!
//! Launches keep their order, overlap and graphs. Events between
//! launches, as in a profile of single kernels, would part them.

mod cupti;

use std::sync::{Mutex, PoisonError};

use qgemm_hal::{Device, HalError};

use crate::gpu::Gpu;
use cupti::Cupti;

/// Names CUPTI's library.
pub const CUPTI_VARIABLE: &str = "QGEMM_CUPTI";

/// Work of a device, on its own clock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TimelineEntry {
    /// Symbol of a kernel, or the name of another kind of work.
    pub name: String,
    /// CTAs along x, y and z; zeros for copies.
    pub grid: [u32; 3],
    /// Threads of a CTA.
    pub threads: u32,
    /// Shared memory of a CTA in bytes.
    pub shared_bytes: u32,
    /// Start in nanoseconds.
    pub start: u64,
    /// End in nanoseconds.
    pub end: u64,
}

impl TimelineEntry {
    /// Name of copies to the host, by which a step hands over its results.
    pub const COPY_TO_HOST: &str = "copy to host";
    /// Name of other copies.
    pub const COPY: &str = "copy";
    /// Name of fills.
    pub const MEMSET: &str = "memset";
}

/// Runs `work` and returns what CUDA devices did meanwhile,
/// sorted by start. `work` waits for the device before it returns.
///
/// One recording runs at a time; others wait for it. Recording costs a few
/// percent, and more for launching a graph.
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
