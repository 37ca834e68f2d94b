//! Which of many ways is the fastest, found within a time: knows nothing of devices.

use crate::error::Error;

/// Ways to do something, first the one that would be taken, then from the one that should be fastest on. Times are in seconds.
pub(super) trait Timed {
    /// What each should take.
    fn estimates(&self) -> Vec<f64>;
    /// Makes one ready to run.
    fn ready(&mut self, way: usize) -> Result<(), Error>;
    /// Runs the one that was made ready last so many times, and says how long all of that took on the device.
    fn round(&mut self, launches: usize) -> Result<f64, Error>;
    /// Time since the tuning began.
    fn now(&self) -> f64;
}

/// What a search may cost.
pub(super) struct Limits {
    /// When it is over.
    pub until: f64,
    /// Ways that should take so many times as long as the best are not measured.
    pub within: f64,
    /// Most ways.
    pub most: usize,
    /// Whether to measure all of them.
    pub all: bool,
}

/// What a search found.
#[derive(Debug)]
pub(super) struct Found {
    /// The fastest and its time.
    pub best: (usize, f64),
    /// What was measured to the end.
    pub measured: Vec<(usize, f64)>,
    /// What was dropped after a first look, and what it took there.
    pub dropped: Vec<(usize, f64)>,
    /// How many cannot be as fast as the best.
    pub left_out: usize,
    /// Whether the time sufficed.
    pub complete: bool,
}

/// Launches of a first look.
const FIRST_LAUNCHES: usize = 3;
/// What takes longer than the best by this factor in a first look is dropped.
const DROP: f64 = 1.3;
/// Rounds of a measurement, of which the median counts: most, and as few as say where it lies.
const ROUNDS: usize = 9;
const FEWEST_ROUNDS: usize = 5;
/// A measurement whose middle half is as narrow as this is done.
const NARROW: f64 = 0.01;
/// A round takes so long at least, so that what a round itself costs does not count.
const ROUND: f64 = 200e-6;
/// So many must be measured before estimates are trusted to say that the rest is slower.
const FEWEST_WAYS: usize = 6;
/// By how much estimates may be worse than the best of those that were checked.
const TRUST: f64 = 0.7;

/// A median, and between what the middle half of the times lies.
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

/// Measures ways until the best is clear of all that are left, or the time is over: nothing is begun that there is no time for.
/// `longest_ready` is the longest that making one ready took so far. `None` where nothing was measured.
pub(super) fn search(ways: &mut impl Timed, limits: &Limits, longest_ready: &mut f64) -> Result<Option<Found>, Error> {
    let estimates = ways.estimates();
    let most = estimates.first().map_or(0.0, |first| first * limits.within);
    let worth: Vec<f64> = estimates.into_iter().filter(|seconds| *seconds <= most).take(limits.most).collect();
    let mut best: Option<(usize, Interval)> = None;
    let (mut measured, mut dropped) = (Vec::new(), Vec::new());
    let (mut left_out, mut complete) = (0, true);
    // The most that a way was faster than it should be.
    let mut optimism = f64::INFINITY;
    for (way, &expected) in worth.iter().enumerate() {
        if let Some((_, best)) = &best {
            // The rest is expected to take longer still.
            if !limits.all && measured.len() + dropped.len() >= FEWEST_WAYS && expected * optimism * TRUST > best.high {
                left_out = worth.len() - way;
                break;
            }
        }
        let before = ways.now();
        let launches = expected * optimism.min(1.0) * FIRST_LAUNCHES as f64;
        let needs = if best.is_some() { *longest_ready + launches } else { 0.0 };
        if before + needs >= limits.until {
            complete = false;
            break;
        }
        ways.ready(way)?;
        *longest_ready = longest_ready.max(ways.now() - before);
        let Some(look) = look(ways, limits.until)? else {
            complete = false;
            break;
        };
        optimism = optimism.min(look / expected);
        if best.is_some_and(|(_, best)| look > best.median * DROP) {
            dropped.push((way, look));
            continue;
        }
        let found = measure(ways, look, limits.until, best.map(|(_, best)| best))?;
        measured.push((way, found.median));
        if best.is_none_or(|(_, other)| found.median < other.median) {
            best = Some((way, found));
        }
    }
    Ok(best.map(|(way, found)| Found { best: (way, found.median), measured, dropped, left_out, complete }))
}

/// Seconds of a launch, roughly; none where there is no time for one. The first launch, which may load the kernel, counts only where
/// there is no time for others.
fn look(ways: &mut impl Timed, until: f64) -> Result<Option<f64>, Error> {
    if ways.now() >= until {
        return Ok(None);
    }
    let first = ways.round(1)?;
    if ways.now() + first * FIRST_LAUNCHES as f64 >= until {
        return Ok(Some(first));
    }
    Ok(Some(ways.round(FIRST_LAUNCHES)? / FIRST_LAUNCHES as f64))
}

/// The times of some rounds: fewer where time is up, or once it is clear where they lie, or that they lie elsewhere than those of the best;
/// `look` is what a launch takes roughly, and all there is where no round fits.
fn measure(ways: &mut impl Timed, look: f64, until: f64, best: Option<Interval>) -> Result<Interval, Error> {
    let launches = (ROUND / look.max(1e-7)).ceil().clamp(1.0, 1000.0) as usize;
    let round = look * launches as f64;
    let mut times = Vec::with_capacity(ROUNDS);
    while times.len() < ROUNDS && ways.now() + round < until {
        times.push(ways.round(launches)? / launches as f64);
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

    /// Ways whose times are known, and measured with noise, on a clock of its own.
    struct Pretended {
        estimates: Vec<f64>,
        times: Vec<f64>,
        /// What making one ready takes.
        compile: f64,
        noise: u64,
        now: f64,
        at: usize,
        /// The last moment at which something began.
        began: f64,
    }

    /// A number from 0 to below 1.
    fn random(state: &mut u64) -> f64 {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*state >> 33) as f64 / 2f64.powi(31)
    }

    impl Pretended {
        /// A problem: ways that take up to three times as long as the best, expected with errors of up to 30 %.
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

        fn ready(&mut self, way: usize) -> Result<(), Error> {
            (self.at, self.began) = (way, self.now);
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
                let mut ways = Pretended::new(problem, noise * 7919 + problem);
                let found = search(&mut ways, &limits(10.0), &mut 0.0).expect("no device").expect("time suffices");
                assert!(found.complete);
                left_out += found.left_out;
                ways.times[found.best.0]
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
            let mut ways = Pretended { compile, ..Pretended::new(3, 3) };
            let found = search(&mut ways, &limits(until), &mut 0.0).expect("no device");
            assert!(ways.began < until || until == 0.0, "something began at {} of {until}", ways.began);
            assert_eq!(found.is_some(), until > compile && until > 0.0, "{until}");
            // One more compilation would have taken longer than there was time.
            assert!(found.is_none() || ways.now < until + 1e-2, "{} of {until}", ways.now);
            assert!(found.is_none_or(|found| !found.complete || compile == 0.0));
        }
    }

    #[test]
    fn what_others_took_to_be_ready_counts() {
        let mut ways = Pretended { compile: 0.4, ..Pretended::new(3, 3) };
        let mut longest = 0.4;
        let found = search(&mut ways, &limits(0.7), &mut longest).expect("no device").expect("the first fits");
        assert!(found.measured.len() == 1 && !found.complete && ways.now < 0.7, "{found:?}");
    }
}
