//! Scratch memory of plans.

use qgemm_hal::{Buffer, BufferMut, DeviceId};

/// Scratch memory that plans keep partial sums and counters in. Made by
/// [`Context::workspace`](crate::Context::workspace), zeroed once; every launch leaves it fit for the next, of
/// the same plan or of another one.
///
/// Launches that share a workspace must not run at the same time: keep one per stream.
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

    /// The device it lives on.
    pub fn device(&self) -> DeviceId {
        self.buffer.device()
    }

    pub(crate) fn view(&mut self) -> BufferMut<'_> {
        (&mut self.buffer).into()
    }
}
