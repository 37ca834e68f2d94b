//! [`Tally`]: how often each kernel is offered and chosen, over the
//! problems of the grid on one chip.

use std::collections::HashMap;

use qgemm_api::Context;
use qgemm_api::tuning::KernelId;

use super::problems::{Case, Work};

/// Rank of a choice that rounds weights or quantizes a plain X, relative
/// to its time: plans prefer exact kernels by as much.
const ROUNDING: f64 = 1.05;

/// Problems of a kernel, and how near it comes to the choice.
#[derive(Clone, Debug)]
pub struct Stats {
    /// Kernel identity.
    pub kernel: String,
    /// Problems that it serves, that choose it, and that nothing
    /// else serves.
    pub offered: usize,
    pub chosen: usize,
    pub alone: usize,
    /// Smallest ratio of its time to that of the choice.
    pub nearest: f64,
}

/// How much slower the choices of a chip are without some kernels.
#[derive(Clone, Debug, Default)]
pub struct Loss {
    /// Problems, and those without any kernel left.
    pub problems: usize,
    pub unserved: usize,
    /// Sums of logarithms: of the choices' seconds, and of the ratios.
    pub seconds: f64,
    pub logarithms: f64,
    /// Largest ratio, and its problem.
    pub worst: f64,
    pub worst_problem: String,
}

/// The best candidate of a kernel: its number, seconds and rank.
#[derive(Clone, Copy)]
struct Best {
    kernel: usize,
    seconds: f64,
    rank: f64,
}

/// Candidates of the grid's problems on one chip.
#[derive(Default)]
pub struct Tally {
    numbers: HashMap<String, usize>,
    ids: HashMap<KernelId, usize>,
    pub stats: Vec<Stats>,
    /// Kernels that are left out, by their numbers.
    left_out: Vec<bool>,
    pub loss: Loss,
}

impl Tally {
    /// Weighs the candidates of a problem. Problems that no kernel serves
    /// are left out.
    pub fn add(&mut self, ctx: &Context, case: &Case, without: impl Fn(&str) -> bool) {
        let bests = match &case.work {
            Work::Gemm(problem) => {
                let mut bests = Vec::new();
                for candidate in ctx.candidates(problem).unwrap_or_default() {
                    let (launch, id) = (candidate.launch(), candidate.kernel_id());
                    let known = self.ids.get(&id).copied();
                    let kernel = known.unwrap_or_else(|| self.number(&id.to_string(), &without));
                    self.ids.insert(id, kernel);
                    let rounds = launch.config.rounded_weights.is_some() || launch.workspace.quantized.is_some();
                    let rank = launch.estimate * if rounds { ROUNDING } else { 1.0 };
                    offer(&mut bests, Best { kernel, seconds: launch.estimate, rank });
                }
                bests
            }
            Work::Experts(problem) => {
                let mut bests = Vec::new();
                let record = ctx.explain_experts(problem);
                for candidate in record.into_iter().flat_map(|record| record.candidates) {
                    let (kernel, seconds) = (self.number(&candidate.kernel_id, &without), candidate.seconds);
                    offer(&mut bests, Best { kernel, seconds, rank: seconds });
                }
                bests
            }
        };
        self.judge(&bests, &case.text);
    }

    /// Number of a kernel.
    fn number(&mut self, kernel: &str, without: impl Fn(&str) -> bool) -> usize {
        if let Some(&number) = self.numbers.get(kernel) {
            return number;
        }
        let number = self.stats.len();
        self.left_out.push(without(kernel));
        self.numbers.insert(kernel.to_owned(), number);
        self.stats.push(Stats { kernel: kernel.to_owned(), offered: 0, chosen: 0, alone: 0, nearest: f64::INFINITY });
        number
    }

    fn judge(&mut self, bests: &[Best], problem: &str) {
        let least = |a: Best, b: Best| if b.rank < a.rank { b } else { a };
        let Some(choice) = bests.iter().copied().reduce(least) else { return };
        for best in bests {
            let stats = &mut self.stats[best.kernel];
            stats.offered += 1;
            stats.alone += usize::from(bests.len() == 1);
            stats.nearest = stats.nearest.min(best.rank / choice.rank);
        }
        self.stats[choice.kernel].chosen += 1;
        self.loss.problems += 1;
        self.loss.seconds += choice.seconds.ln();
        let left = bests.iter().copied().filter(|best| !self.left_out[best.kernel]).reduce(least);
        let Some(left) = left else {
            self.loss.unserved += 1;
            return;
        };
        let ratio = left.seconds / choice.seconds;
        self.loss.logarithms += ratio.ln();
        if ratio > self.loss.worst {
            (self.loss.worst, self.loss.worst_problem) = (ratio, problem.to_owned());
        }
    }
}

/// Keeps the best candidate of each kernel.
fn offer(bests: &mut Vec<Best>, new: Best) {
    match bests.iter_mut().find(|best| best.kernel == new.kernel) {
        Some(best) if best.rank <= new.rank => {}
        Some(best) => *best = new,
        None => bests.push(new),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_without_a_kernel_take_the_next() {
        let mut tally = Tally::default();
        let [a, b] = ["a", "b"].map(|name| tally.number(name, |kernel| kernel == "a"));
        let best = |kernel, seconds, rank| Best { kernel, seconds, rank };
        let mut bests = Vec::new();
        for new in [best(a, 3.0, 3.0), best(b, 2.0, 2.1), best(a, 1.0, 1.0)] {
            offer(&mut bests, new);
        }
        tally.judge(&bests, "of both");
        tally.judge(&[best(a, 1.0, 1.0)], "of one");
        let counts = |stats: &Stats| (stats.offered, stats.chosen, stats.alone, stats.nearest);
        assert_eq!([counts(&tally.stats[a]), counts(&tally.stats[b])], [(2, 2, 1, 1.0), (1, 0, 0, 2.1)]);
        let Loss { problems, unserved, seconds, logarithms, worst, worst_problem } = tally.loss;
        assert_eq!((problems, unserved, seconds, logarithms), (2, 1, 0.0, 2f64.ln()));
        assert_eq!((worst, &*worst_problem), (2.0, "of both"));
    }
}
