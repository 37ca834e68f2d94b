//! Binding of a dispatch's operands.

use std::ops::Range;
use std::sync::Arc;

use qgemm_hal::{BufferRef, HalError};

use crate::memory::{VECTOR, WgpuBuffer};
use crate::shared::Shared;

/// The range of an operand that a dispatch touches.
pub(super) struct Touched<'a> {
    /// Operand name, for errors.
    pub what: &'static str,
    pub view: Option<BufferRef<'a>>,
    /// Byte range of the view; empty for an absent operand.
    pub bytes: Range<usize>,
    /// Bytes of an element, or of a vector access.
    pub width: usize,
}

/// A binding, and the number of elements in it before
/// the first touched element.
pub(super) type Bound<'a> = (wgpu::BufferBinding<'a>, u32);

impl<'a> Touched<'a> {
    /// Binding of an operand that is read.
    pub fn bind(self, shared: &'a Arc<Shared>) -> Result<Bound<'a>, HalError> {
        self.bind_or(shared, &shared.absent)
    }

    /// As [`Self::bind`], for an operand that is written.
    pub fn bind_written(self, shared: &'a Arc<Shared>) -> Result<Bound<'a>, HalError> {
        self.bind_or(shared, &shared.absent_written)
    }

    /// As [`Self::bind`], for an operand that shaders see as
    /// vectors. It must be present.
    pub fn bind_vectors(self, shared: &'a Arc<Shared>) -> Result<Bound<'a>, HalError> {
        let what = self.what;
        let (binding, base) = self.bind(shared)?;
        if binding.size.is_some_and(|size| size.get() < VECTOR) {
            let why = format!("{VECTOR} bytes are bound at least, and fewer are left of the buffer");
            return Err(unsupported(shared, what, why));
        }
        Ok((binding, base))
    }

    /// Binds `absent` when there is no such operand.
    fn bind_or(self, shared: &Arc<Shared>, absent: &'a wgpu::Buffer) -> Result<Bound<'a>, HalError> {
        let Self { what, view, bytes: Range { start, end }, width } = self;
        if start == end {
            return Ok((absent.as_entire_buffer_binding(), 0));
        }
        let len = view.map_or(0, |view| view.len());
        let Some(view) = view.filter(|_| len >= end) else {
            return Err(HalError::OutOfBounds { what, start: 0, end, len });
        };
        let raw = WgpuBuffer::of(shared, view, what)?;
        let limits = &shared.limits;
        let first = view.offset() + start;
        let behind = first % limits.min_storage_buffer_offset_alignment as usize;
        if !behind.is_multiple_of(width) {
            let why = format!("it begins at byte {first}, and kernels access {width} bytes at a time");
            return Err(unsupported(shared, what, why));
        }
        let offset = (first - behind) as u64;
        let size = ((behind + end - start) as u64).next_multiple_of(VECTOR).min(raw.buffer.size() - offset);
        if size > limits.max_storage_buffer_binding_size {
            let limit = limits.max_storage_buffer_binding_size;
            let why = format!("{size} bytes exceed max_storage_buffer_binding_size, {limit}");
            return Err(unsupported(shared, what, why));
        }
        let binding = wgpu::BufferBinding { buffer: &raw.buffer, offset, size: wgpu::BufferSize::new(size) };
        Ok((binding, (behind / width) as u32))
    }
}

fn unsupported(shared: &Shared, what: &'static str, why: String) -> HalError {
    HalError::Unsupported { device: shared.id, what: format!("{what} here"), why }
}
