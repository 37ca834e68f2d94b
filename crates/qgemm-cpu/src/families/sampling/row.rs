//! Sampling of one row: cuts by top-k
//! and top-p, and the draw. Sums are
//! integers, as on every device.

use qgemm_hal::op::sampling::arithmetic::{
    BEST_WEIGHT, EXCLUDED, NON_FINITE, fraction_of, kept_weight, least_weight, log_sum, logit_of, order, penalized,
    random_word, weight,
};
use qgemm_hal::op::sampling::{
    MOST_VOCABULARY, NO_TOKEN, STATUS_FINE, STATUS_NO_CANDIDATE, STATUS_NON_FINITE, STATUS_PARAMETER, STATUS_WORDS,
    SamplingParameters,
};

/// Bits of an order that one histogram resolves, highest first.
const DIGITS: [u32; 3] = [11, 11, 10];
/// Bins of a histogram.
const BINS: usize = 1 << 11;
/// Logits that are compared together.
const LANES: usize = 16;
/// Tokens that are summed at a time when a running sum is searched.
const CHUNK: usize = 4096;

/// A row's token, and its status.
pub type Sampled = (u32, [u32; STATUS_WORDS]);

/// Samples a row. `orders` is memory for its orders.
pub fn sample(parameters: &SamplingParameters, logits: &[f32], earlier: Option<&[u32]>, orders: &mut [u32]) -> Sampled {
    if let Some(refused) = parameters.refused() {
        return (NO_TOKEN, [STATUS_PARAMETER, refused.index as u32, refused.got.to_bits(), 0]);
    }
    let is_argmax = parameters.is_argmax();
    if is_argmax && earlier.is_none() {
        return argmax(logits);
    }
    orders.iter_mut().zip(logits).for_each(|(to, &logit)| *to = order(logit));
    penalize(orders, logits, earlier.unwrap_or_default(), parameters.repetition_penalty);
    let best = orders.iter().copied().max().unwrap_or(EXCLUDED);
    let first_of_best = || orders.iter().position(|&order| order == best).unwrap_or(0);
    match best {
        EXCLUDED | NON_FINITE => without_token(logits, best, first_of_best()),
        _ if is_argmax => (first_of_best() as u32, FINE),
        _ => (Draw::new(parameters, orders, best).token(), FINE),
    }
}

/// Status of a row that has a token.
const FINE: [u32; STATUS_WORDS] = [STATUS_FINE, 0, 0, 0];

/// A row whose best order, first at `at`, is none of a finite logit.
fn without_token(logits: &[f32], best: u32, at: usize) -> Sampled {
    let status = match best {
        EXCLUDED => [STATUS_NO_CANDIDATE, 0, 0, 0],
        _ => [STATUS_NON_FINITE, at as u32, logits[at].to_bits(), 0],
    };
    (NO_TOKEN, status)
}

/// The best token, from two passes that compare vectors.
fn argmax(logits: &[f32]) -> Sampled {
    let (blocks, rest) = logits.as_chunks::<LANES>();
    let mut best = [EXCLUDED; LANES];
    for block in blocks {
        best.iter_mut().zip(block).for_each(|(best, &logit)| *best = order(logit).max(*best));
    }
    let best = best.into_iter().chain(rest.iter().map(|&logit| order(logit))).max().unwrap_or(EXCLUDED);
    let has_best = |block: &[f32; LANES]| block.iter().fold(false, |found, &logit| found | (order(logit) == best));
    let first = blocks.iter().position(has_best).unwrap_or(blocks.len()) * LANES;
    let at = logits[first..].iter().position(|&logit| order(logit) == best).map_or(0, |at| first + at);
    match best {
        EXCLUDED | NON_FINITE => without_token(logits, best, at),
        _ => (at as u32, FINE),
    }
}

/// Replaces the orders of earlier tokens. Ids outside of the
/// vocabulary are ignored, and a repeated id counts once.
fn penalize(orders: &mut [u32], logits: &[f32], earlier: &[u32], penalty: f32) {
    for &id in earlier {
        if let (Some(to), Some(&logit)) = (orders.get_mut(id as usize), logits.get(id as usize)) {
            *to = order(penalized(logit, penalty));
        }
    }
}

/// The last kept token in the order of likelihood: larger
/// logits first, then lower ids.
#[derive(Clone, Copy, Debug)]
struct Cut {
    order: u32,
    id: u32,
}

impl Cut {
    const ALL: Self = Self { order: EXCLUDED + 1, id: u32::MAX };

    fn keeps(self, order: u32, id: u32) -> bool {
        order > self.order || (order == self.order && id <= self.id)
    }
}

/// The draw from a row with a finite best logit.
struct Draw<'a> {
    parameters: &'a SamplingParameters,
    orders: &'a [u32],
    best: f32,
    inverse_temperature: f32,
}

impl<'a> Draw<'a> {
    fn new(parameters: &'a SamplingParameters, orders: &'a [u32], best: u32) -> Self {
        Self { parameters, orders, best: logit_of(best), inverse_temperature: 1.0 / parameters.temperature }
    }

    fn weight(&self, order: u32) -> u64 {
        u64::from(weight(logit_of(order) - self.best, self.inverse_temperature))
    }

    fn token(&self) -> u32 {
        let &SamplingParameters { top_k, top_p, min_p, seed, position, .. } = self.parameters;
        let mut cut = Cut::ALL;
        if top_k > 0 {
            cut = self.cut(cut, |_| 1, |total| u64::from(top_k).min(total));
        }
        if top_p < 1.0 {
            cut = self.cut(cut, |order| self.weight(order), |total| kept_weight(top_p, total));
        }
        let least = u64::from(least_weight(min_p));
        let kept_weight = |order, id| {
            let weight = if cut.keeps(order, id) { self.weight(order) } else { 0 };
            if weight >= least { weight } else { 0 }
        };
        let word = random_word(seed, position);
        self.find(kept_weight, |total| fraction_of(total, word) + 1)
    }

    /// Keeps as few of the most likely tokens as have the sum of
    /// measures that `wanted` says, given the sum of all.
    fn cut(&self, of: Cut, measure: impl Fn(u32) -> u64, wanted: impl Fn(u64) -> u64) -> Cut {
        let measured = |order, id| if of.keeps(order, id) { measure(order) } else { 0 };
        let (mut shift, mut prefix, mut missing) = (u32::BITS, 0, None);
        for digit in DIGITS {
            let mut bins = [0; BINS];
            let above = shift;
            shift -= digit;
            for (id, &order) in (0..).zip(self.orders) {
                // A shift by 32 leaves nothing.
                if u64::from(order) >> above == u64::from(prefix) {
                    bins[(order >> shift & ((1 << digit) - 1)) as usize] += measured(order, id);
                }
            }
            let mut left = missing.unwrap_or_else(|| wanted(bins.iter().sum()));
            let bin = bins.iter().rposition(|&sum| {
                let is_reached = sum >= left;
                left -= if is_reached { 0 } else { sum };
                is_reached
            });
            // All measures together reach what is wanted.
            prefix = prefix << digit | bin.unwrap_or(0) as u32;
            missing = Some(left);
        }
        let of_ties = |order, id| if order == prefix { measured(order, id) } else { 0 };
        Cut { order: prefix, id: self.find(of_ties, |_| missing.unwrap_or(1)) }
    }

    /// The first token in order of ids whose running sum of measures
    /// reaches what `wanted` says, given the sum of all.
    fn find(&self, measure: impl Fn(u32, u32) -> u64, wanted: impl Fn(u64) -> u64) -> u32 {
        let measured = |first: usize| {
            let orders = self.orders.iter().skip(first).take(CHUNK);
            (first as u32..).zip(orders).map(|(id, &order)| (id, measure(order, id)))
        };
        let mut sums = [0; MOST_VOCABULARY.div_ceil(CHUNK)];
        let firsts = (0..self.orders.len()).step_by(CHUNK);
        for (sum, first) in sums.iter_mut().zip(firsts.clone()) {
            *sum = measured(first).map(|(_, measure)| measure).sum();
        }
        let mut left = wanted(sums.iter().sum());
        for (&sum, first) in sums.iter().zip(firsts) {
            if sum >= left {
                let found = measured(first).find(|&(_, measure)| {
                    let is_reached = measure >= left;
                    left -= if is_reached { 0 } else { measure };
                    is_reached
                });
                return found.map_or(NO_TOKEN, |(id, _)| id);
            }
            left -= sum;
        }
        NO_TOKEN
    }
}

/// Log-probability of `id`, and the most likely tokens with theirs.
/// A row without a token has no log-probabilities.
pub fn log_probabilities(logits: &[f32], id: u32, alternative_ids: &mut [u32], alternatives: &mut [f32]) -> f32 {
    alternative_ids.fill(NO_TOKEN);
    alternatives.fill(f32::NEG_INFINITY);
    let Some(&own) = logits.get(id as usize) else { return f32::NEG_INFINITY };
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: u64 = logits.iter().map(|&logit| u64::from(weight(logit - best, 1.0))).sum();
    let normalizer = log_sum(sum.max(u64::from(BEST_WEIGHT)));
    let log_probability = |logit: f32| logit - best - normalizer;
    let mut last = (NON_FINITE, 0);
    for (to_id, to) in alternative_ids.iter_mut().zip(alternatives) {
        let after = |&(order, id): &(u32, u32)| order < last.0 || (order == last.0 && id > last.1);
        let others = logits.iter().map(|&logit| order(logit)).zip(0..).filter(after);
        // The lower id of a tie is the larger one here.
        let Some((best_order, std::cmp::Reverse(id))) = others.map(|(order, id)| (order, std::cmp::Reverse(id))).max()
        else {
            break;
        };
        if best_order == EXCLUDED {
            break;
        }
        (*to_id, *to) = (id, log_probability(logits[id as usize]));
        last = (best_order, id);
    }
    log_probability(own)
}
