//! Faults: forbidden actions of a kernel.

use std::ffi::CStr;
use std::fmt;
use std::os::raw::c_char;

/// Kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// Access outside every operand of the launch, or
    /// outside the CTA's shared memory.
    OutOfBounds,
    /// Address that is not a multiple of the access size.
    Misaligned,
    /// Read of memory that was never written.
    Unwritten,
    /// A write to an operand that the launch only reads.
    ReadOnly,
    /// Data race: unordered accesses by two threads of a CTA, at
    /// least one of them a write.
    Race,
    /// Data race between CTAs: a release, an acquire or the
    /// fence between them is missing.
    UnorderedBlocks,
    /// Access to shared memory that an asynchronous copy is
    /// still writing or reading.
    InFlight,
    /// Collective that only some lanes reach, or that lanes
    /// reach at different locations.
    Divergence,
    /// Deadlock: threads wait for others that never arrive.
    Deadlock,
    /// An early-started kernel accesses data that the
    /// previous kernel may still write.
    TooEarly,
    /// Infinite loop.
    Endless,
    /// Instruction with unsupported operands.
    BadOperand,
}

impl FaultKind {
    /// Description of the fault.
    pub const fn text(self) -> &'static str {
        match self {
            FaultKind::OutOfBounds => "access out of bounds",
            FaultKind::Misaligned => "misaligned access",
            FaultKind::Unwritten => "read of memory that nothing wrote",
            FaultKind::ReadOnly => "write to an operand that is only read",
            FaultKind::Race => "race between threads",
            FaultKind::UnorderedBlocks => "blocks communicate without release and acquire",
            FaultKind::InFlight => "access to memory that an asynchronous copy still uses",
            FaultKind::Divergence => "a collective that not all lanes reach",
            FaultKind::Deadlock => "a barrier that never fills",
            FaultKind::TooEarly => "access before griddepcontrol.wait",
            FaultKind::Endless => "a thread that does not end",
            FaultKind::BadOperand => "an operand that the instruction does not take",
        }
    }
}

/// Source location where an atom was used. The loaded
/// kernel owns the file name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Site {
    pub file: *const c_char,
    pub line: u32,
}

impl Site {
    /// No location.
    pub(crate) const NONE: Self = Self { file: std::ptr::null(), line: 0 };

    /// `mainloop/x_tile.cuh:88`.
    pub(crate) fn text(self) -> String {
        if self.file.is_null() {
            return String::new();
        }
        // SAFETY: sites come from kernels, which pass the compiler's file-name
        // string. The kernel is loaded as long as its launch.
        let file = unsafe { CStr::from_ptr(self.file) }.to_string_lossy();
        // Included files are relative to the compiler's working folder.
        format!("{}:{}", file.strip_prefix("./").unwrap_or(&file), self.line)
    }
}

/// A fault of a kernel, with location and thread.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Kind of fault.
    pub kind: FaultKind,
    /// Description.
    pub detail: String,
    /// `file:line` where the atom was used; empty when unknown.
    pub site: String,
    /// The CTA.
    pub block: [u32; 3],
    /// The thread, if one thread is at fault.
    pub thread: Option<u32>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.block;
        if !self.site.is_empty() {
            write!(f, "{}: ", self.site)?;
        }
        write!(f, "{}: block ({x}, {y}, {z})", self.kind.text())?;
        if let Some(thread) = self.thread {
            write!(f, ", thread {thread}")?;
        }
        write!(f, ": {}", self.detail)
    }
}
