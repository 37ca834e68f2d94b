//! Oracle of routing in f64, and the exact lists.
//!
//! Logits are exact, so comparisons of logits have one right
//! result.
//! Scores are rounded. A choice by score is right unless a
//! passed-over expert is better by more than both errors.

use qgemm_hal::{ExpertGroups, Scoring};

use super::case::RoutingCase;

/// Relative error of a score, without the rounding of its
/// exponent.
const SCORE: f64 = 5e-7;
/// Relative error of rounding to f32.
const ROUNDING: f64 = 1.0 / (1 << 24) as f64;
/// Scores below this (about the smallest normal number) may
/// become 0.
const SMALLEST: f64 = 2e-38;

/// A number with its error on the device.
#[derive(Clone, Copy, Debug)]
struct Near {
    value: f64,
    error: f64,
}

impl Near {
    /// Whether it exceeds `other`, for any rounding.
    fn exceeds(self, other: Self) -> bool {
        self.value - self.error > other.value + other.error
    }
}

/// Whether a token may use a group.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Membership {
    In,
    Maybe,
    Out,
}

/// The experts of one token.
pub(super) struct Token<'a> {
    case: &'a RoutingCase,
    logits: &'a [f32],
    bias: &'a [f32],
    scores: Vec<Near>,
    /// Keys of experts that may be chosen.
    keys: Vec<Option<Near>>,
}

impl<'a> Token<'a> {
    pub fn new(case: &'a RoutingCase, logits: &'a [f32], bias: &'a [f32]) -> Self {
        let scores = scores(case.scoring, logits);
        let compares_logits = !case.bias && case.groups.is_none();
        let key = |e: usize| {
            let (logit, bias) = (f64::from(logits[e]), if case.bias { f64::from(bias[e]) } else { 0.0 });
            if compares_logits {
                return (!logit.is_nan()).then_some(Near { value: logit, error: 0.0 });
            }
            let Near { value, error } = scores[e];
            let key = value + bias;
            (!key.is_nan() && !logit.is_nan()).then_some(Near { value: key, error: error + key.abs() * ROUNDING })
        };
        let keys = (0..logits.len()).map(key).collect();
        Self { case, logits, bias, scores, keys }
    }

    /// Whether `a` precedes `b`, for any rounding. Both may be
    /// chosen.
    fn is_better(&self, a: usize, b: usize) -> bool {
        let (Some(key_a), Some(key_b)) = (self.keys[a], self.keys[b]) else { return false };
        // Equal numbers give equal results.
        key_a.exceeds(key_b) || (self.are_equal(a, b) && a < b)
    }

    fn are_equal(&self, a: usize, b: usize) -> bool {
        self.logits[a] == self.logits[b] && (!self.case.bias || self.bias[a] == self.bias[b])
    }

    /// Whether the experts of each group may be chosen.
    fn groups(&self, ExpertGroups { groups, chosen }: ExpertGroups) -> Vec<Membership> {
        let size = self.keys.len() / groups;
        let score = |group: usize| {
            let mut keys: Vec<Near> = self.keys[group * size..][..size].iter().flatten().copied().collect();
            keys.sort_by(|a, b| b.value.total_cmp(&a.value));
            let error = 2.0 * keys.iter().map(|key| key.error).fold(0.0, f64::max);
            let value = match keys[..] {
                [] => return None,
                [only] => only.value,
                [first, second, ..] => first.value + second.value,
            };
            (!value.is_nan()).then_some(Near { value, error: error + value.abs() * ROUNDING })
        };
        let scores: Vec<Option<Near>> = (0..groups).map(score).collect();
        // Equal numbers in the same positions have equal sums.
        let same = |a: usize, b: usize| {
            let bits = |group: usize| (group * size..(group + 1) * size).map(|e| self.logits[e].to_bits());
            bits(a).eq(bits(b))
                && (!self.case.bias || (0..size).all(|i| self.bias[a * size + i] == self.bias[b * size + i]))
        };
        let is_better = |a: usize, b: usize| match (scores[a], scores[b]) {
            (Some(of_a), Some(of_b)) => of_a.exceeds(of_b) || (a < b && same(a, b)),
            (Some(_), None) => true,
            (None, _) => false,
        };
        let membership = |group: usize| {
            let others = || (0..groups).filter(|&other| other != group);
            if scores[group].is_none() || others().filter(|&other| is_better(other, group)).count() >= chosen {
                Membership::Out
            } else if others().filter(|&other| !is_better(group, other)).count() < chosen {
                Membership::In
            } else {
                Membership::Maybe
            }
        };
        (0..groups).map(membership).collect()
    }

    /// Checks the ids that a device chose, and their order.
    pub fn check_ids(&self, ids: &[i32]) -> Result<(), String> {
        let experts = self.keys.len();
        let found = ids.iter().position(|&id| id < 0).unwrap_or(ids.len());
        let (chosen, rest) = ids.split_at(found);
        if let Some(id) = rest.iter().find(|&&id| id != -1) {
            return Err(format!("expected -1 behind the last expert, got {id}: {ids:?}"));
        }
        let mut experts_chosen = Vec::new();
        for &id in chosen {
            let e = usize::try_from(id).ok().filter(|&e| e < experts).ok_or(format!("chose {id} of {experts}"))?;
            if self.keys[e].is_none() {
                return Err(format!("chose {e}, whose key is NaN"));
            }
            if experts_chosen.contains(&e) {
                return Err(format!("chose {e} twice: {ids:?}"));
            }
            experts_chosen.push(e);
        }
        let memberships = match self.case.groups {
            Some(groups) => self.groups(groups),
            None => vec![Membership::In],
        };
        let of_group = |e: usize| e / (experts / memberships.len());
        let count = |is_counted: fn(Membership) -> bool| {
            let counted = |e: &usize| self.keys[*e].is_some() && is_counted(memberships[of_group(*e)]);
            (0..experts).filter(counted).count().min(ids.len())
        };
        let (least, most) = (count(|m| m == Membership::In), count(|m| m != Membership::Out));
        if !(least..=most).contains(&found) {
            return Err(format!("expected {least} to {most} experts, got {found}"));
        }
        if let Some(e) = experts_chosen.iter().find(|&&e| memberships[of_group(e)] == Membership::Out) {
            return Err(format!("chose {e} of group {}, which is none of the best", of_group(*e)));
        }
        if let Some(pair) = experts_chosen.windows(2).find(|pair| self.is_better(pair[1], pair[0])) {
            return Err(format!("{} comes before {}, which is better", pair[0], pair[1]));
        }
        let passed_over =
            (0..experts).filter(|e| memberships[of_group(*e)] == Membership::In && !experts_chosen.contains(e));
        for e in passed_over {
            if let Some(worse) = experts_chosen.iter().find(|&&chosen| self.is_better(e, chosen)) {
                return Err(format!("chose {worse}, and {e} is better"));
            }
        }
        Ok(())
    }

    /// Weights of the chosen ids, and their errors.
    pub fn weights(&self, ids: &[i32]) -> Vec<(f64, f64)> {
        let scale = f64::from(self.case.scale);
        let score = |&id: &i32| usize::try_from(id).map_or(Near { value: 0.0, error: 0.0 }, |e| self.scores[e]);
        let sum: f64 = ids.iter().map(|id| score(id).value).sum();
        let sum_error: f64 = ids.iter().map(|id| score(id).error).sum();
        let divisor = if self.case.renormalize { sum.max(f64::from(f32::MIN_POSITIVE)) } else { 1.0 };
        let weight = |id: &i32| {
            let Near { value, error } = score(id);
            let of_sum = if self.case.renormalize { value / divisor * sum_error / divisor } else { 0.0 };
            let (weight, error) = (value / divisor * scale, (error / divisor + of_sum) * scale.abs());
            (weight, error + weight.abs() * 3.0 * ROUNDING + if *id < 0 { 0.0 } else { SMALLEST })
        };
        ids.iter().map(weight).collect()
    }
}

/// Scores of logits; 0 for NaN.
fn scores(scoring: Scoring, logits: &[f32]) -> Vec<Near> {
    let near = |value: f64, exponent: f64| {
        let rounded = if exponent.is_finite() { exponent.abs() * ROUNDING } else { 0.0 };
        let error = if value.is_finite() { value * (SCORE + rounded) + SMALLEST } else { 0.0 };
        Near { value, error }
    };
    let numbers = || logits.iter().copied().filter(|logit| !logit.is_nan());
    let largest = numbers().fold(f32::NEG_INFINITY, f32::max);
    let below = |logit: f32| if logit == largest { 0.0 } else { f64::from(logit) - f64::from(largest) };
    let sum: f64 = numbers().map(|logit| below(logit).exp()).sum();
    // Large exponentials overflow, where ln(1 + exp(x)) is x.
    let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
    let score = |&logit: &f32| match scoring {
        _ if logit.is_nan() => Near { value: 0.0, error: 0.0 },
        Scoring::Sigmoid => near(1.0 / (1.0 + (-f64::from(logit)).exp()), 0.0),
        // The exponent of small scores is half the logit.
        Scoring::SqrtSoftplus => near(softplus(logit.into()).sqrt(), f64::from(logit).min(0.0) / 2.0),
        _ => near(below(logit).exp() / sum, below(logit)),
    };
    logits.iter().map(score).collect()
}

/// Correct offsets, counts and rows.
pub(super) struct ExpectedLists {
    pub offsets: Vec<u32>,
    pub counts: Vec<u32>,
    pub rows: Vec<u32>,
}

/// Lists of these ids.
pub(super) fn lists(ids: &[i32], experts: usize) -> ExpectedLists {
    let mut of_expert: Vec<Vec<u32>> = vec![Vec::new(); experts];
    for (slot, &id) in ids.iter().enumerate() {
        if let Some(list) = usize::try_from(id).ok().and_then(|id| of_expert.get_mut(id)) {
            list.push(slot as u32);
        }
    }
    let counts: Vec<u32> = of_expert.iter().map(|list| list.len() as u32).collect();
    let mut offsets = vec![0];
    for count in &counts {
        offsets.push(offsets[offsets.len() - 1] + count);
    }
    let mut rows = of_expert.concat();
    rows.resize(ids.len(), u32::MAX);
    ExpectedLists { offsets, counts, rows }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(top_k: usize) -> RoutingCase {
        RoutingCase::new(1, 6, top_k)
    }

    #[test]
    fn the_order_of_logits_is_the_only_right_one() {
        let logits = [1.0, 3.0, f32::NAN, 3.0, -1.0, 2.0];
        let case = case(4);
        let token = Token::new(&case, &logits, &[]);
        assert_eq!(token.check_ids(&[1, 3, 5, 0]), Ok(()));
        let wrong = [[3, 1, 5, 0], [1, 3, 0, 5], [1, 3, 5, 4], [1, 3, 5, 2], [1, 3, 5, -1], [1, 3, 5, 6], [1, 1, 3, 5]];
        for ids in wrong {
            assert!(token.check_ids(&ids).is_err(), "{ids:?}");
        }
        let few = Token::new(&case, &[f32::NAN, 1.0, f32::NAN, f32::NAN, f32::NAN, 2.0], &[]);
        assert!(few.check_ids(&[5, 1, -1, -1]).is_ok() && few.check_ids(&[5, -1, 1, -1]).is_err());
        assert!(few.check_ids(&[5, -1, -1, -1]).is_err());
    }

    #[test]
    fn scores_that_rounding_may_swap_may_be_swapped_and_no_others() {
        let case = RoutingCase { scoring: Scoring::Sigmoid, bias: true, ..case(2) };
        let logits = [0.0; 6];
        let bias = [0.1, 0.1 + 1e-8, 0.1 + 1e-5, 0.0, 0.0, -1.0];
        let token = Token::new(&case, &logits, &bias);
        assert!(token.check_ids(&[2, 0]).is_ok() && token.check_ids(&[2, 1]).is_ok());
        assert!(token.check_ids(&[0, 2]).is_err() && token.check_ids(&[1, 0]).is_err());
        // Equal numbers stay equal after rounding.
        let tied = Token::new(&case, &logits, &[0.0, 0.5, 0.5, 0.5, 0.0, 0.0]);
        assert!(
            tied.check_ids(&[1, 2]).is_ok() && tied.check_ids(&[1, 3]).is_err() && tied.check_ids(&[2, 1]).is_err()
        );
    }

    #[test]
    fn groups_are_the_best_by_their_two_best() {
        let groups = Some(ExpertGroups { groups: 3, chosen: 1 });
        let case = RoutingCase { scoring: Scoring::Sigmoid, groups, ..case(2) };
        let logits = [5.0, -5.0, 1.0, 1.0, 0.0, 2.0];
        let token = Token::new(&case, &logits, &[]);
        assert!(token.check_ids(&[2, 3]).is_ok() && token.check_ids(&[0, 2]).is_err());
        let two = RoutingCase { groups: Some(ExpertGroups { groups: 3, chosen: 2 }), ..case };
        assert!(Token::new(&two, &logits, &[]).check_ids(&[5, 2]).is_ok());
        // All equal: the first experts win.
        assert!(Token::new(&case, &[1.0; 6], &[]).check_ids(&[0, 1]).is_ok());
        assert!(Token::new(&case, &[1.0; 6], &[]).check_ids(&[2, 3]).is_err());
    }

    #[test]
    fn weights_are_shares_of_what_is_a_number() {
        let logits = [0.0, f32::NAN, 3.0f32.ln(), f32::NEG_INFINITY, f32::NAN, f32::NAN];
        let values = |weights: Vec<(f64, f64)>| weights.into_iter().map(|(value, _)| value).collect::<Vec<_>>();
        let token = |case: &RoutingCase| values(Token::new(case, &logits, &[]).weights(&[2, 0, 3, -1]));
        let near = |got: Vec<f64>, expected: [f64; 4]| {
            assert!(got.iter().zip(expected).all(|(got, expected)| (got - expected).abs() < 1e-7), "{got:?}");
        };
        near(token(&case(4)), [0.75, 0.25, 0.0, 0.0]);
        near(token(&RoutingCase { scoring: Scoring::Sigmoid, ..case(4) }), [0.75, 0.5, 0.0, 0.0]);
        let scaled = RoutingCase { scoring: Scoring::Sigmoid, renormalize: true, scale: 2.5, ..case(4) };
        near(token(&scaled), [1.5, 1.0, 0.0, 0.0]);
        let roots = token(&RoutingCase { scoring: Scoring::SqrtSoftplus, ..case(4) });
        near(roots, [4f64.ln().sqrt(), 2f64.ln().sqrt(), 0.0, 0.0]);
        let infinite = [f32::INFINITY, 1.0, f32::INFINITY, 0.0, 0.0, 0.0];
        near(values(Token::new(&case(4), &infinite, &[]).weights(&[0, 2, 1, 3])), [0.5, 0.5, 0.0, 0.0]);
    }

    #[test]
    fn lists_are_stable_and_leave_bad_ids_out() {
        let ExpectedLists { offsets, counts, rows } = lists(&[2, 0, -1, 2, 0, 3, i32::MIN], 3);
        assert_eq!((offsets, counts), (vec![0, 2, 2, 4], vec![2, 0, 2]));
        assert_eq!(rows, [1, 4, 0, 3, u32::MAX, u32::MAX, u32::MAX]);
    }
}
