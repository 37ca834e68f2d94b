//! [`Context::tune`]: measuring candidates within a budget, and tables that are found by themselves.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use qgemm_hal::{Buffer, DeviceKind, Stream};
use qgemm_sched::TunedTable;

use crate::context::Context;
use crate::error::Error;
use crate::gemm::{Args, Candidate, Plan, Problem};
use crate::weight::Weight;

/// What a tuning may cost. It stops at the first limit that it reaches, between two measurements: one launch may end beyond it.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Budget {
    /// Time for all problems together, kernels made ready included.
    pub time: Duration,
    /// Candidates that should take more than so many times as long as the best are not measured.
    pub within: f64,
    /// Most candidates of a problem.
    pub most: usize,
}

impl Budget {
    /// So much time, for at most 32 candidates of a problem that should take at most three times as long as the best.
    pub fn new(time: Duration) -> Self {
        Self { time, within: 3.0, most: 32 }
    }
}

/// A problem to tune, with what to run it on.
#[derive(Debug)]
pub struct TuneProblem<'a> {
    /// The problem: plain products, without C, bias, residual or token scales, whose time these hardly change.
    pub problem: Problem,
    /// Copies of its weight that launches take in turn, so that none is read from a cache; at least one.
    pub weights: &'a [Weight],
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
    /// The same of what the cost model would have taken, where that was measured.
    pub first_seconds: f64,
    /// Candidates that were measured to the end.
    pub measured: usize,
    /// Candidates that were dropped after a first look.
    pub dropped: usize,
    /// Whether all that were worth it were measured within the budget.
    pub complete: bool,
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
    /// [`Context::with_tuned`]. Candidates that are much slower than the best so far are dropped after a first look. Takes no longer than
    /// the budget and one launch; nothing is measured in a run of the user's.
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
    /// let outcome = ctx.tune(&[TuneProblem { problem, weights: &weights }], budget, |_| ())?;
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
        for (place, tuned) in problems.iter().enumerate() {
            let elapsed = start.elapsed();
            if elapsed >= budget.time {
                break;
            }
            // What earlier problems left is for those that follow.
            let share = (budget.time - elapsed) / (problems.len() - place) as u32;
            let tuner = Tuner { ctx: self, budget, until: Instant::now() + share };
            if let Some(tuning) = tuner.tune(place, tuned, &mut table)? {
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

    /// The context with the table of [`tuned_table_path`], where there is one. A table that cannot be read, and one of another version, is
    /// left alone with a warning; entries of other devices, drivers and kernels are never followed.
    pub fn with_found_tuned(self) -> Self {
        let Some(path) = tuned_table_path() else { return self };
        match read_tuned(&path) {
            Ok(Some(table)) => {
                tracing::info!(path = %path.display(), entries = table.len(), "tuned table found");
                self.with_tuned(table)
            }
            Ok(None) => self,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "tuned table left out");
                self
            }
        }
    }
}

/// Where tables of measurements are kept: the file that `QGEMM_TUNED` names, else `qgemm/tuned.json` in the user's cache folder; `None`
/// where there is no such folder.
pub fn tuned_table_path() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("QGEMM_TUNED").filter(|path| !path.is_empty()) {
        return Some(path.into());
    }
    let folder = etcetera::choose_base_strategy().ok()?;
    Some(etcetera::BaseStrategy::cache_dir(&folder).join("qgemm").join("tuned.json"))
}

/// The table in a file; `None` where there is no such file.
///
/// # Errors
/// [`Error::Io`] when the file cannot be read, [`Error::Tuned`] when it holds something else.
pub fn read_tuned(path: impl AsRef<Path>) -> Result<Option<TunedTable>, Error> {
    /// Bytes of a table, at most: an entry has some hundred.
    const MOST: u64 = 256 << 20;
    let path = path.as_ref();
    let failed = |source| Error::Io { path: path.to_owned(), source };
    let metadata = match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        metadata => metadata.map_err(failed)?,
    };
    if !metadata.is_file() || metadata.len() > MOST {
        let why = format!("expected a file of at most {MOST} bytes");
        return Err(failed(std::io::Error::new(std::io::ErrorKind::InvalidInput, why)));
    }
    let text = std::fs::read_to_string(path).map_err(failed)?;
    Ok(Some(TunedTable::from_json(&text)?))
}

/// Launches of a first look.
const FIRST_LAUNCHES: usize = 3;
/// What takes longer than the best by this factor in a first look is dropped.
const DROP: f64 = 1.3;
/// Rounds of a measurement, of which the median counts.
const ROUNDS: usize = 9;
/// A round takes so long at least, so that what a round itself costs does not count.
const ROUND: Duration = Duration::from_micros(200);

/// Tunes one problem.
struct Tuner<'a> {
    ctx: &'a Context,
    budget: Budget,
    until: Instant,
}

impl Tuner<'_> {
    /// `None` for 0 tokens.
    fn tune(&self, place: usize, tuned: &TuneProblem<'_>, table: &mut TunedTable) -> Result<Option<Tuning>, Error> {
        let TuneProblem { problem, weights } = tuned;
        if weights.is_empty() {
            return Err(Error::MissingOperand { operand: "weight", why: "a problem is measured with its weight" });
        }
        let _span = tracing::info_span!("tune", problem = place).entered();
        let all = self.ctx.candidates(problem)?;
        let most = all.first().map_or(0.0, |best| best.launch().estimate * self.budget.within);
        let worth: Vec<&Candidate> =
            all.iter().filter(|c| c.launch().estimate <= most).take(self.budget.most).collect();
        let Some(&first) = worth.first() else { return Ok(None) };
        let mut bench = Bench::new(self.ctx, problem, weights)?;
        let mut best: Option<(f64, &Candidate)> = None;
        let (mut measured, mut dropped, mut first_seconds) = (0, 0, f64::NAN);
        for candidate in &worth {
            // One is measured whatever the budget.
            if best.is_some() && Instant::now() >= self.until {
                break;
            }
            let plan = self.ctx.plan_candidate(candidate)?;
            let look = bench.look(&plan, self.until)?;
            if best.is_some_and(|(seconds, _)| look > seconds * DROP) {
                dropped += 1;
                continue;
            }
            let seconds = bench.measure(&plan, look, self.until)?;
            measured += 1;
            if std::ptr::eq(*candidate, first) {
                first_seconds = seconds;
            }
            table.record(self.ctx.info(), plan.op(), candidate.launch(), candidate.source_hash(), seconds);
            if best.is_none_or(|(other, _)| seconds < other) {
                best = Some((seconds, candidate));
            }
        }
        Ok(best.map(|(seconds, candidate)| Tuning {
            problem: place,
            kernel_id: candidate.kernel_id().to_string(),
            seconds,
            first_seconds,
            measured,
            dropped,
            complete: measured + dropped == worth.len(),
        }))
    }
}

/// Buffers for launches of one problem.
struct Bench<'a> {
    ctx: &'a Context,
    weights: &'a [Weight],
    stream: Stream,
    x: Buffer,
    d: Buffer,
    /// The weight of the next launch.
    turn: usize,
}

impl<'a> Bench<'a> {
    fn new(ctx: &'a Context, problem: &Problem, weights: &'a [Weight]) -> Result<Self, Error> {
        let (x, d) = problem.bytes_of_x_and_d()?;
        Ok(Self { ctx, weights, stream: ctx.new_stream()?, x: ctx.allocate(x)?, d: ctx.allocate(d)?, turn: 0 })
    }

    /// Seconds of a launch, roughly. The first launch, which may load the kernel, counts only where time is up with it.
    fn look(&mut self, plan: &Plan, until: Instant) -> Result<f64, Error> {
        let first = self.round(plan, 1)?;
        if Instant::now() + first * FIRST_LAUNCHES as u32 >= until {
            return Ok(first.as_secs_f64());
        }
        Ok(self.round(plan, FIRST_LAUNCHES)?.as_secs_f64() / FIRST_LAUNCHES as f64)
    }

    /// The median of some rounds, fewer where time is up; `look` is what a launch takes roughly, and all there is where no other fits.
    fn measure(&mut self, plan: &Plan, look: f64, until: Instant) -> Result<f64, Error> {
        let launches = (ROUND.as_secs_f64() / look.max(1e-7)).ceil().clamp(1.0, 1000.0) as usize;
        let mut times = Vec::with_capacity(ROUNDS);
        let round = Duration::from_secs_f64(look * launches as f64);
        while times.len() < ROUNDS && Instant::now() + round < until {
            times.push(self.round(plan, launches)?.as_secs_f64() / launches as f64);
        }
        times.sort_by(f64::total_cmp);
        Ok(times.get(times.len() / 2).copied().unwrap_or(look))
    }

    /// Time of some launches, with the weights in turn, between events of the device.
    fn round(&mut self, plan: &Plan, launches: usize) -> Result<Duration, Error> {
        let device = self.ctx.device();
        let mut workspace = self.ctx.workspace(plan.workspace_bytes())?;
        let before = device.record(&self.stream)?;
        for _ in 0..launches {
            let weight = &self.weights[self.turn % self.weights.len()];
            self.turn += 1;
            plan.run(&self.stream, Args::new(&self.x, weight, &mut self.d).workspace(&mut workspace))?;
        }
        let after = device.record(&self.stream)?;
        let elapsed = device.elapsed(&before, &after)?;
        device.synchronize(&self.stream)?;
        Ok(elapsed)
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
