//! Device errors, and the reason why a family refuses an operation.

use std::path::PathBuf;

use thiserror::Error;

use crate::caps::DeviceId;

/// Device errors.
#[derive(Debug, Error, Clone)]
#[non_exhaustive]
pub enum HalError {
    /// The device does not exist, or its driver is missing.
    #[error("no device {device}: {why}")]
    NoDevice {
        /// The requested device, as the user wrote it.
        device: String,
        /// The missing part.
        why: String,
    },
    /// A device name that does not parse.
    #[error("`{name}` is no device name: expected `cpu`, `cuda:0`, `wgpu:0`, `emu:sm75` or `noop`")]
    BadDeviceName {
        /// The name.
        name: String,
    },
    /// No X precision has this name.
    #[error("no precision of X is called `{name}`: expected one of {}", crate::XPrecision::ALL.map(crate::XPrecision::name).join(", "))]
    UnknownXPrecision {
        /// The requested name.
        name: String,
    },
    /// An allocation failed.
    #[error("{device}: out of memory allocating {bytes} bytes for {what}{}", .free.map(|f| format!(" ({f} bytes free)")).unwrap_or_default())]
    OutOfMemory {
        /// The device.
        device: DeviceId,
        /// Requested bytes.
        bytes: usize,
        /// Purpose of the allocation.
        what: &'static str,
        /// Free bytes at the time, if the device reports them.
        free: Option<u64>,
    },
    /// An object belongs to another device or backend.
    #[error("{what} belongs to another device than {device}")]
    WrongDevice {
        /// The device that was to use it.
        device: DeviceId,
        /// Argument name.
        what: &'static str,
    },
    /// Work on fixed addresses was given other memory.
    #[error("{what} runs in the memory that it was made for alone, and got other memory")]
    OtherMemory {
        /// The work.
        what: &'static str,
    },
    /// A copy or view exceeds its buffer.
    #[error("{what}: bytes {start}..{end} leave a buffer of {len} bytes")]
    OutOfBounds {
        /// Operation name.
        what: &'static str,
        /// First byte.
        start: usize,
        /// One past the last byte.
        end: usize,
        /// The buffer's length.
        len: usize,
    },
    /// Bytes to be written overlap bytes that are used
    /// otherwise at the same time.
    #[error("bytes {}..{} are to be written, and bytes {}..{} of the same buffer are in use", .written.start, .written.end, .other.start, .other.end)]
    Overlap {
        /// The bytes to be written.
        written: std::ops::Range<usize>,
        /// The overlapping bytes.
        other: std::ops::Range<usize>,
    },
    /// A kernel did not compile.
    #[error("kernel {kernel} does not compile for {target} (options {options}):\n{log}")]
    Compile {
        /// Kernel name.
        kernel: String,
        /// Architecture.
        target: String,
        /// Compiler options.
        options: String,
        /// The compiler's log.
        log: String,
    },
    /// A kernel is in no bundle and cannot be
    /// compiled on this machine.
    #[error("kernel {kernel} for {target} is unavailable: {why}")]
    KernelUnavailable {
        /// Kernel name.
        kernel: String,
        /// Architecture.
        target: String,
        /// Remedy for the user.
        why: String,
    },
    /// A write past the end of a buffer was
    /// found in its guard band.
    #[error("{device}: a kernel wrote outside a buffer of {len} bytes ({what})")]
    GuardBand {
        /// The device.
        device: DeviceId,
        /// Length of the buffer.
        len: usize,
        /// Guard band.
        what: &'static str,
    },
    /// An emulated kernel violated a rule.
    #[error("{device}: kernel {kernel}: {fault}")]
    KernelFault {
        /// The device.
        device: DeviceId,
        /// Kernel name.
        kernel: String,
        /// The violation, its location, CTA and thread.
        fault: String,
    },
    /// The device was destroyed, reset or removed. Its
    /// memory is lost; open it again.
    #[error("{device}: {call} failed: the device was lost ({reason})")]
    DeviceLost {
        /// The device.
        device: DeviceId,
        /// The call or activity.
        call: &'static str,
        /// The driver's message.
        reason: String,
    },
    /// The driver reported an error.
    #[error("{device}: {call} failed: {message}")]
    Driver {
        /// The device.
        device: DeviceId,
        /// The call or activity.
        call: &'static str,
        /// The driver's message.
        message: String,
    },
    /// A file operation failed.
    #[error("{}: cannot {call}: {message}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The failed call.
        call: &'static str,
        /// The system's error message.
        message: String,
    },
    /// A rank of a group takes part no longer.
    #[error("rank {rank} is gone: {why}")]
    RankGone {
        /// The rank.
        rank: usize,
        /// Reason, in its own words if it gave one.
        why: String,
    },
    /// A rank of a group does not answer.
    #[error("rank {rank} did not come within {limit:?}: {what}")]
    RankSilent {
        /// The first such rank.
        rank: usize,
        /// Time limit of the group.
        limit: std::time::Duration,
        /// The collective that waited.
        what: String,
    },
    /// Ranks of a group do not answer, and nobody knows which.
    #[error("the other ranks did not come within {limit:?}: {what}")]
    GroupSilent {
        /// Time limit of the group.
        limit: std::time::Duration,
        /// The work that waited.
        what: String,
    },
    /// Ranks of a group run different collectives.
    #[error("rank {rank} runs {got}: expected {expected}")]
    CollectiveMismatch {
        /// The first rank that differs from this one.
        rank: usize,
        /// The collective of this rank.
        expected: String,
        /// The collective of that rank.
        got: String,
    },
    /// Ranks that make no group, or a collective of another one.
    #[error("a group of ranks: expected {expected}, got {got}")]
    BadGroup {
        /// The requirement.
        expected: String,
        /// Numbers or texts that were given.
        got: String,
    },
    /// A library that is loaded at run time is missing, or too old.
    #[error("{library} cannot be used: {why}")]
    NoLibrary {
        /// Its name.
        library: &'static str,
        /// The reason, and the remedy.
        why: String,
    },
    /// The device does not support this.
    #[error("{device}: {what} is not supported: {why}")]
    Unsupported {
        /// The device.
        device: DeviceId,
        /// The request.
        what: String,
        /// The reason.
        why: String,
    },
}

/// Why a kernel family refuses an operation, for error
/// messages and the support table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsupported {
    /// The reason as half a sentence: `"serves at most 2 tokens"`.
    pub why: String,
}

impl Unsupported {
    /// Creates a refusal with this reason.
    pub fn new(why: impl Into<String>) -> Self {
        Self { why: why.into() }
    }
}
