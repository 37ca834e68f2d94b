//! Errors of devices, and the reason a family cannot serve an operation.

use std::path::PathBuf;

use thiserror::Error;

use crate::caps::DeviceId;

/// What can go wrong on a device.
#[derive(Debug, Error, Clone)]
#[non_exhaustive]
pub enum HalError {
    /// The device does not exist, or its driver is missing.
    #[error("no device {device}: {why}")]
    NoDevice {
        /// The device asked for, as the user wrote it.
        device: String,
        /// What was missing.
        why: String,
    },
    /// A device name that does not parse.
    #[error("`{name}` is no device name: expected `cpu`, `cuda:0`, `wgpu:0`, `emu:sm75` or `noop`")]
    BadDeviceName {
        /// The name.
        name: String,
    },
    /// No permission for rounding X has this name.
    #[error("no precision of X is called `{name}`: expected one of {}", crate::XPrecision::ALL.map(crate::XPrecision::name).join(", "))]
    UnknownXPrecision {
        /// The name asked for.
        name: String,
    },
    /// An allocation failed.
    #[error("{device}: out of memory allocating {bytes} bytes for {what}{}", .free.map(|f| format!(" ({f} bytes free)")).unwrap_or_default())]
    OutOfMemory {
        /// The device.
        device: DeviceId,
        /// Bytes asked for.
        bytes: usize,
        /// What for.
        what: &'static str,
        /// Bytes free at the time, where the device tells.
        free: Option<u64>,
    },
    /// An object of another device or backend was passed in.
    #[error("{what} belongs to another device than {device}")]
    WrongDevice {
        /// The device that was to use it.
        device: DeviceId,
        /// Which argument.
        what: &'static str,
    },
    /// A copy or view would leave its buffer.
    #[error("{what}: bytes {start}..{end} leave a buffer of {len} bytes")]
    OutOfBounds {
        /// Which operation.
        what: &'static str,
        /// First byte.
        start: usize,
        /// One past the last byte.
        end: usize,
        /// The buffer's length.
        len: usize,
    },
    /// Bytes that are to be written are also to be used otherwise at the same time.
    #[error("bytes {}..{} are to be written, and bytes {}..{} of the same buffer are in use", .written.start, .written.end, .other.start, .other.end)]
    Overlap {
        /// The bytes to be written.
        written: std::ops::Range<usize>,
        /// The others.
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
    /// A kernel is in no bundle and cannot be compiled here.
    #[error("kernel {kernel} for {target} is not to be had: {why}")]
    KernelUnavailable {
        /// Kernel name.
        kernel: String,
        /// Architecture.
        target: String,
        /// What to provide.
        why: String,
    },
    /// A bytes written past the end of a buffer were found in its guard band.
    #[error("{device}: a kernel wrote outside a buffer of {len} bytes ({what})")]
    GuardBand {
        /// The device.
        device: DeviceId,
        /// Length of the buffer.
        len: usize,
        /// Which band.
        what: &'static str,
    },
    /// A kernel did what it must not do; found where kernels are emulated.
    #[error("{device}: kernel {kernel}: {fault}")]
    KernelFault {
        /// The device.
        device: DeviceId,
        /// Kernel name.
        kernel: String,
        /// What it did, where, and in which block and thread.
        fault: String,
    },
    /// The device is gone: it was destroyed, reset or removed. What lives on it is lost; open it again.
    #[error("{device}: {call} failed: the device was lost ({reason})")]
    DeviceLost {
        /// The device.
        device: DeviceId,
        /// The call or the activity.
        call: &'static str,
        /// The driver's words.
        reason: String,
    },
    /// The driver reported an error.
    #[error("{device}: {call} failed: {message}")]
    Driver {
        /// The device.
        device: DeviceId,
        /// The call or the activity.
        call: &'static str,
        /// The driver's words.
        message: String,
    },
    /// A file could not be used.
    #[error("{}: cannot {call}: {message}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was tried.
        call: &'static str,
        /// The system's words.
        message: String,
    },
    /// The device cannot do this at all.
    #[error("{device}: {what} is not supported: {why}")]
    Unsupported {
        /// The device.
        device: DeviceId,
        /// What was asked.
        what: String,
        /// Why not.
        why: String,
    },
}

/// Why a kernel family does not serve an operation: data for error messages and the support table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsupported {
    /// The reason, as half a sentence: `"serves at most 2 tokens"`.
    pub why: String,
}

impl Unsupported {
    /// A reason.
    pub fn new(why: impl Into<String>) -> Self {
        Self { why: why.into() }
    }
}
