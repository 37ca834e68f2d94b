//! Workspace of plans.

use qgemm_hal::{Buffer, BufferMut, DeviceId};

/// Workspace for partial sums and counters. Made by
/// [`Context::workspace`](crate::Context::workspace).
///
/// It is zeroed once; every launch leaves it ready for the next, of any plan.
/// Concurrent launches must not share it: keep one per stream.
#[derive(Debug)]
pub struct Workspace {
    buffer: Buffer,
}

impl Workspace {
    pub(crate) fn new(buffer: Buffer) -> Self {
        Self { buffer }
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Device of the workspace.
    pub fn device(&self) -> DeviceId {
        self.buffer.device()
    }

    pub(crate) fn view(&mut self) -> BufferMut<'_> {
        (&mut self.buffer).into()
    }
}
