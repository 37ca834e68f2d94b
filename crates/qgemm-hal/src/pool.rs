//! Device memory pool: returned buffers are reused instead of freed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::buffer::{Buffer, BufferMut, BufferRef};
use crate::device::Device;
use crate::error::HalError;

/// The smallest size class in bytes.
const SMALLEST: usize = 256;
/// Size classes between consecutive powers of two: at most a
/// quarter of a buffer is unused.
const STEPS: usize = 4;

/// Buffer pool of one device, by size class.
/// Clones share the buffers.
///
/// A pool belongs to *one stream*. A buffer may be reused
/// while earlier work with it is still queued, and only work
/// on the same stream is sure to run after it.
#[derive(Clone, Debug)]
pub struct BufferPool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    device: Arc<dyn Device>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    free: BTreeMap<usize, Vec<Buffer>>,
    stats: PoolStats,
}

/// Pool statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Bytes in use.
    pub used_bytes: usize,
    /// Bytes kept for reuse.
    pub free_bytes: usize,
    /// Requests served from kept buffers.
    pub reused: u64,
    /// Requests served by the device.
    pub allocated: u64,
}

impl BufferPool {
    /// An empty pool.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self { shared: Arc::new(Shared { device, state: Mutex::default() }) }
    }

    /// A buffer of at least `bytes` bytes with unspecified contents; `what`
    /// names it in errors. When the device is out of memory,
    /// the kept buffers are freed and the allocation is retried.
    ///
    /// # Errors
    /// [`HalError::OutOfMemory`] or a driver error.
    pub fn allocate(&self, bytes: usize, what: &'static str) -> Result<PooledBuffer, HalError> {
        let device = &self.shared.device;
        let class =
            size_class(bytes).ok_or(HalError::OutOfMemory { device: device.info().id, bytes, what, free: None })?;
        let kept = {
            let mut state = self.shared.state();
            let kept = state.free.get_mut(&class).and_then(Vec::pop);
            if kept.is_some() {
                state.stats.free_bytes -= class;
                state.stats.reused += 1;
                state.stats.used_bytes += class;
            }
            kept
        };
        let buffer = match kept {
            Some(buffer) => buffer,
            None => {
                let buffer = match device.allocate(class, what) {
                    Err(HalError::OutOfMemory { .. }) if self.trim() > 0 => device.allocate(class, what)?,
                    other => other?,
                };
                let mut state = self.shared.state();
                state.stats.allocated += 1;
                state.stats.used_bytes += class;
                buffer
            }
        };
        Ok(PooledBuffer { buffer: Some(buffer), len: bytes, pool: self.shared.clone() })
    }

    /// Frees all kept buffers and returns their size in bytes.
    pub fn trim(&self) -> usize {
        let mut state = self.shared.state();
        let free = std::mem::take(&mut state.free);
        let bytes = std::mem::take(&mut state.stats.free_bytes);
        // Freeing may wait for the device, so it must not
        // happen under the lock.
        drop(state);
        drop(free);
        bytes
    }

    /// Statistics of the pool.
    pub fn stats(&self) -> PoolStats {
        self.shared.state().stats
    }
}

impl Shared {
    /// A panic elsewhere leaves the lists valid, so a
    /// poisoned lock can be used.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A buffer of a [`BufferPool`], returned to it on drop.
#[derive(Debug)]
pub struct PooledBuffer {
    /// `None` only during drop.
    buffer: Option<Buffer>,
    len: usize,
    pool: Arc<Shared>,
}

impl PooledBuffer {
    /// Requested length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The requested bytes.
    ///
    /// # Errors
    /// None in practice: the buffer is at least as long.
    pub fn view(&self) -> Result<BufferRef<'_>, HalError> {
        self.buffer.as_ref().ok_or_else(|| self.gone())?.slice(0..self.len)
    }

    /// The requested bytes, writable.
    ///
    /// # Errors
    /// None in practice: the buffer is at least as long.
    pub fn view_mut(&mut self) -> Result<BufferMut<'_>, HalError> {
        let gone = self.gone();
        self.buffer.as_mut().ok_or(gone)?.slice_mut(0..self.len)
    }

    fn gone(&self) -> HalError {
        HalError::OutOfBounds { what: "pooled buffer", start: 0, end: self.len, len: 0 }
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        let mut state = self.pool.state();
        state.stats.used_bytes -= buffer.len();
        state.stats.free_bytes += buffer.len();
        state.free.entry(buffer.len()).or_default().push(buffer);
    }
}

/// The smallest size class for `bytes`, or `None` when it
/// overflows the address space.
fn size_class(bytes: usize) -> Option<usize> {
    let bytes = bytes.max(SMALLEST);
    let step = (bytes.checked_next_power_of_two()? / 2 / STEPS).max(SMALLEST / STEPS);
    bytes.checked_next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::noop;

    fn pool() -> BufferPool {
        BufferPool::new(noop::open("noop".parse().expect("a name")).expect("always there"))
    }

    #[test]
    fn classes_hold_their_size_and_waste_at_most_a_quarter() {
        for bytes in (0..5000).chain([1 << 20, (1 << 20) + 1, (1 << 40) - 1]) {
            let class = size_class(bytes).expect("small");
            assert!(class >= bytes && class >= SMALLEST);
            assert!(class <= SMALLEST || class * 4 <= bytes * 5, "{bytes} -> {class}");
            assert_eq!(size_class(class), Some(class), "{bytes}");
        }
        assert_eq!(size_class(usize::MAX), None);
    }

    #[test]
    fn a_buffer_given_back_is_handed_out_again() {
        let pool = pool();
        let first = pool.allocate(1000, "test").expect("memory");
        assert_eq!((first.len(), pool.stats().allocated, pool.stats().used_bytes), (1000, 1, 1024));
        let second = pool.allocate(1000, "test").expect("memory");
        assert_eq!(pool.stats().allocated, 2, "both are in use");
        drop(first);
        assert_eq!((pool.stats().used_bytes, pool.stats().free_bytes), (1024, 1024));
        let third = pool.allocate(1020, "test").expect("memory");
        let other_class = pool.allocate(100, "test").expect("memory");
        assert_eq!((pool.stats().allocated, pool.stats().reused), (3, 1));
        assert_eq!(third.view().expect("in range").len(), 1020);
        drop((second, third, other_class));
        assert_eq!((pool.trim(), pool.stats().free_bytes, pool.stats().used_bytes), (2048 + 256, 0, 0));
        assert_eq!(pool.trim(), 0);
    }

    #[test]
    fn views_cover_what_was_asked_for_and_impossible_sizes_are_errors() {
        let pool = pool();
        let mut buffer = pool.allocate(300, "test").expect("memory");
        assert_eq!(buffer.view_mut().expect("in range").view().len(), 300);
        assert!(matches!(pool.allocate(usize::MAX, "test"), Err(HalError::OutOfMemory { .. })));
        assert!(matches!(pool.allocate(isize::MAX as usize, "test"), Err(HalError::OutOfMemory { .. })));
    }
}
