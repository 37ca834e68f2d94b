//! Time-bounded search for the fastest candidate, independent of devices.

use crate::error::Error;

/// Candidates to time: the untuned plan first, then by estimate. Times are in seconds.
pub(super) trait Timed {
    /// Estimated time of each candidate.
    fn estimates(&self) -> Vec<f64>;
    /// Makes a candidate ready to run.
    fn ready(&mut self, candidate: usize) -> Result<(), Error>;
    /// Launches the ready candidate `launches` times. Returns the
    /// device time of all launches.
    fn round(&mut self, launches: usize) -> Result<f64, Error>;
    /// Time since the tuning began.
    fn now(&self) -> f64;
}

/// Limits of a search.
pub(super) struct Limits {
    /// End of the search.
    pub until: f64,
    /// Maximum ratio of an estimate to the best one.
    pub within: f64,
    /// Maximum number of candidates.
    pub most: usize,
    /// Whether to measure all of them.
    pub all: bool,
}

/// Result of a search.
#[derive(Debug)]
pub(super) struct Found {
    /// Fastest candidate and its time.
    pub best: (usize, f64),
    /// Fully measured candidates.
    pub measured: Vec<(usize, f64)>,
    /// Candidates dropped after a first look, with its time.
    pub dropped: Vec<(usize, f64)>,
    /// Candidates that cannot be the fastest.
    pub left_out: usize,
    /// Whether time sufficed.
    pub complete: bool,
}

/// Launches of a first look.
const FIRST_LAUNCHES: usize = 3;
/// Drop threshold: ratio to the best time in a first look.
const DROP: f64 = 1.3;
/// Maximum and minimum rounds of a measurement. The result is their median.
const ROUNDS: usize = 9;
const FEWEST_ROUNDS: usize = 5;
/// Relative interquartile range at which a measurement is complete.
const NARROW: f64 = 0.01;
/// Minimum time of a round, which hides the cost of starting it.
const ROUND: f64 = 200e-6;
/// Measurements required before estimates may end the search.
const FEWEST_CANDIDATES: usize = 6;
/// Safety factor: a remaining estimate may be this much too
/// high, relative to the checked ones.
const TRUST: f64 = 0.7;

/// Median and interquartile range.
#[derive(Clone, Copy, Debug)]
struct Interval {
    low: f64,
    median: f64,
    high: f64,
}

impl Interval {
    fn of(times: &mut [f64]) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |place: usize| times.get(place).copied().unwrap_or(f64::NAN);
        let (len, quarter) = (times.len(), times.len() / 4);
        Self { low: at(quarter), median: at(len / 2), high: at((len - 1).saturating_sub(quarter)) }
    }

    fn is_clear_of(&self, other: &Self) -> bool {
        self.high < other.low || other.high < self.low
    }
}

/// Measures candidates until the best is clear or time is over. Nothing starts
/// without enough time left.
///
/// `longest_ready` is the longest preparation so far. `None` when nothing was measured.
pub(super) fn search(
    candidates: &mut impl Timed,
    limits: &Limits,
    longest_ready: &mut f64,
) -> Result<Option<Found>, Error> {
    let estimates = candidates.estimates();
    let most = estimates.first().map_or(0.0, |first| first * limits.within);
    let worth: Vec<f64> = estimates.into_iter().filter(|seconds| *seconds <= most).take(limits.most).collect();
    let mut best: Option<(usize, Interval)> = None;
    let (mut measured, mut dropped) = (Vec::new(), Vec::new());
    let (mut left_out, mut complete) = (0, true);
    // Largest observed ratio by which a candidate beat its estimate.
    let mut optimism = f64::INFINITY;
    for (candidate, &expected) in worth.iter().enumerate() {
        if let Some((_, best)) = &best {
            // The remaining estimates are higher still.
            if !limits.all
                && measured.len() + dropped.len() >= FEWEST_CANDIDATES
                && expected * optimism * TRUST > best.high
            {
                left_out = worth.len() - candidate;
                break;
            }
        }
        let before = candidates.now();
        let launches = expected * optimism.min(1.0) * FIRST_LAUNCHES as f64;
        let needs = if best.is_some() { *longest_ready + launches } else { 0.0 };
        if before + needs >= limits.until {
            complete = false;
            break;
        }
        candidates.ready(candidate)?;
        *longest_ready = longest_ready.max(candidates.now() - before);
        let Some(look) = look(candidates, limits.until)? else {
            complete = false;
            break;
        };
        optimism = optimism.min(look / expected);
        if best.is_some_and(|(_, best)| look > best.median * DROP) {
            dropped.push((candidate, look));
            continue;
        }
        let found = measure(candidates, look, limits.until, best.map(|(_, best)| best))?;
        measured.push((candidate, found.median));
        if best.is_none_or(|(_, other)| found.median < other.median) {
            best = Some((candidate, found));
        }
    }
    Ok(best.map(|(candidate, found)| Found { best: (candidate, found.median), measured, dropped, left_out, complete }))
}

/// Rough seconds per launch. `None` without time for one.
///
/// The first launch may load the kernel. It counts only if there is no time for others.
fn look(candidates: &mut impl Timed, until: f64) -> Result<Option<f64>, Error> {
    if candidates.now() >= until {
        return Ok(None);
    }
    let first = candidates.round(1)?;
    if candidates.now() + first * FIRST_LAUNCHES as f64 >= until {
        return Ok(Some(first));
    }
    Ok(Some(candidates.round(FIRST_LAUNCHES)? / FIRST_LAUNCHES as f64))
}

/// Times of several rounds.
///
/// It stops early when time is over, when the interval is narrow, or when
/// it is clear of `best`. `look` is the rough time per launch, and the only
/// result if no round fits.
fn measure(candidates: &mut impl Timed, look: f64, until: f64, best: Option<Interval>) -> Result<Interval, Error> {
    let launches = (ROUND / look.max(1e-7)).ceil().clamp(1.0, 1000.0) as usize;
    let round = look * launches as f64;
    let mut times = Vec::with_capacity(ROUNDS);
    while times.len() < ROUNDS && candidates.now() + round < until {
        times.push(candidates.round(launches)? / launches as f64);
        if times.len() >= FEWEST_ROUNDS {
            let found = Interval::of(&mut times);
            let is_narrow = found.high - found.low <= NARROW * found.median;
            if is_narrow || best.is_some_and(|best| best.is_clear_of(&found)) {
                break;
            }
        }
    }
    if times.is_empty() {
        times.push(look);
    }
    Ok(Interval::of(&mut times))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulated candidates with known times and measurement noise, on a virtual clock.
    struct Pretended {
        estimates: Vec<f64>,
        times: Vec<f64>,
        /// Time of making one ready.
        compile: f64,
        noise: u64,
        now: f64,
        at: usize,
        /// Last time at which something started.
        began: f64,
    }

    /// Random number in 0..1.
    fn random(state: &mut u64) -> f64 {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*state >> 33) as f64 / 2f64.powi(31)
    }

    impl Pretended {
        /// Random problem: times up to three times the best, estimates with up to 30 % error.
        fn new(problem: u64, noise: u64) -> Self {
            let mut state = problem.wrapping_mul(0x9E3779B97F4A7C15) + 1;
            random(&mut state);
            let base = 5e-6 * (1.0 + 200.0 * random(&mut state));
            let count = 4 + (random(&mut state) * 30.0) as usize;
            let times: Vec<f64> = (0..count).map(|_| base * (1.0 + 2.0 * random(&mut state))).collect();
            let mut both: Vec<(f64, f64)> =
                times.into_iter().map(|time| (time * (0.7 + 0.6 * random(&mut state)), time)).collect();
            both.sort_by(|a, b| a.0.total_cmp(&b.0));
            let (estimates, times) = both.into_iter().unzip();
            Self { estimates, times, compile: 0.0, noise, now: 0.0, at: 0, began: 0.0 }
        }
    }

    impl Timed for Pretended {
        fn estimates(&self) -> Vec<f64> {
            self.estimates.clone()
        }

        fn ready(&mut self, candidate: usize) -> Result<(), Error> {
            (self.at, self.began) = (candidate, self.now);
            self.now += self.compile;
            Ok(())
        }

        fn round(&mut self, launches: usize) -> Result<f64, Error> {
            self.began = self.now;
            // Some rounds are disturbed.
            let disturbed = if random(&mut self.noise) < 0.05 { 1.5 } else { 1.0 };
            let noise = 1.0 + 0.04 * (random(&mut self.noise) - 0.5);
            let seconds = self.times[self.at] * launches as f64 * noise * disturbed;
            self.now += seconds;
            Ok(seconds)
        }

        fn now(&self) -> f64 {
            self.now
        }
    }

    fn limits(until: f64) -> Limits {
        Limits { until, within: 3.0, most: 32, all: false }
    }

    #[test]
    fn two_tunings_agree_and_find_what_is_fast() {
        const PROBLEMS: u64 = 400;
        let (mut agree, mut near, mut left_out) = (0, 0, 0);
        for problem in 0..PROBLEMS {
            let found = [1, 2].map(|noise| {
                let mut candidates = Pretended::new(problem, noise * 7919 + problem);
                let found =
                    search(&mut candidates, &limits(10.0), &mut 0.0).expect("no device").expect("time suffices");
                assert!(found.complete);
                left_out += found.left_out;
                candidates.times[found.best.0]
            });
            let least = Pretended::new(problem, 0).times.into_iter().fold(f64::INFINITY, f64::min);
            agree += u64::from((found[0] / found[1]).ln().abs() <= 1.05f64.ln());
            near += u64::from(found[0] <= least * 1.05);
        }
        assert!(agree as f64 >= 0.95 * PROBLEMS as f64, "{agree} of {PROBLEMS} agree");
        assert!(near as f64 >= 0.95 * PROBLEMS as f64, "{near} of {PROBLEMS} are within 5 % of the best");
        assert!(left_out > 0, "some problems are done early");
    }

    #[test]
    fn nothing_begins_when_the_time_is_over() {
        for (until, compile) in [(0.0, 0.0), (1e-9, 0.5), (0.9, 0.25), (1e-3, 0.0), (2.6, 0.5)] {
            let mut candidates = Pretended { compile, ..Pretended::new(3, 3) };
            let found = search(&mut candidates, &limits(until), &mut 0.0).expect("no device");
            assert!(candidates.began < until || until == 0.0, "something began at {} of {until}", candidates.began);
            assert_eq!(found.is_some(), until > compile && until > 0.0, "{until}");
            // Another compilation would have exceeded the time.
            assert!(found.is_none() || candidates.now < until + 1e-2, "{} of {until}", candidates.now);
            assert!(found.is_none_or(|found| !found.complete || compile == 0.0));
        }
    }

    #[test]
    fn what_others_took_to_be_ready_counts() {
        let mut candidates = Pretended { compile: 0.4, ..Pretended::new(3, 3) };
        let mut longest = 0.4;
        let found = search(&mut candidates, &limits(0.7), &mut longest).expect("no device").expect("the first fits");
        assert!(found.measured.len() == 1 && !found.complete && candidates.now < 0.7, "{found:?}");
    }
}
