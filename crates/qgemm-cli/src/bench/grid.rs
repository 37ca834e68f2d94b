//! `qgemm bench --grid`: how often the planned candidate is near
//! the best, over random problems that are the same in every run.

use std::time::{Duration, Instant};

use anyhow::ensure;
use qgemm_api::{
    Activation, Budget, Context, DType, ExpertProblem, Format, HostExperts, Problem, TuneProblem, TunedCandidate,
    Tuning,
};
use serde::Serialize;

use super::subject::repeated_rows;
use crate::holds::Holds;
use crate::out::{self, Printing};
use crate::progress::Progress;
use crate::table::{Column, Row, Table, numbers, words};

/// Maximum relative loss of a choice against the best.
const WITHIN: f64 = 0.1;
/// Share of problems whose choice must be within that.
const SHARE: f64 = 0.9;
/// Least measuring time of a problem.
const LEAST: Duration = Duration::from_millis(1);
/// Formats to draw from.
const FORMATS: [&str; 8] = ["q4_0", "q4_k", "q6_k", "q8_0", "int4_g128", "mxfp4", "fp8_e4m3_block128", "f16"];
/// Features of dense products and of experts.
const DENSE: [usize; 10] = [1024, 2048, 2560, 4096, 5120, 6144, 8192, 11008, 14336, 28672];
const OF_EXPERTS: [usize; 7] = [768, 1024, 1536, 2048, 2816, 4096, 7168];
/// Numbers of experts, with top-k.
const EXPERTS: [(usize, usize); 6] = [(8, 2), (32, 4), (64, 6), (64, 8), (128, 8), (256, 8)];
/// Token counts are below 2 to this power.
const TOKENS: u32 = 12;

/// A problem of the grid.
struct Drawn {
    tokens: usize,
    n: usize,
    k: usize,
    format: Format,
    gated: bool,
    /// Number of experts, with top-k.
    experts: Option<(usize, usize)>,
}

impl Drawn {
    fn text(&self) -> String {
        let Self { tokens, n, k, format, gated, experts } = self;
        let pair = if *gated { " gated" } else { "" };
        let of = experts.map_or(String::new(), |(all, top_k)| format!(", {top_k} of {all} experts"));
        format!("{tokens}x{n}x{k}{pair} {format}{of}")
    }

    /// Bytes of all its weights.
    fn bytes(&self) -> usize {
        let rows = if self.gated { 2 } else { 1 };
        self.experts.map_or(1, |(all, _)| all) * rows * self.format.row_offset(self.n, self.k)
    }
}

/// A generator with the same numbers in every run.
struct Draw(u64);

impl Draw {
    /// A number below `count`.
    fn below(&mut self, count: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % count.max(1)
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// A random problem, with weights of any size.
    fn problem(&mut self) -> anyhow::Result<Drawn> {
        let with_experts = self.below(5) < 2;
        let features: &[usize] = if with_experts { &OF_EXPERTS } else { &DENSE };
        let (n, k) = (self.of(features), self.of(features));
        let (format, experts) = (self.of(&FORMATS).parse()?, self.of(&EXPERTS));
        let base = 1usize << self.below(TOKENS as usize);
        // Half of the counts are powers of two.
        let more = if self.below(2) == 0 { 0 } else { self.below(base) };
        let gated = self.below(3) == 0;
        Ok(Drawn { tokens: base + more, n, k, format, gated, experts: with_experts.then_some(experts) })
    }
}

/// The first random problems whose weights have at most `largest`
/// bytes.
fn drawn(problems: usize, largest: usize) -> anyhow::Result<Vec<Drawn>> {
    const TRIES: usize = 1 << 20;
    let mut draw = Draw(0x5EED);
    let mut all = Vec::with_capacity(problems.min(TRIES));
    for _ in 0..TRIES {
        if all.len() == problems {
            break;
        }
        let problem = draw.problem()?;
        if problem.bytes() <= largest && problem.format.check_k(problem.k).is_ok() {
            all.push(problem);
        }
    }
    ensure!(all.len() == problems, "{} problems have weights as small as that: expected {problems}", all.len());
    Ok(all)
}

#[derive(Clone, Serialize)]
struct GridRow {
    problem: String,
    /// The fastest kernel.
    best_kernel: String,
    best_microseconds: f64,
    /// Time of the planned candidate.
    planned_microseconds: Option<f64>,
    /// Its slowdown relative to the best.
    behind_best: Option<f64>,
    /// Candidates that were measured fully, and those dropped after a
    /// first look.
    measured: usize,
    dropped: usize,
    /// Whether every candidate expected within twice the best time
    /// was measured.
    complete: bool,
    /// Launched candidates: the planned one, then from the fastest
    /// expected on.
    candidates: Vec<CandidateRow>,
}

#[derive(Clone, Serialize)]
struct CandidateRow {
    kernel: String,
    cut: String,
    estimate_microseconds: f64,
    microseconds: f64,
    dropped: bool,
}

impl GridRow {
    /// Both kernels with their K splits; the planned one only if it
    /// differs.
    fn best_and_planned(&self) -> String {
        let text = |candidate: &CandidateRow| format!("{}, {}", candidate.kernel, candidate.cut);
        let best = self
            .candidates
            .iter()
            .filter(|candidate| !candidate.dropped)
            .min_by(|a, b| a.microseconds.total_cmp(&b.microseconds));
        let (best, planned) =
            (best.map(text).unwrap_or_default(), self.candidates.first().map(text).unwrap_or_default());
        if best == planned { best } else { format!("{best}; {planned}") }
    }
}

impl Row for GridRow {
    const COLUMNS: &'static [Column] = &[
        words("problem", 44),
        numbers("best us", 10),
        numbers("plan us", 10),
        numbers("behind", 7),
        numbers("measured", 8),
        words("best kernel, and what the plan takes", 0),
    ];

    fn cells(&self) -> Vec<String> {
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        vec![
            self.problem.clone(),
            format!("{:.2}", self.best_microseconds),
            or_none(self.planned_microseconds.map(|us| format!("{us:.2}"))),
            or_none(self.behind_best.map(|behind| format!("{:.1}%", behind * 100.0))),
            (self.measured + self.dropped).to_string(),
            self.best_and_planned(),
        ]
    }
}

/// Result of a grid.
#[derive(Serialize)]
struct Grid {
    device: String,
    driver: String,
    /// Number of problems asked for; unmeasured ones have no row.
    problems: usize,
    /// Share of measured problems whose plan is at most `limit`
    /// behind the best.
    share_within: f64,
    limit: f64,
    seconds: f64,
    rows: Vec<GridRow>,
}

/// Measures the grid.
///
/// # Errors
/// When the device fails, or no problem has such small weights.
pub fn run(ctx: &Context, problems: usize, budget: Duration, largest: usize, json: bool) -> anyhow::Result<Holds> {
    let drawn = drawn(problems, largest)?;
    let progress = Progress::new(problems as u64, "measuring");
    let (start, mut spent, mut rows) = (Instant::now(), Duration::ZERO, Vec::new());
    for (place, problem) in drawn.iter().enumerate() {
        if spent >= budget {
            break;
        }
        progress.say(problem.text());
        let mut limits = Budget::new(((budget - spent) / (problems - place) as u32).max(LEAST));
        (limits.within, limits.most, limits.all) = (2.0, 24, true);
        let (tuning, elapsed) = measure(ctx, problem, limits)?;
        spent += elapsed;
        rows.extend(tuning.map(|tuning| row(problem, &tuning)));
        progress.step(1);
    }
    drop(progress);
    let is_within = |row: &&GridRow| row.behind_best.is_some_and(|behind| behind <= WITHIN);
    let share_within = rows.iter().filter(is_within).count() as f64 / rows.len().max(1) as f64;
    let info = ctx.info();
    let (device, driver, seconds) = (info.name.clone(), info.driver.clone(), start.elapsed().as_secs_f64());
    let grid = Grid { device, driver, problems, share_within, limit: WITHIN, seconds, rows };
    match json {
        true => out::json(&grid)?,
        false => print(&grid)?,
    }
    Ok(if share_within >= SHARE { Holds::Yes } else { Holds::No })
}

/// Tuning result of a problem, and its measuring time without
/// weights.
fn measure(ctx: &Context, drawn: &Drawn, limits: Budget) -> anyhow::Result<(Option<Tuning>, Duration)> {
    let &Drawn { tokens, n, k, format, gated, experts } = drawn;
    let host = repeated_rows(format, n, k)?;
    let state = |problem: Problem| {
        let problem = problem.x_dtype(DType::F16);
        if gated { problem.activation(Activation::Silu) } else { problem }
    };
    let outcome = match experts {
        Some((all, top_k)) => {
            let host = match gated {
                true => HostExperts::gated(&vec![(host.clone(), host); all])?,
                false => HostExperts::new(&vec![host; all])?,
            };
            let first = ctx.load_experts(&host)?;
            let mut copies = vec![first];
            while copies.len() < ctx.copies_beyond_cache(copies[0].bytes()) {
                copies.push(ctx.load_experts(&host)?);
            }
            let problem = ExpertProblem::indexed(&copies[0], tokens, top_k).each(state);
            ctx.tune(&[TuneProblem::experts(problem, &copies)], limits, |_| ())?
        }
        None => {
            let load = || if gated { ctx.load_gated(&host, &host) } else { ctx.load(&host) };
            let mut copies = vec![load()?];
            while copies.len() < ctx.copies_beyond_cache(copies[0].bytes()) {
                copies.push(load()?);
            }
            let problem = state(Problem::new(&copies[0], tokens));
            ctx.tune(&[TuneProblem::new(problem, &copies)], limits, |_| ())?
        }
    };
    Ok((outcome.tunings.into_iter().next(), outcome.elapsed))
}

fn row(drawn: &Drawn, tuning: &Tuning) -> GridRow {
    let candidate = |candidate: &TunedCandidate| CandidateRow {
        kernel: candidate.kernel_id.clone(),
        cut: candidate.cut.clone(),
        estimate_microseconds: candidate.estimate * 1e6,
        microseconds: candidate.seconds * 1e6,
        dropped: candidate.dropped,
    };
    let planned = Some(tuning.first_seconds).filter(|seconds| seconds.is_finite());
    GridRow {
        problem: drawn.text(),
        best_kernel: tuning.kernel_id.clone(),
        best_microseconds: tuning.seconds * 1e6,
        planned_microseconds: planned.map(|seconds| seconds * 1e6),
        behind_best: planned.map(|seconds| seconds / tuning.seconds - 1.0),
        measured: tuning.measured,
        dropped: tuning.dropped,
        complete: tuning.complete,
        candidates: tuning.candidates.iter().map(candidate).collect(),
    }
}

/// Prints problems whose plan is not near the best, and the share
/// of the others.
fn print(grid: &Grid) -> anyhow::Result<()> {
    let is_far = |row: &&GridRow| row.behind_best.is_none_or(|behind| behind > grid.limit);
    let mut far: Vec<GridRow> = grid.rows.iter().filter(is_far).cloned().collect();
    let behind = |row: &GridRow| row.behind_best.unwrap_or(f64::INFINITY);
    far.sort_by(|a, b| behind(b).total_cmp(&behind(a)));
    let mut table = Table::new(Printing::Text);
    far.into_iter().try_for_each(|row| table.push(row, &Progress::none()))?;
    let short = grid.rows.iter().filter(|row| !row.complete).count();
    out::line(&format!(
        "{}: {:.1} % of {} problems within {:.0} % of the best ({} of {} begun, {short} of them without time for all candidates), {:.0} s",
        grid.device,
        grid.share_within * 100.0,
        grid.rows.len(),
        grid.limit * 100.0,
        grid.rows.len(),
        grid.problems,
        grid.seconds,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_problems_are_drawn_every_time() {
        let texts =
            |problems| drawn(problems, 1 << 30).expect("there are some").iter().map(Drawn::text).collect::<Vec<_>>();
        let all = texts(200);
        assert_eq!(all[..20], texts(20));
        let with_experts = all.iter().filter(|text| text.contains("experts")).count();
        assert!((40..160).contains(&with_experts), "{with_experts}");
        assert!(all.iter().collect::<std::collections::BTreeSet<_>>().len() > 195);
        assert!(drawn(1, 100).is_err());
    }
}
