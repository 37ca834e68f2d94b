//! CPU thread pool, and scratch memory of its threads.

use std::error::Error as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::{io, thread};

use qgemm_hal::{DeviceId, HalError};
use rayon::{ThreadBuilder, ThreadPool, ThreadPoolBuilder};

use crate::arena;

/// Thread pool of the caller, or rayon's global one.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    own: Option<Arc<ThreadPool>>,
    /// Floats of [`Scratch`] already reserved by the threads.
    reserved: Arc<[AtomicUsize; 3]>,
}

/// Starts rayon's global pool, unless it runs or the calling thread
/// belongs to another pool.
///
/// Rayon would start it with the first task, and panic without memory or threads.
///
/// # Errors
/// [`HalError::Driver`] when the system starts no more threads.
pub fn start_threads() -> Result<(), HalError> {
    // Rayon tries once. Later calls report that the pool exists.
    static FAILED: OnceLock<Option<String>> = OnceLock::new();
    if rayon::current_thread_index().is_some() {
        return Ok(());
    }
    let failed = FAILED.get_or_init(|| {
        let started = ThreadPoolBuilder::new().spawn_handler(start_thread).build_global();
        // If the pool exists already, the error has no cause.
        started.err().filter(|error| error.source().is_some()).map(|error| error.to_string())
    });
    match failed {
        None => Ok(()),
        Some(message) => Err(not_started(message)),
    }
}

/// Starts a thread of a pool, and waits until it runs.
///
/// Threads allocate memory before they run, and abort the process
/// without it. Started together, they would take it from one another.
pub(crate) fn start_thread(thread: ThreadBuilder) -> io::Result<()> {
    let (started, runs) = mpsc::channel();
    let builder = match thread.name() {
        Some(name) => thread::Builder::new().name(name.to_owned()),
        None => thread::Builder::new(),
    };
    builder.spawn(move || {
        // Nobody listens after an error.
        let _ = started.send(());
        thread.run();
    })?;
    runs.recv().map_err(io::Error::other)
}

/// Error of threads that could not be started.
pub(crate) fn not_started(message: impl ToString) -> HalError {
    HalError::Driver { device: DeviceId::CPU, call: "starting threads", message: message.to_string() }
}

/// Scratch memory of a launch, in floats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scratch {
    /// Shared by all threads, in the calling thread: X, and accumulators of split-K.
    pub caller: usize,
    /// X per thread.
    pub activations: usize,
    /// Accumulators per thread.
    pub sums: usize,
    /// Main-loop scratch per thread.
    pub tile: usize,
}

impl Pool {
    /// Pool of the caller.
    pub fn new(pool: Arc<ThreadPool>) -> Self {
        Self { own: Some(pool), reserved: Arc::default() }
    }

    /// Runs `work` on a thread of the pool (on this one if it belongs to
    /// the pool) and waits for it.
    pub fn enter(&self, work: impl FnOnce() + Send) {
        match &self.own {
            Some(pool) => pool.install(work),
            None => rayon::scope(|_| work()),
        }
    }

    /// Runs `work` with the number of threads that share it. Work that is not
    /// worth waking them, or has no others, runs on the calling thread.
    pub fn share(&self, is_worth_sharing: bool, work: impl FnOnce(usize) + Send) {
        let threads = self.own.as_ref().map_or_else(rayon::current_num_threads, |pool| pool.current_num_threads());
        if is_worth_sharing && threads > 1 { self.enter(|| work(threads)) } else { work(1) }
    }

    /// Reserves memory for launches from this thread. If they are `shared`, the pool's
    /// threads reserve theirs, too.
    ///
    /// No launch waits for that: a busy thread reserves when a launch needs the memory.
    pub fn reserve(&self, shared: bool, scratch: Scratch) {
        let Scratch { caller, activations, sums, tile } = scratch;
        if !shared {
            return arena::reserve(caller.max(activations), sums, tile);
        }
        arena::reserve(caller, 0, 0);
        let wanted = [activations, sums, tile];
        let grows = |(reserved, wanted): (&AtomicUsize, usize)| reserved.fetch_max(wanted, Ordering::Relaxed) < wanted;
        // All are compared, not only until the first that grows.
        if self.reserved.iter().zip(wanted).filter(|&pair| grows(pair)).count() > 0 {
            let reserve = move |_: rayon::BroadcastContext<'_>| arena::reserve(activations, sums, tile);
            match &self.own {
                Some(pool) => pool.spawn_broadcast(reserve),
                None => rayon::spawn_broadcast(reserve),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_of_a_pool_reserve_what_launches_need() {
        let threads = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(3).build().expect("threads"));
        let pool = Pool::new(threads.clone());
        pool.reserve(true, Scratch { caller: 7, activations: 1000, sums: 64, tile: 100 });
        // In the order of requests.
        let reserved = threads.broadcast(|_| arena::reserved());
        assert_eq!(reserved, [[1008, 64, 112]; 3]);
        pool.reserve(true, Scratch { caller: 7, activations: 10, sums: 640, tile: 10 });
        assert_eq!(threads.broadcast(|_| arena::reserved()), [[1008, 640, 112]; 3]);
        pool.enter(|| assert!(threads.current_thread_index().is_some()));
    }
}
