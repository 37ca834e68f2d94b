//! Oracle of `sampling`: the token by sorting, in the integers of
//! the definition, and the tokens that f64 allows.

use std::cmp::Reverse;

use qgemm_api::{SamplingFault, SamplingParameters};
use qgemm_hal::op::sampling::arithmetic::{
    EXCLUDED, NON_FINITE, fraction_of, kept_weight, least_weight, log_sum, logit_of, order, penalized, random_word,
    weight,
};

/// Random words are multiples of 2⁻³².
const WORDS: f64 = 4_294_967_296.0;

/// A row of logits with what samples it.
pub struct Row<'a> {
    pub logits: &'a [f32],
    pub parameters: SamplingParameters,
    /// Earlier tokens, if the sampling has a penalty.
    pub earlier: Option<&'a [u32]>,
}

/// Log-probabilities of a row.
#[derive(Clone, Debug, PartialEq)]
pub struct LogProbabilities {
    pub own: f32,
    pub alternatives: Vec<(u32, f32)>,
}

impl Row<'_> {
    /// Orders of the penalized logits.
    fn orders(&self) -> Vec<u32> {
        let is_earlier = |id: usize| self.earlier.is_some_and(|earlier| earlier.contains(&(id as u32)));
        let penalty = self.parameters.repetition_penalty;
        let penalized = |(id, &logit): (usize, &f32)| if is_earlier(id) { penalized(logit, penalty) } else { logit };
        self.logits.iter().enumerate().map(penalized).map(order).collect()
    }

    /// Tokens that are not excluded, most likely first.
    fn ranked(orders: &[u32]) -> Vec<(u32, usize)> {
        let mut ranked: Vec<(u32, usize)> = orders.iter().copied().zip(0..).filter(|(o, _)| *o != EXCLUDED).collect();
        ranked.sort_by_key(|&(order, id)| (Reverse(order), id));
        ranked
    }

    /// The token, or why there is none.
    ///
    /// # Errors
    /// The fault of the row.
    pub fn token(&self) -> Result<u32, SamplingFault> {
        let parameters = &self.parameters;
        if let Some(refused) = parameters.refused() {
            let (name, expected) = SamplingParameters::NAMES[refused.index];
            return Err(SamplingFault::Parameter { name, got: refused.got, expected });
        }
        let orders = self.orders();
        if let Some(id) = orders.iter().position(|&order| order == NON_FINITE) {
            return Err(SamplingFault::NonFiniteLogit { id: id as u32, got: self.logits[id] });
        }
        let mut kept = Self::ranked(&orders);
        let Some(&(best, best_id)) = kept.first() else { return Err(SamplingFault::NoCandidate) };
        if parameters.is_argmax() {
            return Ok(best_id as u32);
        }
        if parameters.top_k > 0 {
            kept.truncate(parameters.top_k as usize);
        }
        let inverse = 1.0 / parameters.temperature;
        let weight = |order: u32| u64::from(weight(logit_of(order) - logit_of(best), inverse));
        let total = kept.iter().map(|&(order, _)| weight(order)).sum();
        if parameters.top_p < 1.0 {
            let (wanted, mut sum) = (kept_weight(parameters.top_p, total), 0);
            let reached = kept.iter().position(|&(order, _)| {
                sum += weight(order);
                sum >= wanted
            });
            kept.truncate(reached.map_or(kept.len(), |last| last + 1));
        }
        kept.retain(|&(order, _)| weight(order) >= u64::from(least_weight(parameters.min_p)));
        kept.sort_by_key(|&(_, id)| id);
        let total = kept.iter().map(|&(order, _)| weight(order)).sum();
        let (target, mut sum) = (fraction_of(total, random_word(parameters.seed, parameters.position)), 0);
        let drawn = kept.iter().find(|&&(order, _)| {
            sum += weight(order);
            sum > target
        });
        drawn.map(|&(_, id)| id as u32).ok_or(SamplingFault::NoCandidate)
    }

    /// Whether f64 allows the token when the sums of probabilities may
    /// err by `margin`, and penalized logits by that part of them.
    pub fn allows(&self, id: u32, margin: f64) -> bool {
        let parameters = &self.parameters;
        let orders = self.orders();
        let mut kept = Self::ranked(&orders);
        let Some(&(best, _)) = kept.first() else { return false };
        let below = |order: u32| f64::from(logit_of(order)) - f64::from(logit_of(best));
        if parameters.is_argmax() {
            let error = margin * f64::from(logit_of(best)).abs().max(1.0);
            return orders.get(id as usize).is_some_and(|&order| order != EXCLUDED && below(order) >= -error);
        }
        if parameters.top_k > 0 {
            kept.truncate(parameters.top_k as usize);
        }
        let weight = |order: u32| (below(order) / f64::from(parameters.temperature)).exp();
        let total: f64 = kept.iter().map(|&(order, _)| weight(order)).sum();
        let mut sum = 0.0;
        let sums: Vec<f64> = kept
            .iter()
            .map(|&(order, _)| {
                sum += weight(order) / total;
                sum
            })
            .collect();
        // Tokens that are kept at least, and at most.
        let reaching = |share: f64| sums.iter().position(|&sum| sum >= share).map_or(kept.len(), |last| last + 1);
        let top_p = f64::from(parameters.top_p);
        let counts =
            if top_p < 1.0 { reaching(top_p - margin)..=reaching(top_p + margin) } else { kept.len()..=kept.len() };
        let min_p = f64::from(parameters.min_p);
        let uniform = f64::from(random_word(parameters.seed, parameters.position)) / WORDS;
        let allows = |kept: &[(u32, usize)], least: f64| {
            let mut kept: Vec<_> = kept.iter().filter(|&&(order, _)| weight(order) >= least).collect();
            kept.sort_by_key(|&&(_, id)| id);
            let total: f64 = kept.iter().map(|&&(order, _)| weight(order)).sum();
            let before: f64 = kept.iter().take_while(|t| t.1 < id as usize).map(|t| weight(t.0) / total).sum();
            let own = kept.iter().find(|t| t.1 == id as usize).map(|t| weight(t.0) / total);
            own.is_some_and(|own| uniform >= before - margin && uniform <= before + own + margin)
        };
        counts
            .into_iter()
            .any(|count| [min_p - margin, min_p + margin].into_iter().any(|least| allows(&kept[..count], least)))
    }

    /// Log-probabilities of `id` and of `count` alternatives.
    pub fn log_probabilities(&self, id: Option<u32>, count: usize) -> LogProbabilities {
        let none = (u32::MAX, f32::NEG_INFINITY);
        let Some(id) = id else { return LogProbabilities { own: none.1, alternatives: vec![none; count] } };
        let orders: Vec<u32> = self.logits.iter().map(|&logit| order(logit)).collect();
        let ranked = Self::ranked(&orders);
        let best = ranked.first().map_or(0.0, |&(order, _)| logit_of(order));
        let sum = ranked.iter().map(|&(order, _)| u64::from(weight(logit_of(order) - best, 1.0))).sum();
        let log_probability = |order: u32| logit_of(order) - best - log_sum(sum);
        let mut alternatives: Vec<(u32, f32)> =
            ranked.iter().take(count).map(|&(order, id)| (id as u32, log_probability(order))).collect();
        alternatives.resize(count, none);
        LogProbabilities { own: log_probability(orders[id as usize]), alternatives }
    }

    /// Log-probability of a token in f64.
    pub fn exact_log_probability(&self, id: u32) -> f64 {
        let best = self.logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let below = |logit: f32| f64::from(logit) - f64::from(best);
        let sum: f64 = self.logits.iter().map(|&logit| below(logit).exp()).sum();
        below(self.logits[id as usize]) - sum.ln()
    }
}
