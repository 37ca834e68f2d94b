//! Binding what a launch reads and writes.

use std::sync::Arc;

use qgemm_hal::{BufferRef, HalError};

use crate::memory::{VECTOR, WgpuBuffer};
use crate::shared::Shared;

/// What of `view` to bind of `bytes` bytes behind `before`, and how many elements of `width` bytes the operand begins
/// behind that.
pub(super) fn bind<'a>(
    shared: &'a Arc<Shared>,
    view: Option<BufferRef<'a>>,
    what: &'static str,
    before: usize,
    bytes: usize,
    width: usize,
) -> Result<(wgpu::BufferBinding<'a>, u32), HalError> {
    if bytes == 0 {
        return Ok((shared.absent.as_entire_buffer_binding(), 0));
    }
    let (len, end) = (view.map_or(0, |view| view.len()), before + bytes);
    let Some(view) = view.filter(|_| len >= end) else {
        return Err(HalError::OutOfBounds { what, start: 0, end, len });
    };
    let raw = WgpuBuffer::of(shared, view, what)?;
    let unsupported = |why| HalError::Unsupported { device: shared.id, what: format!("{what} here"), why };
    let limits = &shared.limits;
    let first = view.offset() + before;
    let behind = first % limits.min_storage_buffer_offset_alignment as usize;
    if !behind.is_multiple_of(width) {
        return Err(unsupported(format!("it begins at byte {first}, and kernels read {width} bytes at a time")));
    }
    let offset = (first - behind) as u64;
    let size = ((behind + bytes) as u64).next_multiple_of(VECTOR).min(raw.buffer.size() - offset);
    if size > limits.max_storage_buffer_binding_size {
        let limit = limits.max_storage_buffer_binding_size;
        return Err(unsupported(format!("{size} bytes exceed max_storage_buffer_binding_size, {limit}")));
    }
    let binding = wgpu::BufferBinding { buffer: &raw.buffer, offset, size: wgpu::BufferSize::new(size) };
    Ok((binding, (behind / width) as u32))
}

/// As [`bind`], of an operand that shaders see as vectors, of which there must be one.
pub(super) fn bind_vectors<'a>(
    shared: &'a Arc<Shared>,
    view: Option<BufferRef<'a>>,
    what: &'static str,
    before: usize,
    bytes: usize,
    width: usize,
) -> Result<(wgpu::BufferBinding<'a>, u32), HalError> {
    let (binding, base) = bind(shared, view, what, before, bytes, width)?;
    if binding.size.is_some_and(|size| size.get() < VECTOR) {
        return Err(HalError::Unsupported {
            device: shared.id,
            what: format!("{what} here"),
            why: format!("{VECTOR} bytes are bound at least, and fewer are left of the buffer"),
        });
    }
    Ok((binding, base))
}
