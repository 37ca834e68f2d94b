//! Timing of launches.

use std::time::{Duration, Instant};

use qgemm_api::{Context, DeviceKind, Error, Profile, Stream};

/// Result of a measurement.
pub struct Timing {
    /// Median time of one launch, in seconds.
    pub median: f64,
    /// Half the interquartile range, relative to the median.
    pub noise: f64,
    /// Range that holds nine tenths of the samples, relative to the
    /// median.
    pub spread: f64,
    /// Whether launches were replayed from a CUDA graph.
    pub graph: bool,
    /// Kernels of one launch, in order.
    pub profile: Profile,
}

/// Least launches of a round, so that a round's overhead does not
/// count.
const LAUNCHES_PER_ROUND: usize = 20;
/// Time limit; slow kernels get fewer launches a round, then
/// fewer rounds.
const LONGEST: Duration = Duration::from_secs(3);
const FEWEST_ROUNDS: usize = 5;

/// Pace of a measurement.
#[derive(Clone, Copy, Debug)]
pub enum Pace {
    /// A measurement of a few.
    Thorough,
    /// As `Thorough`, but after the device has idled for this time,
    /// and with only as many launches as items.
    /// A card that has worked for a while runs tensor-core kernels
    /// slower. Published figures often come from rested cards.
    Rested(Duration),
    /// One of hundreds in quick succession, so that clocks are
    /// already steady.
    Sweep,
}

impl Pace {
    /// Least warm-up time, until clocks are steady.
    fn warm_up(self) -> Duration {
        match self {
            Pace::Thorough => Duration::from_millis(200),
            Pace::Rested(_) => Duration::from_millis(40),
            Pace::Sweep => Duration::from_millis(10),
        }
    }

    fn rounds(self) -> usize {
        match self {
            Pace::Thorough | Pace::Rested(_) => 31,
            Pace::Sweep => 15,
        }
    }
}

/// Times `launch`, rotating `items`, such as copies of a weight.
/// On CUDA it replays a graph between events.
///
/// # Errors
/// Errors of `launch` and of the device.
pub fn time_launches<'a, T: Sync>(
    ctx: &Context,
    stream: &Stream,
    items: &'a [T],
    pace: Pace,
    mut launch: impl FnMut(&'a T) -> Result<(), Error> + Send + 'a,
) -> Result<Timing, Error> {
    // The first launch, which may also load the kernel, tells a slow
    // kernel. A slow kernel is timed alone.
    launch(&items[0])?;
    ctx.synchronize(stream)?;
    let start = Instant::now();
    let (launched, profile) = ctx.profile(|| launch(&items[0]))?;
    launched?;
    ctx.synchronize(stream)?;
    let graph = ctx.info().id.kind == DeviceKind::Cuda;
    let launches = launches_per_round(start.elapsed(), items.len(), pace, graph);

    let mut rotation = items.iter().cycle();
    let mut round = move || rotation.by_ref().take(launches).try_for_each(&mut launch);
    let times = if graph {
        let graph = qgemm_api::cuda::capture(&**ctx.device(), stream, round)?;
        time_rounds(ctx, stream, launches, pace, || Ok(graph.replay(stream)?))?
    } else {
        time_rounds(ctx, stream, launches, pace, &mut round)?
    };
    let spread = spread(&times);
    let (median, noise) = median_and_noise(times);
    Ok(Timing { median, noise, spread, graph, profile })
}

/// Launches of a round. Every item gets as many, except those of slow
/// kernels outside of graphs, whose rounds continue the rotation.
fn launches_per_round(launch: Duration, items: usize, pace: Pace, graph: bool) -> usize {
    let share = LONGEST.as_secs_f64() / pace.rounds() as f64;
    let fitting = (share / launch.as_secs_f64().max(1e-9)) as usize;
    let is_short = fitting < LAUNCHES_PER_ROUND || matches!(pace, Pace::Rested(_));
    let all = if is_short { items } else { LAUNCHES_PER_ROUND.next_multiple_of(items) };
    if graph || matches!(pace, Pace::Rested(_)) { all } else { all.min(fitting.max(1)) }
}

/// Times of a launch in each round, in seconds.
fn time_rounds(
    ctx: &Context,
    stream: &Stream,
    launches: usize,
    pace: Pace,
    mut round: impl FnMut() -> Result<(), Error>,
) -> Result<Vec<f64>, Error> {
    let start = Instant::now();
    while start.elapsed() < pace.warm_up() {
        round()?;
        ctx.synchronize(stream)?;
    }
    if let Pace::Rested(rest) = pace {
        std::thread::sleep(rest);
        round()?;
    }
    let start = Instant::now();
    let mut times = Vec::with_capacity(pace.rounds());
    while times.len() < pace.rounds() && (times.len() < FEWEST_ROUNDS || start.elapsed() < LONGEST) {
        let before = ctx.device().record(stream)?;
        round()?;
        let after = ctx.device().record(stream)?;
        times.push(ctx.device().elapsed(&before, &after)?.as_secs_f64() / launches as f64);
    }
    Ok(times)
}

/// Range of nine tenths of the times, relative to the median.
fn spread(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |share: f64| sorted[((sorted.len() - 1) as f64 * share).round() as usize];
    (at(0.95) - at(0.05)) / at(0.5)
}

/// Median, and half the interquartile range relative to it.
pub fn median_and_noise(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    let median = at(0.5);
    (median, (at(0.75) - at(0.25)) / 2.0 / median)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_kernels_get_few_launches_a_round() {
        let launches = |milliseconds, items, graph| {
            launches_per_round(Duration::from_millis(milliseconds), items, Pace::Thorough, graph)
        };
        // Half a second each: one a round. A tenth of a millisecond: every copy once.
        assert_eq!([launches(500, 114, false), launches(500, 114, true)], [1, 114]);
        assert_eq!(launches_per_round(Duration::from_micros(100), 114, Pace::Thorough, false), 114);
        assert_eq!(launches_per_round(Duration::from_micros(100), 3, Pace::Thorough, true), 21);
        let rested = Pace::Rested(Duration::from_millis(1));
        assert_eq!(launches_per_round(Duration::from_millis(500), 7, rested, false), 7);
    }

    #[test]
    fn few_outliers_are_not_spread() {
        let mut times = vec![1.0; 40];
        times[0] = 9.0;
        assert_eq!(spread(&times), 0.0);
        times[..4].fill(1.5);
        assert_eq!(spread(&times), 0.5);
    }

    #[test]
    fn an_outlier_moves_neither_median_nor_noise() {
        let (median, noise) = median_and_noise(vec![1.0, 1.1, 0.9, 1.0, 50.0]);
        assert_eq!(median, 1.0);
        assert!((noise - 0.05).abs() < 1e-12);
    }
}
