//! Ahead-of-time preparation of kernels ([`Context::prepare`]).

use std::fmt;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::context::Context;
use crate::error::Error;
use crate::gemm::Problem;

/// Maximum number of compiling threads.
const MOST_THREADS: usize = 16;
/// Host memory per compilation: that of the largest CUDA kernels, rounded up.
const COMPILATION_BYTES: usize = 512 << 20;

/// Limits of [`Context::prepare_within`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrepareLimits {
    /// Time after which no problem is started.
    pub time: Duration,
    /// Host memory for concurrent compilations, at 512 MiB each, in bytes.
    /// At least one always runs.
    pub memory: usize,
}

impl Default for PrepareLimits {
    /// No limits.
    fn default() -> Self {
        Self { time: Duration::MAX, memory: usize::MAX }
    }
}

impl PrepareLimits {
    /// Sets the time limit.
    pub fn time(self, time: Duration) -> Self {
        Self { time, ..self }
    }

    /// Sets the memory limit in bytes.
    pub fn memory(self, bytes: usize) -> Self {
        Self { memory: bytes, ..self }
    }
}

impl Context {
    /// Plans `problems` in parallel, so that [`Context::plan`] later finds
    /// compiled and loaded kernels.
    ///
    /// It uses one thread per host core, at most 16. Weights need not be loaded yet
    /// ([`Context::describe_weight`]). Returns the number of planned problems.
    /// A context caches the last 1024.
    ///
    /// Progress goes to `tracing`, one line per problem.
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
    /// The first error of [`Context::plan`], in the order of problems. Other
    /// problems may have been planned.
    pub fn prepare(&self, problems: &[Problem]) -> Result<usize, Error> {
        self.prepare_within(problems, PrepareLimits::default(), |_| ())
    }

    /// [`Context::prepare`] within limits. List the most important problems first.
    ///
    /// A started problem is finished, so the call may exceed its time by the slowest
    /// compilation. After each problem `progress` receives the number of planned ones,
    /// from one thread at a time. Returns the number of planned problems.
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
        in_parallel(
            problems.len(),
            limits,
            |place| self.plan(&problems[place]).map(|plan| plan.kernel_name().to_owned()),
            progress,
        )
    }
}

/// Makes `count` kernels ready in parallel: `make` each by its place, which returns its name.
/// Places start in order. Returns the number of ready kernels.
///
/// # Errors
/// The first error of `make`, in the order of places. Others may be ready.
pub(crate) fn in_parallel<Name: fmt::Display>(
    count: usize,
    limits: PrepareLimits,
    make: impl Fn(usize) -> Result<Name, Error> + Sync,
    progress: impl FnMut(usize) + Send,
) -> Result<usize, Error> {
    if count == 0 {
        return Ok(0);
    }
    let start = Instant::now();
    let PrepareLimits { time, memory } = limits;
    let progress = Mutex::new(progress);
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = cores.min(MOST_THREADS).min(count).min((memory / COMPILATION_BYTES).max(1));
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    let work = || {
        while let Some(place) =
            Some(next.fetch_add(1, Ordering::Relaxed)).filter(|place| *place < count && start.elapsed() < time)
        {
            match make(place) {
                Ok(kernel) => {
                    let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
                    let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                    progress(done);
                    tracing::info!(done, of = count, %kernel, "prepared");
                }
                Err(error) => {
                    // Other threads stop. Of several errors, the first in order is returned.
                    next.store(count, Ordering::Relaxed);
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
            // If no thread can be started, the existing ones do all the work.
            if let Err(error) = thread::Builder::new().spawn_scoped(scope, work) {
                tracing::debug!(%error, "fewer threads make kernels ready");
                break;
            }
        }
        work();
    });
    let done = done.into_inner();
    tracing::info!(
        done,
        of = count,
        threads,
        seconds = start.elapsed().as_secs_f64(),
        "prepared within the time limit"
    );
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, error)) => Err(error),
        None => Ok(done),
    }
}
