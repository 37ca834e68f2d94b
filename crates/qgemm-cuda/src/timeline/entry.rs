//! [`TimelineEntry`]: a kernel, copy or fill with its times.

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
