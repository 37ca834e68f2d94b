//! Operands by name: what kernels of an operation read and write.

use std::fmt;

/// What a kernel does with an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// It reads what no earlier work of the stream writes, such as weights: also before that work is done.
    Constant,
    /// It reads what earlier work of the stream may have written.
    Read,
    /// It writes.
    Write,
    /// It reads and writes.
    Accumulate,
}

impl Access {
    /// Whether the kernel writes.
    pub const fn writes(self) -> bool {
        matches!(self, Access::Write | Access::Accumulate)
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Access::Constant => "constant",
            Access::Read => "read",
            Access::Write => "write",
            Access::Accumulate => "accumulate",
        }
    }
}

/// An operand: its name in messages, and what kernels do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperandDesc {
    /// Name: `the bias`.
    pub name: &'static str,
    /// What kernels do with it.
    pub access: Access,
}

/// The operands of an operation: an enum made by `operands!`.
pub trait Operand: Copy + fmt::Debug + Eq + Send + Sync + 'static {
    /// All of them, in order; [`MAX_OPERANDS`](crate::MAX_OPERANDS) at most.
    const ALL: &'static [OperandDesc];

    /// Place in [`Operand::ALL`].
    fn slot(self) -> usize;

    /// Name in messages.
    fn name(self) -> &'static str {
        Self::ALL[self.slot()].name
    }
}

/// Defines the operands of an operation: an enum whose variants have a name and an access.
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
