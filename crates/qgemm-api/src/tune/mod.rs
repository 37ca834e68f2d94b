//! Autotuner ([`Context::tune`]): measures candidates within a budget. Also
//! finds the user's tuned table.

mod candidates;
mod file;
mod problem;
mod search;

use std::time::{Duration, Instant};

use qgemm_hal::DeviceKind;
use qgemm_sched::TunedTable;

use crate::context::Context;
use crate::error::Error;
use candidates::Candidates;
pub use file::{read_tuned, tuned_table_path, update_tuned};
pub use problem::TuneProblem;
use search::{Limits, Timed, search};

/// Budget of a tuning. No compilation and no launch starts after its time, or if it is
/// expected to exceed it. Started ones are finished.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Budget {
    /// Time for all problems, including compilation.
    pub time: Duration,
    /// Maximum ratio of a measured candidate's estimate to the best estimate.
    pub within: f64,
    /// Maximum candidates per problem.
    pub most: usize,
    /// Measures all candidates, instead of stopping when the best is clear.
    pub all: bool,
}

impl Budget {
    /// Budget of this time, 32 candidates per problem, and a ratio of 3.
    pub fn new(time: Duration) -> Self {
        Self { time, within: 3.0, most: 32, all: false }
    }

    /// Checks that the ratio admits at least the best estimate.
    fn check(&self) -> Result<(), Error> {
        if self.within >= 1.0 { Ok(()) } else { Err(Error::TuneBudget { within: self.within }) }
    }
}

/// Tuning result of one problem.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Tuning {
    /// Index of the problem.
    pub problem: usize,
    /// Kernel id of the fastest candidate.
    pub kernel_id: String,
    /// Median seconds per launch of the fastest candidate.
    pub seconds: f64,
    /// Median seconds per launch of the untuned plan, if measured.
    pub first_seconds: f64,
    /// Candidates with a full measurement.
    pub measured: usize,
    /// Candidates dropped after a first look.
    pub dropped: usize,
    /// Candidates skipped because no previous measurement suggests that
    /// they could be the fastest.
    pub left_out: usize,
    /// Whether time sufficed for all promising candidates.
    pub complete: bool,
    /// Launched candidates in order: the untuned plan, then by estimate.
    pub candidates: Vec<TunedCandidate>,
}

/// Launched candidate and its time.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TunedCandidate {
    /// Kernel id.
    pub kernel_id: String,
    /// Split of its tiles, in words.
    pub cut: String,
    /// Estimated seconds by the cost model.
    pub estimate: f64,
    /// Median seconds per launch, or those of a first look if dropped.
    pub seconds: f64,
    /// Whether it was dropped after a first look.
    pub dropped: bool,
}

/// Result of [`Context::tune`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TuneOutcome {
    /// Table: entries of the context, with better and new ones.
    pub table: TunedTable,
    /// Results per started problem.
    pub tunings: Vec<Tuning>,
    /// Elapsed time.
    pub elapsed: Duration,
}

impl Context {
    /// Measures candidates of each problem, best estimate first, and returns a table of the
    /// fastest for [`Context::with_tuned`].
    ///
    /// Candidates much slower than the best so far are dropped after a first look.
    /// A problem ends when its best candidate is clear. The budget bounds everything that
    /// is started. Normal runs measure nothing.
    ///
    /// `progress` receives a line and the completed fraction; `tracing` gets the line, too.
    ///
    /// ```
    /// use std::time::Duration;
    /// use qgemm_api::{Budget, Context, DType, Problem, TuneProblem, quantize};
    ///
    /// let ctx = Context::open("cpu")?;
    /// let (host, _) = quantize(&vec![0.25; 256 * 256], 256, 256, "q8_0".parse()?)?;
    /// let weights = [ctx.load(&host)?];
    /// let problem = Problem::new(&weights[0], 8).x_dtype(DType::F16);
    /// let budget = Budget::new(Duration::from_millis(50));
    /// let outcome = ctx.tune(&[TuneProblem::new(problem, &weights)], budget, |_| ())?;
    /// let ctx = ctx.with_tuned(outcome.table);
    /// # Ok::<(), qgemm_api::Error>(())
    /// ```
    ///
    /// # Errors
    /// Device errors. Before any measurement: an invalid problem; a weight that is missing
    /// or has another shape, format or device; a budget ratio that is not at least 1.
    pub fn tune(
        &self,
        problems: &[TuneProblem<'_>],
        budget: Budget,
        mut progress: impl FnMut(f64),
    ) -> Result<TuneOutcome, Error> {
        let start = Instant::now();
        budget.check()?;
        problems.iter().try_for_each(|problem| problem.check(self))?;
        let mut table = TunedTable::clone(self.tuned());
        let mut tunings = Vec::new();
        let mut longest_ready = 0.0;
        for (place, tuned) in problems.iter().enumerate() {
            let elapsed = start.elapsed();
            if elapsed >= budget.time {
                break;
            }
            // Unused time of earlier problems goes to later ones.
            let share = (budget.time - elapsed) / (problems.len() - place) as u32;
            let limits = Limits {
                until: (elapsed + share).as_secs_f64(),
                within: budget.within,
                most: budget.most,
                all: budget.all,
            };
            if let Some(tuning) = self.tune_one(place, tuned, &limits, start, &mut longest_ready, &mut table)? {
                tracing::info!(
                    problem = place,
                    kernel = tuning.kernel_id,
                    microseconds = tuning.seconds * 1e6,
                    measured = tuning.measured,
                    dropped = tuning.dropped,
                    "tuned"
                );
                tunings.push(tuning);
            }
            progress((place + 1) as f64 / problems.len() as f64);
        }
        Ok(TuneOutcome { table, tunings, elapsed: start.elapsed() })
    }

    /// Tunes one problem. `None` when there is nothing to launch, or no time.
    fn tune_one(
        &self,
        place: usize,
        tuned: &TuneProblem<'_>,
        limits: &Limits,
        start: Instant,
        longest_ready: &mut f64,
        table: &mut TunedTable,
    ) -> Result<Option<Tuning>, Error> {
        let _span = tracing::info_span!("tune", problem = place).entered();
        let Some(mut candidates) = Candidates::new(self, tuned, start)? else { return Ok(None) };
        let Some(found) = search(&mut candidates, limits, longest_ready)? else { return Ok(None) };
        // Fastest last: the table keeps the latest kernel of a family, since
        // sources may have changed.
        let mut slowest_first = found.measured.clone();
        slowest_first.sort_by(|a, b| b.1.total_cmp(&a.1));
        for (candidate, seconds) in slowest_first {
            candidates.record(candidate, seconds, table);
        }
        let (measured, dropped) = (found.measured.len(), found.dropped.len());
        let mut launched: Vec<_> =
            found.measured.iter().map(|&(candidate, seconds)| (candidate, seconds, false)).collect();
        launched.extend(found.dropped.iter().map(|&(candidate, seconds)| (candidate, seconds, true)));
        launched.sort_by_key(|(candidate, ..)| *candidate);
        let estimates = candidates.estimates();
        let launched = launched.into_iter().map(|(candidate, seconds, dropped)| TunedCandidate {
            kernel_id: candidates.kernel_id(candidate),
            cut: candidates.cut(candidate),
            estimate: estimates[candidate],
            seconds,
            dropped,
        });
        let (best, seconds) = found.best;
        Ok(Some(Tuning {
            problem: place,
            kernel_id: candidates.kernel_id(best),
            seconds,
            first_seconds: found
                .measured
                .iter()
                .find(|(candidate, _)| *candidate == 0)
                .map_or(f64::NAN, |(_, seconds)| *seconds),
            measured,
            dropped,
            left_out: found.left_out,
            complete: found.complete,
            candidates: launched.collect(),
        }))
    }
}

/// Source of measured configurations ([`Context::with_tuned`]).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Tuned {
    /// Table of [`tuned_table_path`], if any. An unreadable table, or one of another
    /// version, is ignored with a warning. Entries of other devices, drivers
    /// and kernels are ignored.
    Auto,
    /// Given table.
    Table(TunedTable),
}

impl From<TunedTable> for Tuned {
    fn from(table: TunedTable) -> Self {
        Self::Table(table)
    }
}

impl Tuned {
    /// Table, if one is found.
    pub(crate) fn table(self) -> Option<TunedTable> {
        let path = match self {
            Self::Table(table) => return Some(table),
            Self::Auto => tuned_table_path()?,
        };
        match read_tuned(&path) {
            Ok(found) => {
                let entries = found.as_ref().map(TunedTable::len);
                tracing::info!(path = %path.display(), ?entries, "looked for a tuned table");
                found
            }
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "tuned table ignored");
                None
            }
        }
    }
}

impl Context {
    /// Number of weight copies that rotate out of the last-level cache, for
    /// [`Context::tune`]. A weight has `bytes` bytes.
    pub fn copies_beyond_cache(&self, bytes: usize) -> usize {
        const CACHES: u64 = 2;
        const MOST: u64 = 512;
        let (info, bytes) = (self.info(), (bytes as u64).max(1));
        // The last-level cache of a CPU may be shared, and reported in part.
        let cache = if info.id.kind == DeviceKind::Cpu { info.cache_bytes.max(64 << 20) } else { info.cache_bytes };
        let in_memory = if info.memory_bytes == 0 { MOST } else { info.memory_bytes / 4 / bytes };
        (CACHES * cache).div_ceil(bytes).min(in_memory).clamp(1, MOST) as usize
    }
}
