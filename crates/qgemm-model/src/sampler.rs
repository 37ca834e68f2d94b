//! Sampling of tokens from logits on the host.
//!
//! A sampler is a pure function of parameters, logits, earlier
//! tokens and position, so a device sampler can replace it.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use crate::error::Error;
use crate::philox;

/// Sampling parameters. The default is greedy decoding.
///
/// Parameters apply in this order: repetition penalty, temperature, top-k, top-p, min-p. What remains is normalized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of logits. 0 is argmax; the lowest id wins a tie.
    pub temperature: f32,
    /// Number of most likely tokens that remain; the lower id wins a tie. 0 keeps all.
    pub top_k: usize,
    /// Least probability that the most likely tokens have together, from 0 (the best token alone) to 1 (all).
    pub top_p: f32,
    /// Least probability of a token, relative to the best token, from 0 (all) to 1.
    pub min_p: f32,
    /// Positive logits of earlier tokens are divided by it, negative ones multiplied. 1 changes nothing.
    pub repetition_penalty: f32,
    /// Seed of the random numbers. A number depends on seed and position alone.
    pub seed: u64,
    /// Number of alternatives whose log-probabilities are reported; `None` reports none, not even that of the token.
    pub log_probabilities: Option<usize>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            log_probabilities: None,
        }
    }
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub id: u32,
    /// Log-probability of the token, if asked for: of the model's own logits, before any parameter applies.
    pub log_probability: Option<f32>,
    /// The most likely tokens with their log-probabilities, best first.
    pub alternatives: Vec<(u32, f32)>,
}

impl Sampling {
    /// Validates the parameters.
    ///
    /// # Errors
    /// [`Error::SamplingParameter`].
    pub fn check(&self) -> Result<(), Error> {
        let share = |value: f32| (0.0..=1.0).contains(&value);
        let checks = [
            (
                "temperature",
                self.temperature,
                self.temperature.is_finite() && self.temperature >= 0.0,
                "a finite number of at least 0",
            ),
            ("top-p", self.top_p, share(self.top_p), "0 to 1"),
            ("min-p", self.min_p, share(self.min_p), "0 to 1"),
            (
                "repetition penalty",
                self.repetition_penalty,
                self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0,
                "a finite number above 0",
            ),
        ];
        match checks.into_iter().find(|(_, _, holds, _)| !holds) {
            Some((name, got, _, expected)) => Err(Error::SamplingParameter { name, got, expected }),
            None => Ok(()),
        }
    }

    /// Samples the token at `position`, which follows the tokens `earlier`.
    ///
    /// # Errors
    /// [`Error::NonFiniteLogit`] when a logit is NaN or +∞ (−∞ excludes a token), [`Error::NoCandidate`],
    /// [`Error::SamplingParameter`].
    pub fn sample(&self, logits: &[f32], earlier: &[u32], position: usize) -> Result<Sampled, Error> {
        let candidates = self.distribution(logits, earlier)?;
        let total: f64 = candidates.iter().map(|(_, p)| p).sum();
        let target = philox::uniform(self.seed, position as u64) * total;
        let mut sum = 0.0;
        let drawn = candidates.iter().find(|(_, p)| {
            sum += p;
            sum > target
        });
        let &(id, _) = drawn.or(candidates.last()).ok_or(Error::NoCandidate)?;
        let (log_probability, alternatives) = match self.log_probabilities {
            Some(count) => {
                let (own, best) = log_probabilities(logits, id, count);
                (Some(own), best)
            }
            None => (None, Vec::new()),
        };
        Ok(Sampled { id, log_probability, alternatives })
    }

    /// The tokens that may be sampled, with their probabilities.
    ///
    /// # Errors
    /// As [`Sampling::sample`].
    pub fn distribution(&self, logits: &[f32], earlier: &[u32]) -> Result<Vec<(u32, f64)>, Error> {
        self.check()?;
        if let Some((id, &got)) = logits.iter().enumerate().find(|(_, l)| l.is_nan() || **l == f32::INFINITY) {
            return Err(Error::NonFiniteLogit { id, got });
        }
        let mut candidates: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        self.penalize(&mut candidates, earlier);
        candidates.retain(|(_, logit)| *logit > f32::NEG_INFINITY);
        if self.temperature == 0.0 {
            let best = candidates.iter().copied().min_by(likelier);
            return best.map(|(id, _)| vec![(id, 1.0)]).ok_or(Error::NoCandidate);
        }
        self.keep_top_k(&mut candidates);
        let most = candidates.iter().map(|(_, logit)| *logit).fold(f32::NEG_INFINITY, f32::max);
        let weight = |logit: f32| ((f64::from(logit) - f64::from(most)) / f64::from(self.temperature)).exp();
        let mut weights: Vec<(u32, f64)> = candidates.iter().map(|&(id, logit)| (id, weight(logit))).collect();
        self.keep_top_p(&mut weights, &candidates);
        // The best token has weight 1.
        weights.retain(|(_, w)| *w >= f64::from(self.min_p));
        let total: f64 = weights.iter().map(|(_, w)| w).sum();
        weights.iter_mut().for_each(|(_, w)| *w /= total);
        if weights.is_empty() { Err(Error::NoCandidate) } else { Ok(weights) }
    }

    fn penalize(&self, candidates: &mut [(u32, f32)], earlier: &[u32]) {
        if self.repetition_penalty == 1.0 {
            return;
        }
        for id in earlier.iter().collect::<BTreeSet<_>>() {
            // Ids outside of the vocabulary have no logit.
            if let Some((_, logit)) = candidates.get_mut(*id as usize) {
                *logit = if *logit > 0.0 { *logit / self.repetition_penalty } else { *logit * self.repetition_penalty };
                *logit = logit.min(f32::MAX);
            }
        }
    }

    /// Keeps the best `top_k` tokens. Sorts the tokens, best first, if a later step needs it.
    fn keep_top_k(&self, candidates: &mut Vec<(u32, f32)>) {
        if self.top_k > 0 && self.top_k < candidates.len() {
            candidates.select_nth_unstable_by(self.top_k - 1, likelier);
            candidates.truncate(self.top_k);
            candidates.sort_unstable_by(likelier);
        } else if self.top_p < 1.0 {
            candidates.sort_unstable_by(likelier);
        }
    }

    /// Keeps the best tokens until they have probability `top_p`; `candidates` are sorted then.
    fn keep_top_p(&self, weights: &mut Vec<(u32, f64)>, candidates: &[(u32, f32)]) {
        if self.top_p >= 1.0 {
            return;
        }
        debug_assert!(candidates.is_sorted_by(|a, b| likelier(a, b) == Ordering::Less));
        let least = f64::from(self.top_p) * weights.iter().map(|(_, w)| w).sum::<f64>();
        let mut sum = 0.0;
        let reached = weights.iter().position(|(_, w)| {
            sum += w;
            sum >= least
        });
        weights.truncate(reached.map_or(weights.len(), |last| last + 1));
    }
}

/// Order of tokens: larger logits first, then lower ids.
fn likelier(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    // Adding 0 makes −0 equal to 0.
    (b.1 + 0.0).total_cmp(&(a.1 + 0.0)).then(a.0.cmp(&b.0))
}

/// Log-probability of `id`, and the `count` most likely tokens with theirs.
fn log_probabilities(logits: &[f32], id: u32, count: usize) -> (f32, Vec<(u32, f32)>) {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - f64::from(most)).exp()).sum();
    let normalizer = f64::from(most) + sum.ln();
    let log_probability = |logit: f32| (f64::from(logit) - normalizer) as f32;
    let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    if count > 0 && count < all.len() {
        all.select_nth_unstable_by(count - 1, likelier);
    }
    all.truncate(count);
    all.sort_unstable_by(likelier);
    let own = logits.get(id as usize).map_or(f32::NEG_INFINITY, |&logit| log_probability(logit));
    (own, all.into_iter().map(|(id, logit)| (id, log_probability(logit))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Logits of these probabilities.
    fn logits(probabilities: &[f64]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln() as f32).collect()
    }

    fn warm() -> Sampling {
        Sampling { temperature: 1.0, ..Sampling::default() }
    }

    #[track_caller]
    fn check(sampling: Sampling, logits: &[f32], expected: &[(u32, f64)]) {
        let mut got = sampling.distribution(logits, &[]).expect("a distribution");
        got.sort_unstable_by_key(|(id, _)| *id);
        assert_eq!(
            got.iter().map(|(id, _)| *id).collect::<Vec<_>>(),
            expected.iter().map(|(id, _)| *id).collect::<Vec<_>>()
        );
        for ((_, got), (id, expected)) in got.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-6, "token {id}: {got}, expected {expected}");
        }
    }

    #[test]
    fn distributions_are_exact() {
        let of = logits(&[0.1, 0.4, 0.2, 0.3]);
        check(warm(), &of, &[(0, 0.1), (1, 0.4), (2, 0.2), (3, 0.3)]);
        check(Sampling { top_k: 2, ..warm() }, &of, &[(1, 4.0 / 7.0), (3, 3.0 / 7.0)]);
        check(Sampling { top_k: 9, ..warm() }, &of, &[(0, 0.1), (1, 0.4), (2, 0.2), (3, 0.3)]);
        check(Sampling { top_p: 0.65, ..warm() }, &of, &[(1, 4.0 / 7.0), (3, 3.0 / 7.0)]);
        check(Sampling { top_p: 0.0, ..warm() }, &of, &[(1, 1.0)]);
        check(Sampling { min_p: 0.6, ..warm() }, &of, &[(1, 4.0 / 7.0), (3, 3.0 / 7.0)]);
        check(Sampling { min_p: 1.0, ..warm() }, &of, &[(1, 1.0)]);
        // Squares of the probabilities.
        let total = 0.01 + 0.16 + 0.04 + 0.09;
        let half = Sampling { temperature: 0.5, ..warm() };
        check(half, &of, &[(0, 0.01 / total), (1, 0.16 / total), (2, 0.04 / total), (3, 0.09 / total)]);
        // Top-p is a share of the tokens that top-k keeps.
        check(Sampling { top_k: 2, top_p: 0.5, ..warm() }, &of, &[(1, 1.0)]);
    }

    #[test]
    fn frequencies_are_the_probabilities() {
        const DRAWS: usize = 20_000;
        let probabilities = [0.05, 0.5, 0.15, 0.3];
        let of = logits(&probabilities);
        for sampling in [Sampling { seed: 1, ..warm() }, Sampling { seed: 2, top_p: 0.999_999, ..warm() }] {
            let mut counts = [0usize; 4];
            for position in 0..DRAWS {
                counts[sampling.sample(&of, &[], position).expect("a token").id as usize] += 1;
            }
            let expected = probabilities.map(|p| p * DRAWS as f64);
            let chi_square: f64 = counts.iter().zip(expected).map(|(&n, e)| (n as f64 - e).powi(2) / e).sum();
            // Three degrees of freedom: exceeded once in 100 000 seeds.
            assert!(chi_square < 26.0, "{counts:?}");
        }
    }

    #[test]
    fn draws_depend_on_seed_and_position_alone() {
        let of = logits(&[0.25; 4]);
        let draw = |seed, position| Sampling { seed, ..warm() }.sample(&of, &[], position).expect("a token").id;
        let sequence = |seed| (0..64).map(|position| draw(seed, position)).collect::<Vec<_>>();
        assert_eq!(sequence(5), sequence(5));
        assert_ne!(sequence(5), sequence(6));
        assert_eq!(draw(5, 63), sequence(5)[63]);
    }

    #[test]
    fn argmax_takes_the_lowest_id_of_a_tie() {
        let greedy = Sampling::default();
        assert_eq!(greedy.sample(&[1.0, 3.0, 3.0, 2.0], &[], 0).expect("a token").id, 1);
        assert_eq!(greedy.sample(&[-0.0, 0.0], &[], 0).expect("a token").id, 0);
        assert_eq!(greedy.sample(&[f32::NEG_INFINITY, -1e30], &[], 0).expect("a token").id, 1);
        // Two tokens share the second rank: the lower id stays.
        check(Sampling { top_k: 2, ..warm() }, &[0.0, 1.0, 0.0], &[(0, 0.268_941_4), (1, 0.731_058_6)]);
    }

    #[test]
    fn logits_that_are_no_numbers_are_refused() {
        for sampling in [Sampling::default(), warm()] {
            for bad in [f32::NAN, f32::INFINITY] {
                let refused = sampling.sample(&[0.0, bad], &[], 0);
                assert!(matches!(refused, Err(Error::NonFiniteLogit { id: 1, .. })), "{refused:?}");
            }
            assert!(matches!(sampling.sample(&[f32::NEG_INFINITY; 3], &[], 0), Err(Error::NoCandidate)));
            assert!(matches!(sampling.sample(&[], &[], 0), Err(Error::NoCandidate)));
        }
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        let bad = [
            ("temperature", Sampling { temperature: -1.0, ..warm() }),
            ("temperature", Sampling { temperature: f32::NAN, ..warm() }),
            ("top-p", Sampling { top_p: 1.5, ..warm() }),
            ("min-p", Sampling { min_p: f32::NAN, ..warm() }),
            ("repetition penalty", Sampling { repetition_penalty: 0.0, ..warm() }),
        ];
        for (expected, sampling) in bad {
            let refused = sampling.check();
            assert!(matches!(refused, Err(Error::SamplingParameter { name, .. }) if name == expected), "{refused:?}");
        }
        // The smallest temperature is argmax, too.
        check(Sampling { temperature: f32::MIN_POSITIVE, ..warm() }, &[0.0, 1.0], &[(0, 0.0), (1, 1.0)]);
    }

    #[test]
    fn earlier_tokens_are_penalized_once() {
        let sampling = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        let next = |logits: &[f32], earlier: &[u32]| sampling.sample(logits, earlier, 0).expect("a token").id;
        assert_eq!(next(&[3.0, 2.0], &[]), 0);
        assert_eq!(next(&[3.0, 2.0], &[0]), 1);
        assert_eq!(next(&[3.0, 1.0], &[0, 0]), 0);
        assert_eq!(next(&[-1.0, -1.5], &[0]), 1);
        // An id outside of the vocabulary changes nothing.
        assert_eq!(next(&[3.0, 2.0], &[77]), 0);
        let huge = Sampling { repetition_penalty: 1e-38, ..Sampling::default() };
        assert_eq!(huge.sample(&[3e38, 2.0], &[0], 0).expect("a token").id, 0);
    }

    #[test]
    fn log_probabilities_are_of_the_models_own_logits() {
        let of = logits(&[0.1, 0.6, 0.3]);
        let sampling = Sampling { log_probabilities: Some(2), temperature: 0.1, top_k: 1, ..Sampling::default() };
        let sampled = sampling.sample(&of, &[], 0).expect("a token");
        assert_eq!(sampled.id, 1);
        assert!((sampled.log_probability.expect("asked for") - 0.6f32.ln()).abs() < 1e-6);
        let ids: Vec<u32> = sampled.alternatives.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [1, 2]);
        assert!((sampled.alternatives[1].1 - 0.3f32.ln()).abs() < 1e-6);
    }
}
