//! Router top-k of a token, and the weights.

use qgemm_hal::op::routing::{ELSEWHERE, MOST_TOP_K};
use qgemm_hal::{CheckedRouting, ExpertGroups, Scoring};

use crate::arena;
use crate::operand::Input;
use crate::simd::Simd;

/// Partial sums that are added in parallel.
const LANES: usize = 16;

/// Top-k parameters and inputs.
pub(super) struct TopK<'a> {
    op: &'a CheckedRouting,
    logits: Input<'a>,
    bias: Option<&'a [f32]>,
    simd: &'static Simd,
}

impl<'a> TopK<'a> {
    pub fn new(op: &'a CheckedRouting, logits: Input<'a>, bias: Option<&'a [f32]>, simd: &'static Simd) -> Self {
        Self { op, logits, bias, simd }
    }

    /// Writes ids and weights of the tokens from
    /// `first` on, as many as fit.
    pub fn tokens(&self, first: usize, ids: &mut [i32], weights: &mut [f32]) {
        let (experts, top_k, chosen) = (self.op.logit_experts(), self.op.top_k, self.op.chosen());
        arena::with_tile(4 * experts, |memory| {
            let (logits, rest) = memory.split_at_mut(experts);
            let (scores, rest) = rest.split_at_mut(experts);
            // Keys and group sums are bits.
            let (keys, sums) = bytemuck::cast_slice_mut(rest).split_at_mut(experts);
            let of_tokens = ids.chunks_exact_mut(top_k).zip(weights.chunks_exact_mut(top_k));
            for (token, (ids, weights)) in (first..).zip(of_tokens) {
                self.logits.part(self.simd, token, 0, logits);
                self.score(logits, scores);
                self.compare(logits, scores, keys);
                if let Some(groups) = self.op.groups {
                    keep_best_groups(groups, keys, sums);
                }
                // The last slot may belong to the shared expert.
                let ((ids, last_id), (weights, last_weight)) = (ids.split_at_mut(chosen), weights.split_at_mut(chosen));
                self.choose(scores, keys, ids, weights);
                last_id.fill(experts as i32);
                last_weight.fill(1.0);
            }
        });
        self.keep_local(ids, weights);
    }

    /// Counts ids from the first local expert on, and marks
    /// those of other experts.
    fn keep_local(&self, ids: &mut [i32], weights: &mut [f32]) {
        let local = self.op.local.start as i32..self.op.local.end as i32;
        for (id, weight) in ids.iter_mut().zip(weights).filter(|(id, _)| **id >= 0) {
            match local.contains(id) {
                true => *id -= local.start,
                false => (*id, *weight) = (ELSEWHERE, 0.0),
            }
        }
    }

    /// Scores of the logits; 0 for NaN.
    fn score(&self, logits: &[f32], scores: &mut [f32]) {
        let of_each: Option<fn(f32) -> f32> = match self.op.scoring {
            Scoring::Sigmoid => Some(sigmoid),
            Scoring::SqrtSoftplus => Some(sqrt_softplus),
            _ => None,
        };
        if let Some(of_each) = of_each {
            for (score, &logit) in scores.iter_mut().zip(logits) {
                *score = if logit.is_nan() { 0.0 } else { of_each(logit) };
            }
            return;
        }
        // `max` ignores NaN.
        let largest = logits.iter().fold(f32::NEG_INFINITY, |largest, &logit| largest.max(logit));
        for (score, &logit) in scores.iter_mut().zip(logits) {
            // ∞ − ∞ would be NaN.
            let below = if logit == largest { 0.0 } else { logit - largest };
            *score = if logit.is_nan() { 0.0 } else { exp_nonpositive(below) };
        }
        let mut sums = [0.0; LANES];
        for scores in scores.chunks(LANES) {
            sums.iter_mut().zip(scores).for_each(|(sum, score)| *sum += score);
        }
        let sum: f32 = sums.iter().sum();
        if sum > 0.0 {
            scores.iter_mut().for_each(|score| *score /= sum);
        }
    }

    /// Keys, as ordered bits.
    fn compare(&self, logits: &[f32], scores: &[f32], keys: &mut [u32]) {
        if self.op.compares_logits() {
            keys.iter_mut().zip(logits).for_each(|(key, &logit)| *key = ordered(logit));
            return;
        }
        for (e, key) in keys.iter_mut().enumerate() {
            let bias = self.bias.map_or(0.0, |bias| bias[e]);
            *key = if logits[e].is_nan() { NO_KEY } else { ordered(scores[e] + bias) };
        }
    }

    /// The experts with the largest keys, and their weights.
    fn choose(&self, scores: &[f32], keys: &[u32], ids: &mut [i32], weights: &mut [f32]) {
        let mut best = [(NO_KEY, 0); MOST_TOP_K];
        let best = &mut best[..ids.len()];
        let found = largest(keys, best);
        let mut sum = 0.0;
        for (i, (id, weight)) in ids.iter_mut().zip(weights.iter_mut()).enumerate() {
            (*id, *weight) = if i < found { (best[i].1 as i32, scores[best[i].1]) } else { (-1, 0.0) };
            sum += *weight;
        }
        let divisor = if self.op.renormalize { sum.max(f32::MIN_POSITIVE) } else { 1.0 };
        weights.iter_mut().for_each(|weight| *weight = *weight / divisor * self.op.scale);
    }
}

/// Below every eligible key.
const NO_KEY: u32 = 0;

/// Bits in the order of the values, from 1 on. Both
/// zeros are equal; NaN is [`NO_KEY`].
fn ordered(key: f32) -> u32 {
    let bits = (key + 0.0).to_bits();
    let sign = bits.cast_signed() >> 31;
    if key.is_nan() { NO_KEY } else { bits ^ (sign.cast_unsigned() | 0x8000_0000) }
}

/// The value of [`ordered`] bits.
fn number(ordered: u32) -> f32 {
    f32::from_bits(if ordered >> 31 == 1 { ordered ^ 0x8000_0000 } else { !ordered })
}

/// Finds the largest keys in descending order, as many as `best`
/// holds. Among equal keys the first wins. Returns their number.
fn largest(keys: &[u32], best: &mut [(u32, usize)]) -> usize {
    let mut found = 0;
    // Keys must exceed this.
    let mut least = NO_KEY;
    for (e, &key) in keys.iter().enumerate() {
        if key <= least {
            continue;
        }
        let place = best[..found].iter().position(|&(known, _)| key > known).unwrap_or(found);
        found = (found + 1).min(best.len());
        best.copy_within(place..found - 1, place + 1);
        best[place] = (key, e);
        if found == best.len() {
            least = best[found - 1].0;
        }
    }
    found
}

/// Removes the keys of all but the best groups. `sums` has
/// one number for each group.
fn keep_best_groups(ExpertGroups { groups, chosen }: ExpertGroups, keys: &mut [u32], sums: &mut [u32]) {
    let size = keys.len() / groups;
    let sums = &mut sums[..groups];
    for (sum, keys) in sums.iter_mut().zip(keys.chunks_exact(size)) {
        let mut best = [(NO_KEY, 0); 2];
        *sum = match largest(keys, &mut best) {
            0 | 1 => best[0].0,
            _ => ordered(number(best[0].0) + number(best[1].0)),
        };
    }
    for (group, keys) in keys.chunks_exact_mut(size).enumerate() {
        let own = sums[group];
        let is_better = |(other, &sum): (usize, &u32)| sum > own || sum == own && other < group;
        if own == NO_KEY || sums.iter().enumerate().filter(|&other| is_better(other)).count() >= chosen {
            keys.fill(NO_KEY);
        }
    }
}

/// exp(x) for x ≤ 0, within 1e-7 of the exact value:
/// the polynomial of the CUDA kernels, in a vectorizable form. It
/// is 0 below −87, where results would be subnormal.
fn exp_nonpositive(x: f32) -> f32 {
    // 1.5 · 2²³. Adding a small number rounds it to an
    // integer, in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let bounded = x.max(-88.0);
    let shifted = bounded * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // x − n · ln(2) in two parts; the
    // first is exact.
    let r = (bounded - n * 0.693_359_4) + n * 2.121_944_4e-4;
    let mut q = 0.001_381_446_7;
    for coefficient in [0.008_368_781, 0.041_668_393, 0.166_665_2, 0.499_999_94] {
        q = q * r + coefficient;
    }
    let fraction = q * r * r + r + 1.0;
    let power = f32::from_bits(shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23);
    if x > -87.0 { fraction * power } else { 0.0 }
}

/// 1 / (1 + exp(−x)).
fn sigmoid(x: f32) -> f32 {
    let e = exp_nonpositive(-x.abs());
    (if x < 0.0 { e } else { 1.0 }) / (1.0 + e)
}

/// √(ln(1 + exp(x))). ln(1 + e) is 2 · atanh(s) with
/// s = e / (2 + e) ≤ 1/3. Below −16 it is e up to rounding.
fn sqrt_softplus(x: f32) -> f32 {
    if x < -16.0 {
        return exp_nonpositive(0.5 * x);
    }
    let e = exp_nonpositive(-x.abs());
    let s = e / (2.0 + e);
    // 1 / 13, 1 / 11, …, 1.
    let series = (0..7).rev().map(|i| 1.0 / (2 * i + 1) as f32).fold(1.0 / 15.0, |q, next| q * s * s + next);
    (x.max(0.0) + 2.0 * s * series).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_in_the_order_of_the_numbers() {
        let numbers = [f32::NEG_INFINITY, f32::MIN, -1.0, -1e-40, 0.0, 1e-40, 1.0, f32::MAX, f32::INFINITY];
        assert!(numbers.windows(2).all(|pair| ordered(pair[0]) < ordered(pair[1])));
        assert!(numbers.iter().all(|&v| number(ordered(v)) == v && ordered(v) > NO_KEY));
        assert_eq!(ordered(-0.0), ordered(0.0));
        assert_eq!((ordered(f32::NAN), ordered(-f32::NAN)), (NO_KEY, NO_KEY));
    }

    #[test]
    fn the_largest_come_in_order_and_ties_go_to_the_first() {
        let keys = [3, 0, 7, 7, 1, 9, 7, 3];
        for count in 1..=8 {
            let mut best = [(NO_KEY, 0); 8];
            let found = largest(&keys, &mut best[..count]);
            let expected = [(9, 5), (7, 2), (7, 3), (7, 6), (3, 0), (3, 7), (1, 4)];
            assert_eq!(&best[..found], &expected[..count.min(7)]);
        }
    }

    #[test]
    fn groups_are_compared_by_their_two_best() {
        let key = |v: f32| ordered(v);
        // Group sums 5, 6, 6, and a group with a
        // single key of 5.5.
        let all = [4.0, 1.0, -9.0, 3.0, 3.0, 0.0, 6.0, 0.0, -1.0, 5.5, f32::NAN, f32::NAN].map(key);
        let kept = |chosen| {
            let (mut keys, mut sums) = (all, [0; 12]);
            keep_best_groups(ExpertGroups { groups: 4, chosen }, &mut keys, &mut sums);
            [0, 1, 2, 3].map(|group| keys[3 * group..][..3].iter().any(|&key| key != NO_KEY))
        };
        assert_eq!(kept(1), [false, true, false, false]);
        assert_eq!(kept(2), [false, true, true, false]);
        assert_eq!(kept(3), [false, true, true, true]);
        assert_eq!(kept(4), [true; 4]);
    }

    #[test]
    fn exponentials_and_sigmoids_are_near_the_exact_ones() {
        for i in 0..=90_000 {
            let x = -(i as f32) / 1000.0;
            let (got, exact) = (f64::from(exp_nonpositive(x)), f64::from(x).exp());
            assert!((got - exact).abs() <= 2e-7 * exact + 2e-38, "exp({x}) is {got:e}, expected {exact:e}");
            for x in [x, -x] {
                let (got, exact) = (f64::from(sigmoid(x)), 1.0 / (1.0 + f64::from(-x).exp()));
                assert!((got - exact).abs() <= 4e-7 * exact + 2e-38, "sigmoid({x}) is {got:e}, expected {exact:e}");
            }
        }
        assert_eq!([exp_nonpositive(f32::NEG_INFINITY), exp_nonpositive(0.0), exp_nonpositive(-1e30)], [0.0, 1.0, 0.0]);
        for i in -200_000..200_000 {
            let x = i as f32 / 1000.0;
            let (got, exact) = (f64::from(sqrt_softplus(x)), f64::from(x).exp().ln_1p().sqrt());
            assert!((got - exact).abs() <= 3e-7 * exact + 2e-38, "sqrt_softplus({x}) is {got:e}, expected {exact:e}");
        }
        assert_eq!([f32::NEG_INFINITY, f32::INFINITY].map(sqrt_softplus), [0.0, f32::INFINITY]);
        assert_eq!([sigmoid(f32::NEG_INFINITY), sigmoid(f32::INFINITY), sigmoid(0.0)], [0.0, 1.0, 0.5]);
    }
}
