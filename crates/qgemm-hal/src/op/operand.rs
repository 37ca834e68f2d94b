//! Operands: what kernels of an operation read and write.

use std::fmt;

/// How a kernel accesses an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Reads data that no earlier work of the stream
    /// writes, such as weights. The kernel may prefetch it
    /// before that work is done.
    Constant,
    /// Reads data that earlier work of the stream may have written.
    Read,
    /// Writes.
    Write,
    /// Reads and writes.
    Accumulate,
    /// Writes a part of state that lives across runs, such as
    /// the new rows of a KV cache. The rest must survive, so
    /// the operand is no scratch memory between runs.
    State,
}

impl Access {
    /// Whether the kernel writes.
    pub const fn writes(self) -> bool {
        matches!(self, Access::Write | Access::Accumulate | Access::State)
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Access::Constant => "constant",
            Access::Read => "read",
            Access::Write => "write",
            Access::Accumulate => "accumulate",
            Access::State => "state",
        }
    }
}

/// An operand: its name in messages and its access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperandDesc {
    /// Name: `the bias`.
    pub name: &'static str,
    /// How kernels access it.
    pub access: Access,
}

/// Operands of an operation: an enum made by `operands!`.
pub trait Operand: Copy + fmt::Debug + Eq + Send + Sync + 'static {
    /// All operands in order; at most [`MAX_OPERANDS`](crate::MAX_OPERANDS).
    const ALL: &'static [OperandDesc];

    /// Index in [`Operand::ALL`].
    fn slot(self) -> usize;

    /// Name in messages.
    fn name(self) -> &'static str {
        Self::ALL[self.slot()].name
    }
}

/// Defines the operands of an operation: an enum with a name
/// and an access for each variant.
macro_rules! operands {
    ($(#[doc = $doc:literal])* pub enum $name:ident { $($(#[doc = $vdoc:literal])+ $variant:ident: $text:literal $access:ident,)* }) => {
        $(#[doc = $doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[doc = $vdoc])+ $variant,)* }

        impl $crate::op::Operand for $name {
            const ALL: &'static [$crate::op::OperandDesc] = &[
                $($crate::op::OperandDesc { name: $text, access: $crate::op::Access::$access },)*
            ];

            fn slot(self) -> usize {
                self as usize
            }
        }
    };
}
pub(crate) use operands;
