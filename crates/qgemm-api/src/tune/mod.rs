//! [`Context::tune`]: measures candidates within a budget, and finds the user's tuned table.

mod file;
mod search;
mod ways;

use std::time::{Duration, Instant};

use qgemm_hal::DeviceKind;
use qgemm_sched::TunedTable;

use crate::context::Context;
use crate::error::Error;
use crate::experts::{ExpertProblem, Experts};
use crate::gemm::Problem;
use crate::matmul::Matmul;
use crate::weight::Weight;
pub use file::{read_tuned, tuned_table_path, update_tuned};
use search::{Limits, Timed, search};
use ways::Ways;

/// What a tuning may cost. No compilation and no launch begins once its time is over, nor one that by those before it would take longer than
/// what is left; what was begun is finished.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Budget {
    /// Time for all problems together, kernels made ready included.
    pub time: Duration,
    /// Candidates that should take more than so many times as long as the best are not measured.
    pub within: f64,
    /// Most candidates of a problem.
    pub most: usize,
    /// Measures all of them, in place of stopping when the best is clear of what is left.
    pub all: bool,
}

impl Budget {
    /// So much time, for at most 32 candidates of a problem that should take at most three times as long as the best.
    pub fn new(time: Duration) -> Self {
        Self { time, within: 3.0, most: 32, all: false }
    }
}

/// A problem to tune, with what to run it on: plain products, without C, bias, residual, norm or token scales, whose time these hardly
/// change.
#[derive(Debug)]
#[non_exhaustive]
pub enum TuneProblem<'a> {
    /// A product with one weight.
    Gemm {
        /// The problem.
        problem: Problem,
        /// Copies of its weight that launches take in turn, so that none is read from a cache; at least one.
        weights: &'a [Weight],
    },
    /// Products with experts, whose rows are given to all of them alike.
    Experts {
        /// The problem.
        problem: ExpertProblem,
        /// Copies of its experts, as those of a weight.
        experts: &'a [Experts],
    },
    /// A product of two matrices.
    Matmul(Matmul),
}

impl<'a> TuneProblem<'a> {
    /// A product with one weight, of which launches take copies in turn.
    pub fn new(problem: Problem, weights: &'a [Weight]) -> Self {
        Self::Gemm { problem, weights }
    }

    /// Products with experts, of which launches take copies in turn.
    pub fn experts(problem: ExpertProblem, experts: &'a [Experts]) -> Self {
        Self::Experts { problem, experts }
    }
}

/// What a tuning found for one problem.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Tuning {
    /// Place among the problems.
    pub problem: usize,
    /// Identity of the fastest kernel.
    pub kernel_id: String,
    /// Median seconds of a launch of it.
    pub seconds: f64,
    /// The same of what a plan without measurements takes, where that was measured.
    pub first_seconds: f64,
    /// Candidates that were measured to the end.
    pub measured: usize,
    /// Candidates that were dropped after a first look.
    pub dropped: usize,
    /// Candidates that were left out because by what was measured before none of them can be as fast as the best.
    pub left_out: usize,
    /// Whether the time sufficed for all that were worth it.
    pub complete: bool,
    /// The candidates that were launched, in their order: what a plan takes, then from the one that should be fastest on.
    pub ways: Vec<TunedWay>,
}

/// A candidate that was launched, and what it took.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TunedWay {
    /// Identity of its kernel.
    pub kernel_id: String,
    /// How its tiles are cut, in words.
    pub cut: String,
    /// Seconds that the cost model expected.
    pub estimate: f64,
    /// Seconds of a launch: the median, or of a first look where it was dropped.
    pub seconds: f64,
    /// Whether it was dropped after a first look.
    pub dropped: bool,
}

/// Result of [`Context::tune`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TuneOutcome {
    /// The table: what the context had, and what is better or new.
    pub table: TunedTable,
    /// A line a problem that was begun.
    pub tunings: Vec<Tuning>,
    /// Time that it took.
    pub elapsed: Duration,
}

impl Context {
    /// Measures the candidates of each problem, the one that should be fastest first, and keeps the best in a table for
    /// [`Context::with_tuned`]. Candidates that are much slower than the best so far are dropped after a first look, and a problem is done when
    /// the best is clear of all that are left. Nothing is begun that the budget has no time for; nothing is measured in a run of the
    /// user's.
    ///
    /// Progress goes to `progress`, with a fraction of the budget or of the work, and to `tracing`.
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
    /// When a problem is not valid or no weight of it came, or the device fails.
    pub fn tune(
        &self,
        problems: &[TuneProblem<'_>],
        budget: Budget,
        mut progress: impl FnMut(f64),
    ) -> Result<TuneOutcome, Error> {
        let start = Instant::now();
        let mut table = TunedTable::clone(self.tuned());
        let mut tunings = Vec::new();
        let mut longest_ready = 0.0;
        for (place, tuned) in problems.iter().enumerate() {
            let elapsed = start.elapsed();
            if elapsed >= budget.time {
                break;
            }
            // What earlier problems left is for those that follow.
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

    /// `None` where there is nothing to launch, or no time for anything.
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
        let Some(mut ways) = Ways::new(self, tuned, start)? else { return Ok(None) };
        let Some(found) = search(&mut ways, limits, longest_ready)? else { return Ok(None) };
        // The fastest last: a table keeps the kernel of a family that it was told of last, since sources may have changed.
        let mut slowest_first = found.measured.clone();
        slowest_first.sort_by(|a, b| b.1.total_cmp(&a.1));
        for (way, seconds) in slowest_first {
            ways.record(way, seconds, table);
        }
        let (measured, dropped) = (found.measured.len(), found.dropped.len());
        let mut launched: Vec<_> = found.measured.iter().map(|&(way, seconds)| (way, seconds, false)).collect();
        launched.extend(found.dropped.iter().map(|&(way, seconds)| (way, seconds, true)));
        launched.sort_by_key(|(way, ..)| *way);
        let estimates = ways.estimates();
        let launched = launched.into_iter().map(|(way, seconds, dropped)| TunedWay {
            kernel_id: ways.kernel_id(way),
            cut: ways.cut(way),
            estimate: estimates[way],
            seconds,
            dropped,
        });
        let (best, seconds) = found.best;
        Ok(Some(Tuning {
            problem: place,
            kernel_id: ways.kernel_id(best),
            seconds,
            first_seconds: found.measured.iter().find(|(way, _)| *way == 0).map_or(f64::NAN, |(_, seconds)| *seconds),
            measured,
            dropped,
            left_out: found.left_out,
            complete: found.complete,
            ways: launched.collect(),
        }))
    }
}

/// Which measurements a context follows ([`Context::with_tuned`]).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Tuned {
    /// Those of [`tuned_table_path`], where there are some. A table that cannot be read, and one of another version, is left alone with a
    /// warning; entries of other devices, drivers and kernels are never followed.
    Auto,
    /// These.
    Table(TunedTable),
}

impl From<TunedTable> for Tuned {
    fn from(table: TunedTable) -> Self {
        Self::Table(table)
    }
}

impl Tuned {
    /// The table; none where none is found.
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
                tracing::warn!(path = %path.display(), %error, "tuned table left out");
                None
            }
        }
    }
}

impl Context {
    /// So many copies of a weight of `bytes` bytes that none is still in the last-level cache when its turn comes: what to give
    /// [`Context::tune`].
    pub fn copies_beyond_cache(&self, bytes: usize) -> usize {
        const CACHES: u64 = 2;
        const MOST: u64 = 512;
        let (info, bytes) = (self.info(), (bytes as u64).max(1));
        // The last cache of a processor may be shared by many, and reported in part.
        let cache = if info.id.kind == DeviceKind::Cpu { info.cache_bytes.max(64 << 20) } else { info.cache_bytes };
        let in_memory = if info.memory_bytes == 0 { MOST } else { info.memory_bytes / 4 / bytes };
        (CACHES * cache).div_ceil(bytes).min(in_memory).clamp(1, MOST) as usize
    }
}
