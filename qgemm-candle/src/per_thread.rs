//! [`PerThread`]: memory that runs at once must not share.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, ThreadId};

/// Value of each thread.
///
/// candle's default CUDA stream is one of the
/// calling thread, so that threads run at once
/// there, as on the CPU.
#[derive(Debug)]
pub(crate) struct PerThread<T>(Mutex<HashMap<ThreadId, T>>);

impl<T> Default for PerThread<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> PerThread<T> {
    /// Takes the thread's value, for
    /// [`PerThread::put`] behind its use.
    ///
    /// Meanwhile the thread has none: a layer
    /// that starts within another, as a job of
    /// its thread pool, makes one.
    pub fn take(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&thread::current().id())
    }

    pub fn put(&self, value: T) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(thread::current().id(), value);
    }
}
