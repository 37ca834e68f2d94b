//! The threads that share launches, and their scratch memory.

use std::error::Error as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use qgemm_hal::{DeviceId, HalError};
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::arena;

/// A thread pool of the caller's, or rayon's global one.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    own: Option<Arc<ThreadPool>>,
    /// Floats of [`Scratch`] that its threads have been asked to reserve.
    reserved: Arc<[AtomicUsize; 3]>,
}

/// Starts the threads of rayon's global pool, unless they run, or the calling thread is of another pool. Rayon would start them with
/// the first work for them, and panic where the system has no memory or no threads left.
///
/// # Errors
/// [`HalError::Driver`] when the system starts no more threads.
pub fn start_threads() -> Result<(), HalError> {
    // Rayon tries once. Later it says that the pool is there.
    static FAILED: OnceLock<Option<String>> = OnceLock::new();
    if rayon::current_thread_index().is_some() {
        return Ok(());
    }
    let failed = FAILED.get_or_init(|| {
        let started = ThreadPoolBuilder::new().build_global();
        // Of a pool that is there already, the error has no cause.
        started.err().filter(|error| error.source().is_some()).map(|error| error.to_string())
    });
    match failed {
        None => Ok(()),
        Some(message) => Err(not_started(message)),
    }
}

/// That threads cannot be had.
pub(crate) fn not_started(message: impl ToString) -> HalError {
    HalError::Driver { device: DeviceId::CPU, call: "starting threads", message: message.to_string() }
}

/// Scratch memory of a launch, in floats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scratch {
    /// What the thread that calls keeps for all: X, and accumulators where K is cut.
    pub caller: usize,
    /// X of each thread that works.
    pub activations: usize,
    /// Accumulators of each.
    pub sums: usize,
    /// What the main loop of each takes.
    pub tile: usize,
}

impl Pool {
    /// The caller's own.
    pub fn new(pool: Arc<ThreadPool>) -> Self {
        Self { own: Some(pool), reserved: Arc::default() }
    }

    /// Calls `work` on one of its threads, on this one where it is one of them, and waits for it.
    pub fn enter(&self, work: impl FnOnce() + Send) {
        match &self.own {
            Some(pool) => pool.install(work),
            None => rayon::scope(|_| work()),
        }
    }

    /// Reserves memory for launches from this thread; if they are `shared`, has the pool's threads do so, too. No launch waits for them: one
    /// that is busy until a launch needs the memory reserves it then.
    pub fn reserve(&self, shared: bool, scratch: Scratch) {
        let Scratch { caller, activations, sums, tile } = scratch;
        if !shared {
            return arena::reserve(caller.max(activations), sums, tile);
        }
        arena::reserve(caller, 0, 0);
        let wanted = [activations, sums, tile];
        let grows = |(reserved, wanted): (&AtomicUsize, usize)| reserved.fetch_max(wanted, Ordering::Relaxed) < wanted;
        // All are asked, not only the first that grows.
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
        // In the order in which they were asked.
        let reserved = threads.broadcast(|_| arena::reserved());
        assert_eq!(reserved, [[1008, 64, 112]; 3]);
        pool.reserve(true, Scratch { caller: 7, activations: 10, sums: 640, tile: 10 });
        assert_eq!(threads.broadcast(|_| arena::reserved()), [[1008, 640, 112]; 3]);
        pool.enter(|| assert!(threads.current_thread_index().is_some()));
    }
}
