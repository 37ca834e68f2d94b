//! Outcome of a command that checks something.

/// Whether the check of a command succeeded.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    Yes,
    No,
}
