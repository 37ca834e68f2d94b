//! The suite of `sampling`: cases that every backend must pass, and
//! random ones.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::case::{SamplingCase, SamplingLogits as L, SamplingRules as R};
use crate::suite::{Cases, group};

/// All groups.
pub(super) const GROUPS: &[Cases<SamplingCase>] = &[
    group("sampling_rules", "every rule with every kind of logits", rules),
    group("sampling_sizes", "vocabularies from 1 token on, around warps and CTAs", sizes),
    group("sampling_penalties", "earlier tokens: repeated, outside of the vocabulary, too many", penalties),
    group("sampling_log_probabilities", "log-probabilities of tokens and alternatives", log_probabilities),
    group("sampling_faults", "rows without a token beside rows that have one", faults),
    group("sampling_layouts", "row strides and offsets", layouts),
];

fn rules() -> Vec<SamplingCase> {
    let kinds = [L::Bell, L::Ties, L::Equal, L::Extremes, L::Masked];
    let valid = R::ALL.into_iter().filter(|rules| *rules != R::Invalid);
    let case = |(i, (rules, logits))| SamplingCase { logits, seed: i, ..SamplingCase::new(3, 300, rules) };
    (1..).zip(valid.flat_map(|rules| kinds.map(|logits| (rules, logits)))).map(case).collect()
}

fn sizes() -> Vec<SamplingCase> {
    let sizes = [1, 2, 31, 32, 33, 255, 257, 1024, 1025, 2049, 5000];
    let case = |(i, vocabulary)| {
        let rules = [R::All, R::Argmax, R::TopP][i as usize % 3];
        [
            SamplingCase { seed: i, ..SamplingCase::new(2, vocabulary, R::Temperature) },
            SamplingCase { seed: i, ..SamplingCase::new(2, vocabulary, rules) },
        ]
    };
    (1..).zip(sizes).flat_map(case).collect()
}

fn penalties() -> Vec<SamplingCase> {
    let case = SamplingCase { earlier: Some(24), ..SamplingCase::new(5, 90, R::All) };
    vec![
        case,
        SamplingCase { rules: R::Argmax, seed: 2, ..case },
        SamplingCase { rules: R::Temperature, logits: L::Extremes, seed: 3, ..case },
        SamplingCase { rules: R::TopK, logits: L::Masked, earlier: Some(1), seed: 4, ..case },
        SamplingCase { vocabulary: 4100, earlier: Some(700), gap: 3, seed: 5, ..case },
        SamplingCase { vocabulary: 1, earlier: Some(2), seed: 6, ..case },
    ]
}

fn log_probabilities() -> Vec<SamplingCase> {
    let case = SamplingCase { log_probabilities: Some(0), ..SamplingCase::new(3, 500, R::All) };
    vec![
        case,
        SamplingCase { log_probabilities: Some(5), seed: 2, ..case },
        SamplingCase { log_probabilities: Some(32), logits: L::Ties, seed: 3, ..case },
        SamplingCase { log_probabilities: Some(8), logits: L::Extremes, rules: R::Argmax, seed: 4, ..case },
        SamplingCase { log_probabilities: Some(4), vocabulary: 3, logits: L::Masked, seed: 5, ..case },
        SamplingCase { log_probabilities: Some(3), earlier: Some(9), rules: R::Argmax, seed: 6, ..case },
        SamplingCase { log_probabilities: Some(2), logits: L::Equal, vocabulary: 2500, seed: 7, ..case },
    ]
}

fn faults() -> Vec<SamplingCase> {
    let case = SamplingCase { logits: L::Faulty, ..SamplingCase::new(10, 120, R::All) };
    vec![
        case,
        SamplingCase { rules: R::Argmax, seed: 2, ..case },
        SamplingCase { rules: R::Invalid, seed: 3, ..case },
        SamplingCase { log_probabilities: Some(2), earlier: Some(6), seed: 4, ..case },
        SamplingCase { logits: L::Bell, rules: R::Invalid, earlier: Some(6), seed: 5, ..case },
        SamplingCase { vocabulary: 1, log_probabilities: Some(1), rules: R::Temperature, seed: 6, ..case },
    ]
}

fn layouts() -> Vec<SamplingCase> {
    let case = SamplingCase { gap: 5, offset: 1, ..SamplingCase::new(7, 77, R::All) };
    vec![
        case,
        SamplingCase { offset: 3, earlier: Some(11), log_probabilities: Some(3), seed: 2, ..case },
        SamplingCase { rows: 60, gap: 0, offset: 0, seed: 3, ..case },
    ]
}

/// The random case of a seed.
pub(super) fn random_case(seed: u64) -> SamplingCase {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x5a3b_5eed_0000_0000);
    let vocabulary = if rng.random_bool(0.2) { rng.random_range(1..=6000) } else { rng.random_range(1..=600) };
    let rules = R::ALL[rng.random_range(0..R::ALL.len())];
    SamplingCase {
        logits: L::ALL[rng.random_range(0..L::ALL.len())],
        earlier: rng.random_bool(0.4).then(|| rng.random_range(1..=60)),
        log_probabilities: rng.random_bool(0.4).then(|| rng.random_range(0..=32)),
        gap: [0, 0, 1, 8][rng.random_range(0..4)],
        offset: [0, 0, 1, 3][rng.random_range(0..4)],
        seed,
        ..SamplingCase::new(rng.random_range(1..=6), vocabulary, rules)
    }
}
