//! Buffers, and copies with byte granularity. wgpu
//! itself only copies whole words.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::Duration;

use qgemm_hal::{Buffer, BufferRef, DeviceId, HalError, RawBuffer};
use wgpu::BufferUsages;

use crate::shared::{Fault, Shared};

/// Word size of wgpu's copies.
const WORD: usize = wgpu::COPY_BUFFER_ALIGNMENT as usize;
/// Kernels read W, and an aligned X, by
/// vectors of four words.
pub(crate) const VECTOR: u64 = 16;
/// Bytes of one staging copy, so that large transfers do
/// not hold their size twice.
const CHUNK: usize = 64 << 20;

/// A wgpu buffer, with its size rounded up to whole vectors.
#[derive(Debug)]
pub(crate) struct WgpuBuffer {
    shared: Arc<Shared>,
    pub buffer: wgpu::Buffer,
    /// Requested length.
    len: usize,
}

impl Drop for WgpuBuffer {
    fn drop(&mut self) {
        self.shared.groups.forget(&self.buffer);
    }
}

impl RawBuffer for WgpuBuffer {
    fn device(&self) -> DeviceId {
        self.shared.id
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl WgpuBuffer {
    /// Wraps the first `len` bytes of `buffer`.
    pub fn wrap(shared: &Arc<Shared>, buffer: wgpu::Buffer, len: usize) -> Buffer {
        Buffer::from_raw(Arc::new(WgpuBuffer { shared: shared.clone(), buffer, len }), len)
    }

    /// Checks that the buffer supports `usage`; a caller-owned one may not.
    fn check_usage(&self, usage: BufferUsages, what: &'static str) -> Result<(), HalError> {
        if self.buffer.usage().contains(usage) {
            return Ok(());
        }
        let why = format!("its usages are {:?}: add {usage:?}", self.buffer.usage());
        Err(HalError::Unsupported { device: self.shared.id, what: what.into(), why })
    }

    /// The wgpu buffer behind `view`, if it belongs to `shared`.
    pub fn of<'a>(shared: &Arc<Shared>, view: BufferRef<'a>, what: &'static str) -> Result<&'a WgpuBuffer, HalError> {
        view.raw()
            .as_any()
            .downcast_ref::<WgpuBuffer>()
            .filter(|raw| Arc::ptr_eq(&raw.shared, shared))
            .ok_or(HalError::WrongDevice { device: shared.id, what })
    }
}

/// Allocates a zeroed buffer.
pub(crate) fn allocate(shared: &Arc<Shared>, bytes: usize, what: &'static str) -> Result<Buffer, HalError> {
    let limit = shared.limits.max_buffer_size;
    let size = (bytes as u64).checked_next_multiple_of(VECTOR).filter(|&size| size <= limit).ok_or_else(|| {
        HalError::Unsupported {
            device: shared.id,
            what: format!("a buffer of {bytes} bytes for {what}"),
            why: format!("the adapter's max_buffer_size is {limit}"),
        }
    })?;
    let made = shared.try_scoped("allocating a buffer", || {
        shared.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(what),
            size: size.max(VECTOR),
            usage: BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        })
    })?;
    let buffer = made.map_err(|fault| match fault {
        Fault::OutOfMemory(_) => HalError::OutOfMemory { device: shared.id, bytes, what, free: None },
        other => other.into_hal(shared.id, "allocating a buffer"),
    })?;
    Ok(WgpuBuffer::wrap(shared, buffer, bytes))
}

/// Copies `src` to the start of `dst`.
pub(crate) fn upload(shared: &Arc<Shared>, src: &[u8], dst: BufferRef<'_>) -> Result<(), HalError> {
    let raw = WgpuBuffer::of(shared, dst, "the destination of an upload")?;
    check_len("upload", src.len(), dst.len())?;
    raw.check_usage(BufferUsages::COPY_DST, "an upload to this buffer")?;
    write(shared, raw, dst.offset(), src)
}

/// Waits, then copies the first `dst.len()` bytes of `src`.
pub(crate) fn download(shared: &Arc<Shared>, src: BufferRef<'_>, dst: &mut [u8]) -> Result<(), HalError> {
    let raw = WgpuBuffer::of(shared, src, "the source of a download")?;
    check_len("download", dst.len(), src.len())?;
    raw.check_usage(BufferUsages::COPY_SRC, "a download from this buffer")?;
    for (i, part) in dst.chunks_mut(CHUNK).enumerate() {
        read(shared, &raw.buffer, src.offset() + i * CHUNK, part)?;
    }
    shared.wait("waiting for a download")
}

/// Sets every byte of `dst`.
pub(crate) fn fill(shared: &Arc<Shared>, dst: BufferRef<'_>, value: u8) -> Result<(), HalError> {
    let raw = WgpuBuffer::of(shared, dst, "the destination of a fill")?;
    raw.check_usage(BufferUsages::COPY_DST, "a fill of this buffer")?;
    let range = dst.offset()..dst.offset() + dst.len();
    let words = whole_words(&range);
    if value != 0 || words.is_empty() {
        let pattern = vec![value; dst.len().min(CHUNK)];
        for start in range.clone().step_by(CHUNK) {
            write(shared, raw, start, &pattern[..CHUNK.min(range.end - start)])?;
        }
        return Ok(());
    }
    write(shared, raw, range.start, &[0; WORD][..words.start - range.start])?;
    write(shared, raw, words.end, &[0; WORD][..range.end - words.end])?;
    shared.scoped("filling a buffer", || {
        let mut encoder = shared.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.clear_buffer(&raw.buffer, words.start as u64, Some(words.len() as u64));
        shared.flush();
        shared.queue.submit([encoder.finish()]);
    })
}

fn check_len(what: &'static str, wanted: usize, len: usize) -> Result<(), HalError> {
    if wanted > len {
        return Err(HalError::OutOfBounds { what, start: 0, end: wanted, len });
    }
    Ok(())
}

/// The whole words within `range`; empty, at
/// `range.end`, if there are none.
fn whole_words(range: &Range<usize>) -> Range<usize> {
    let (start, end) = (range.start.next_multiple_of(WORD), range.end / WORD * WORD);
    if start < end { start..end } else { range.end..range.end }
}

/// Writes `bytes` at `offset`. Partial words at the
/// edges keep their other bytes.
fn write(shared: &Arc<Shared>, raw: &WgpuBuffer, offset: usize, bytes: &[u8]) -> Result<(), HalError> {
    let range = offset..offset + bytes.len();
    let words = whole_words(&range);
    let (head, rest) = bytes.split_at(words.start - range.start);
    let (middle, tail) = rest.split_at(words.len());
    // Without whole words, `head` is the whole range
    // and may touch two words.
    for (i, &byte) in head.iter().enumerate() {
        patch(shared, raw, offset + i, &[byte])?;
    }
    for (i, part) in middle.chunks(CHUNK).enumerate() {
        shared.scoped("uploading", || {
            shared.flush();
            shared.queue.write_buffer(&raw.buffer, (words.start + i * CHUNK) as u64, part);
            // Submits the staging copy now instead of with a later launch.
            shared.queue.submit([]);
        })?;
    }
    patch(shared, raw, words.end, tail)
}

/// Writes part of a single word.
fn patch(shared: &Arc<Shared>, raw: &WgpuBuffer, offset: usize, bytes: &[u8]) -> Result<(), HalError> {
    if bytes.is_empty() {
        return Ok(());
    }
    let at = offset % WORD;
    let mut word = [0; WORD];
    // After the end of the buffer there is only padding, so
    // a last word need not be read.
    if at != 0 || offset + bytes.len() != raw.len {
        raw.check_usage(BufferUsages::COPY_SRC, "writing less than a word to this buffer")?;
        read(shared, &raw.buffer, offset - at, &mut word)?;
    }
    word[at..at + bytes.len()].copy_from_slice(bytes);
    shared.scoped("uploading", || {
        shared.flush();
        shared.queue.write_buffer(&raw.buffer, (offset - at) as u64, &word);
    })
}

/// Reads `dst.len()` bytes from `offset` through a mappable staging buffer.
pub(crate) fn read(shared: &Arc<Shared>, buffer: &wgpu::Buffer, offset: usize, dst: &mut [u8]) -> Result<(), HalError> {
    const CALL: &str = "downloading";
    let first = offset / WORD * WORD;
    let size = ((offset + dst.len()).next_multiple_of(WORD) - first) as u64;
    let staging = shared.scoped(CALL, || {
        let staging = shared.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("download"),
            size,
            usage: BufferUsages::MAP_READ | BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut encoder = shared.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(buffer, first as u64, &staging, 0, size);
        shared.flush();
        shared.queue.submit([encoder.finish()]);
        staging
    })?;
    let (sender, receiver) = sync_channel(1);
    shared.scoped(CALL, || {
        staging.slice(..).map_async(wgpu::MapMode::Read, move |result| {
            // The receiver is dropped only when waiting failed,
            // which is reported there.
            let _ = sender.send(result);
        });
    })?;
    let mapped = loop {
        shared.wait(CALL)?;
        // Another waiting thread may have taken the callback
        // without having called it yet.
        match receiver.recv_timeout(Duration::from_millis(10)) {
            Err(RecvTimeoutError::Timeout) => {}
            received => break received.map_err(|e| shared.driver(CALL, e.to_string()))?,
        }
    };
    mapped.map_err(|e| shared.driver(CALL, e.to_string()))?;
    let view = staging.slice(..).get_mapped_range().map_err(|e| shared.driver(CALL, e.to_string()))?;
    dst.copy_from_slice(&view[offset - first..][..dst.len()]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_words_lie_within_the_range() {
        assert_eq!(whole_words(&(0..12)), 0..12);
        assert_eq!(whole_words(&(1..13)), 4..12);
        assert_eq!(whole_words(&(4..7)), 7..7);
        assert_eq!(whole_words(&(3..6)), 6..6);
        assert_eq!(whole_words(&(5..5)), 5..5);
    }
}
