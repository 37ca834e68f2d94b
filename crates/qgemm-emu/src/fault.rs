//! What a kernel did that it must not do.

use std::ffi::CStr;
use std::fmt;
use std::os::raw::c_char;

/// The sort of mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// An access outside every operand of the launch, or outside the block's shared memory.
    OutOfBounds,
    /// An address that is no multiple of the access's size.
    Misaligned,
    /// A read of memory that nothing wrote.
    Unwritten,
    /// A write to an operand that the launch only reads.
    ReadOnly,
    /// Two accesses of which one writes, by threads of a block, with nothing that orders them.
    Race,
    /// The same between blocks: a release, an acquire or the fence between them is missing.
    UnorderedBlocks,
    /// An access to shared memory that an asynchronous copy is still writing or reading.
    InFlight,
    /// A collective that only some lanes reach, or that they reach at different places.
    Divergence,
    /// Threads wait for others that will never come.
    Deadlock,
    /// A kernel that starts early touches what the kernel before it may still write.
    TooEarly,
    /// A thread that computes without end.
    Endless,
    /// An instruction with operands that it does not take.
    BadOperand,
}

impl FaultKind {
    /// The mistake in words.
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

/// Where in the kernel's sources an atom was used. The name belongs to the loaded kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Site {
    pub file: *const c_char,
    pub line: u32,
}

impl Site {
    /// No place in particular.
    pub(crate) const NONE: Self = Self { file: std::ptr::null(), line: 0 };

    /// `mainloop/x_tile.cuh:88`.
    pub(crate) fn text(self) -> String {
        if self.file.is_null() {
            return String::new();
        }
        // SAFETY: sites come from kernels, which pass the compiler's string of the file's name; the kernel is loaded as
        // long as its launch.
        let file = unsafe { CStr::from_ptr(self.file) }.to_string_lossy();
        // Included files are found in the folder that the compiler runs in.
        format!("{}:{}", file.strip_prefix("./").unwrap_or(&file), self.line)
    }
}

/// A mistake of a kernel, with the place and the thread.
#[derive(Clone, Debug)]
pub struct Fault {
    /// The sort of mistake.
    pub kind: FaultKind,
    /// What happened.
    pub detail: String,
    /// `file:line` of the atom's use; empty where there is none.
    pub site: String,
    /// The block.
    pub block: [u32; 3],
    /// The thread, where it is one thread's mistake.
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
