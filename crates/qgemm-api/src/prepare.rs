//! [`Context::prepare`]: making kernels ready before they are needed.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::context::Context;
use crate::error::Error;
use crate::gemm::Problem;

/// Most threads that compile at the same time.
const MOST_THREADS: usize = 16;
/// Bytes of the host that a compilation takes while it runs: what the largest CUDA kernels need, rounded up.
const COMPILATION_BYTES: usize = 512 << 20;

/// Bounds of [`Context::prepare_within`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrepareLimits {
    /// No problem is begun once so much time is over.
    pub time: Duration,
    /// Bytes of the host's memory for compilations that run at the same time, which are taken to need 512 MiB each. One runs however little
    /// there is.
    pub memory: usize,
}

impl Default for PrepareLimits {
    /// No bounds.
    fn default() -> Self {
        Self { time: Duration::MAX, memory: usize::MAX }
    }
}

impl PrepareLimits {
    /// With this time.
    pub fn time(self, time: Duration) -> Self {
        Self { time, ..self }
    }

    /// With so many bytes of memory.
    pub fn memory(self, bytes: usize) -> Self {
        Self { memory: bytes, ..self }
    }
}

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
        self.prepare_within(problems, PrepareLimits::default(), |_| ())
    }

    /// The same within bounds: those that matter most come first. What was begun is finished, so that it takes as much longer as the
    /// slowest compilation. `progress` is told after each problem how many are planned, one call at a time. Returns how many were planned.
    ///
    /// ```
    /// use std::time::Duration;
    /// use qgemm_api::{Context, PrepareLimits};
    /// let ctx = Context::open("cpu")?;
    /// let weight = ctx.describe_weight("q4_0".parse()?, 512, 512)?;
    /// let limits = PrepareLimits::default().time(Duration::from_secs(5)).memory(2 << 30);
    /// let planned = ctx.prepare_within(&[weight.problem(1)], limits, |done| println!("{done}"))?;
    /// assert_eq!(planned, 1);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Context::prepare`].
    pub fn prepare_within(
        &self,
        problems: &[Problem],
        limits: PrepareLimits,
        progress: impl FnMut(usize) + Send,
    ) -> Result<usize, Error> {
        let start = Instant::now();
        let PrepareLimits { time, memory } = limits;
        let progress = Mutex::new(progress);
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let threads = cores.min(MOST_THREADS).min(problems.len()).min((memory / COMPILATION_BYTES).max(1));
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
        let work = || {
            while let Some((place, problem)) = {
                let place = next.fetch_add(1, Ordering::Relaxed);
                problems.get(place).filter(|_| start.elapsed() < time).map(|problem| (place, problem))
            } {
                match self.plan(problem) {
                    Ok(plan) => {
                        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
                        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                        progress(done);
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
        thread::scope(|scope| {
            for _ in 1..threads {
                // Where there are no more threads, those that there are do all.
                if let Err(error) = thread::Builder::new().spawn_scoped(scope, work) {
                    tracing::debug!(%error, "fewer threads make kernels ready");
                    break;
                }
            }
            work();
        });
        let done = done.into_inner();
        let (of, seconds) = (problems.len(), start.elapsed().as_secs_f64());
        tracing::info!(done, of, threads, seconds, "prepared as many as there was time for");
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((_, error)) => Err(error),
            None => Ok(done),
        }
    }
}
