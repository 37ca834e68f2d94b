//! `qgemm verify --stress`: random cases, one per seed.

use std::collections::HashSet;
use std::hash::Hash;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use qgemm_api::tuning::KernelId;
use qgemm_api::{Context, DeviceKind};
use qgemm_testkit::{Outcome, Selection, Suite, TestCase};
use rayon::prelude::*;

use crate::progress::Progress;
use crate::verify::Report;

/// Cases that run in parallel.
const BATCH: u64 = 16;
/// Time share of cases with new kernels: 3 means a third.
const SHARE_OF_NEW: u32 = 3;
/// Time that new kernels get before the share applies.
const HEAD_START: Duration = Duration::from_secs(3);

/// Source of random cases.
pub struct Draw<'a> {
    /// The suite.
    pub suite: &'a dyn Suite,
    /// Selected cases.
    pub wanted: &'a Selection,
    /// Options that repeat the selection.
    pub again: String,
}

/// Runs random cases until the time is over, from seed `first` or
/// a random one. If `time` is zero, it runs one case.
pub fn run(ctx: &Context, draw: &Draw<'_>, first: Option<u64>, time: Duration, report: &mut Report) {
    let mut seed = first.unwrap_or_else(seed_of_now);
    eprintln!("random cases from seed {seed}");
    let first = seed;
    let progress = Progress::new(time.as_secs(), "stress, seconds");
    let start = Instant::now();
    let mut kernels = Kernels::new();
    let mut left_out = 0;
    // The first case runs alone: a broken device fails once.
    let mut batch = 1;
    loop {
        progress.say(format!("seed {seed}"));
        let cases: Vec<(u64, Box<dyn TestCase>)> =
            (seed..seed + batch).map(|seed| (seed, draw.suite.random_case(draw.wanted, seed))).collect();
        let runs: Vec<Run> = cases.par_iter().map(|(_, case)| run_one(ctx, &kernels, &**case)).collect();
        for ((seed, _), run) in cases.iter().zip(runs) {
            kernels.count(run.outcome.as_ref().and_then(|outcome| outcome.kernel_id), run.time);
            match run.outcome {
                None => left_out += 1,
                Some(outcome) => {
                    report.add(&outcome, Some(format!("{} --stress 0 --seed {seed}", draw.again)), &progress);
                }
            }
        }
        seed += batch;
        batch = BATCH;
        progress.step(start.elapsed().as_secs().saturating_sub(progress.position()));
        if start.elapsed() >= time || report.is_closed() {
            break;
        }
    }
    let left = match left_out {
        0 => String::new(),
        cases => format!(", {cases} of them left out because their kernels had not been compiled"),
    };
    eprintln!("seeds {first} to {}{left}", seed - 1);
}

/// Outcome and time of a case.
struct Run {
    /// `None` if the case was skipped.
    outcome: Option<Outcome>,
    time: Duration,
}

/// Runs a case, unless its kernel is new and new kernels have
/// used their share.
fn run_one(ctx: &Context, kernels: &Kernels<KernelId>, case: &dyn TestCase) -> Run {
    let start = Instant::now();
    // CPU kernels are compiled into the program.
    let compiles = ctx.info().id.kind != DeviceKind::Cpu;
    let is_new = || case.expected_kernel(ctx).is_some_and(|kernel| !kernels.met.contains(&kernel));
    let leave_out = compiles && kernels.new_had_their_share() && is_new();
    let outcome = (!leave_out).then(|| case.run(ctx));
    Run { outcome, time: start.elapsed() }
}

/// Known kernels and times. Otherwise, with a cold cache,
/// compiling would use all the time, and each kernel would run
/// one case.
struct Kernels<K> {
    met: HashSet<K>,
    /// Thread time of all cases, run or skipped.
    all: Duration,
    /// Time of cases with new kernels.
    new: Duration,
    /// Time and number of cases with known kernels.
    known: (Duration, u32),
}

impl<K: Eq + Hash> Kernels<K> {
    fn new() -> Self {
        Self { met: HashSet::new(), all: Duration::ZERO, new: Duration::ZERO, known: (Duration::ZERO, 0) }
    }

    /// Whether the extra time of cases with new kernels exceeds their
    /// share.
    fn new_had_their_share(&self) -> bool {
        let (time, cases) = self.known;
        let ordinary = time / cases.max(1) * u32::try_from(self.met.len()).unwrap_or(u32::MAX);
        self.new.saturating_sub(ordinary) * SHARE_OF_NEW > self.all + HEAD_START
    }

    /// Adds a case, with its kernel if it ran.
    fn count(&mut self, kernel: Option<K>, time: Duration) {
        self.all += time;
        let Some(kernel) = kernel else { return };
        match self.met.insert(kernel) {
            true => self.new += time,
            false => self.known = (self.known.0 + time, self.known.1 + 1),
        }
    }
}

/// A random seed that is short to type.
fn seed_of_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_millis() as u64 % 1_000_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A GPU with an empty cache: a new kernel takes a second, a
    /// known one or a skipped case a hundredth.
    #[test]
    fn compiling_takes_a_third_of_the_time() {
        let mut kernels = Kernels::new();
        let (mut run, mut left_out) = (0, 0);
        let second = Duration::from_secs(1);
        for draw in 0u64.. {
            // Few kernels are frequent, as with random shapes.
            let rarity = 1 << (draw % 11);
            let kernel = rarity | (draw * 7 % rarity);
            let is_new = !kernels.met.contains(&kernel);
            match is_new && kernels.new_had_their_share() {
                true => {
                    kernels.count(None, second / 100);
                    left_out += 1;
                }
                false => {
                    kernels.count(Some(kernel), if is_new { second } else { second / 100 });
                    run += 1;
                }
            }
            if kernels.all > 100 * second {
                break;
            }
        }
        assert!(kernels.new <= kernels.all / 3 + HEAD_START, "{:?} of {:?}", kernels.new, kernels.all);
        assert!(kernels.new > kernels.all / 4 && left_out > 0, "{:?} of {:?}", kernels.new, kernels.all);
        assert!(run > 20 * kernels.met.len(), "{run} cases on {} kernels", kernels.met.len());
    }

    #[test]
    fn with_a_warm_cache_nothing_is_left_out() {
        let mut kernels = Kernels::new();
        for draw in 0..9000 {
            assert!(!kernels.new_had_their_share(), "{draw}");
            // Every other kernel is new, but cached on disk.
            let (kernel, time) = if draw % 2 == 0 { (0, 3) } else { (draw, 4) };
            kernels.count(Some(kernel), Duration::from_millis(time));
        }
    }
}
