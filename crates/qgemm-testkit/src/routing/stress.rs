//! Random cases of `routing`: any size, source and choice from
//! one seed.

use qgemm_formats::DType;
use qgemm_hal::{ExpertGroups, Scoring};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::case::{RoutingCase, RoutingFrom, RoutingValues};
use crate::random::{gap, pick, skewed};

const MAX_TOKENS: usize = 3000;
const MAX_EXPERTS: usize = 1024;
const MAX_TOP_K: usize = 32;

/// The random case of `seed`.
pub(super) fn random_case(seed: u64) -> RoutingCase {
    let rng = &mut StdRng::seed_from_u64(seed);
    let (tokens, experts) = (skewed(rng, MAX_TOKENS), skewed(rng, MAX_EXPERTS));
    let top_k = rng.random_range(1..=MAX_TOP_K.min(experts));
    let has_room = experts < MAX_EXPERTS && top_k < MAX_TOP_K;
    let values = pick(rng, &RoutingValues::ALL);
    if rng.random_ratio(1, 4) {
        return RoutingCase { values, offset: gap(rng, 4), seed, ..RoutingCase::of_ids(tokens, experts, top_k) };
    }
    let divisors: Vec<usize> = (1..=experts).filter(|groups| experts.is_multiple_of(*groups)).collect();
    let groups = pick(rng, &divisors);
    // The fewest groups that hold a token's experts.
    let fewest = top_k.div_ceil(experts / groups);
    let chosen = rng.random_range(fewest..=groups);
    let shared = has_room && rng.random_ratio(1, 4);
    let all = experts + usize::from(shared);
    let first = rng.random_range(0..all);
    let local = rng.random_ratio(1, 3).then_some([first, rng.random_range(first + 1..=all)]);
    RoutingCase {
        from: RoutingFrom::Logits(pick(rng, &DType::ALL)),
        scoring: pick(rng, &Scoring::ALL),
        renormalize: rng.random(),
        scale: pick(rng, &[1.0, 2.5, 0.125, -3.0]),
        bias: rng.random_ratio(1, 3),
        groups: rng.random_ratio(1, 3).then_some(ExpertGroups { groups, chosen }),
        lists: rng.random_ratio(2, 3),
        values,
        shared,
        local,
        gap: gap(rng, 20),
        offset: gap(rng, 4),
        seed,
        ..RoutingCase::new(tokens, experts, top_k)
    }
}
