//! [`Context::prepare`]: making kernels ready before they are needed.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::context::Context;
use crate::error::Error;
use crate::gemm::Problem;

/// Most threads that compile at the same time: each compilation takes some hundred megabytes.
const MOST_THREADS: usize = 16;

impl Context {
    /// Plans `problems` side by side, on as many threads as the host has cores and 16 at most, so that their kernels are compiled and
    /// loaded when they are needed: [`Context::plan`] finds them then. Problems may be of weights that are not loaded yet
    /// ([`Context::describe_weight`]). Returns how many were planned; a context knows the last 1024.
    ///
    /// Progress goes to `tracing`, a line a problem.
    ///
    /// ```
    /// use qgemm_api::{Context, DType};
    /// let ctx = Context::open("cpu")?;
    /// let weight = ctx.describe_weight("q4_0".parse()?, 512, 512)?;
    /// let problems: Vec<_> = [1, 8, 64].map(|m| weight.problem(m).x_dtype(DType::F16)).into();
    /// assert_eq!(ctx.prepare(&problems)?, 3);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// What [`Context::plan`] fails with, of the first problem for which it does. Others may have been planned.
    pub fn prepare(&self, problems: &[Problem]) -> Result<usize, Error> {
        self.prepare_within(problems, Duration::MAX)
    }

    /// The same, but begins no problem once `time` is over: those that matter most come first. What was begun is finished, so that
    /// it takes as much longer as the slowest compilation. Returns how many were planned.
    ///
    /// # Errors
    /// As [`Context::prepare`].
    pub fn prepare_within(&self, problems: &[Problem], time: Duration) -> Result<usize, Error> {
        let start = Instant::now();
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let threads = cores.min(MOST_THREADS).min(problems.len());
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
        let work = || {
            while let Some((place, problem)) = {
                let place = next.fetch_add(1, Ordering::Relaxed);
                problems.get(place).filter(|_| start.elapsed() < time).map(|problem| (place, problem))
            } {
                match self.plan(problem) {
                    Ok(plan) => {
                        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                        tracing::info!(done, of = problems.len(), kernel = plan.kernel_name(), "prepared");
                    }
                    Err(error) => {
                        // The others stop; of several that fail, the first in order is told.
                        next.store(problems.len(), Ordering::Relaxed);
                        let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                        if failed.as_ref().is_none_or(|(other, _)| place < *other) {
                            *failed = Some((place, error));
                        }
                    }
                }
            }
        };
        thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
        let done = done.into_inner();
        let (of, seconds) = (problems.len(), start.elapsed().as_secs_f64());
        tracing::info!(done, of, threads, seconds, "prepared as many as there was time for");
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((_, error)) => Err(error),
            None => Ok(done),
        }
    }
}
