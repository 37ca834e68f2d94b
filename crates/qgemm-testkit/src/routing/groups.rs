//! The suite of `routing`: cases that every backend must pass.

use qgemm_formats::DType;
use qgemm_hal::{ExpertGroups, Scoring};

use super::case::{RoutingCase, RoutingFrom, RoutingValues};
use crate::suite::{Cases, group};

/// All groups.
pub(super) const GROUPS: &[Cases<RoutingCase>] = &[
    group("routing_sizes", "from one token and expert to thousands of tokens and 1024 experts", sizes),
    group("routing_scores", "every scoring, renormalized, scaled, biased, in groups", scores),
    group("routing_special", "NaN, infinities, ties, tokens with too few experts", special),
    group("routing_shared", "one more expert that every token has, of all sizes", shared),
    group("routing_local", "a part of the experts, as one of several devices has them, of all sizes", local),
    group("routing_layouts", "every type of logits, leading dimensions, unaligned operands", layouts),
    group("routing_ids", "lists of given ids, of all sizes, with ids that are no expert's", ids),
];

/// Tokens, experts and experts per token: around the capacity of
/// a warp, a CTA and a chunk.
const SIZES: [(usize, usize, usize); 23] = [
    (1, 1, 1),
    (1, 8, 2),
    (1, 128, 8),
    (1, 1024, 16),
    (7, 60, 4),
    (7, 256, 8),
    (16, 64, 6),
    (17, 32, 1),
    (33, 1, 1),
    (33, 128, 8),
    (33, 512, 10),
    (33, 1024, 16),
    (65, 65, 3),
    (512, 8, 2),
    (512, 60, 4),
    (512, 128, 8),
    (513, 256, 16),
    (2049, 16, 4),
    (5000, 8, 8),
    (5000, 60, 2),
    (9, 896, 16),
    (35, 1024, 32),
    (300, 40, 31),
];

fn types(i: usize) -> RoutingFrom {
    RoutingFrom::Logits(DType::ALL[i % DType::ALL.len()])
}

fn sizes() -> Vec<RoutingCase> {
    let case = |(i, (tokens, experts, top_k))| {
        let case = RoutingCase { from: types(i), seed: i as u64, ..RoutingCase::new(tokens, experts, top_k) };
        // Half of the cases with lists alone: the choice must not depend
        // on weights.
        [RoutingCase { renormalize: i % 2 == 0, ..case }, RoutingCase { lists: false, from: types(i + 1), ..case }]
    };
    SIZES.into_iter().enumerate().flat_map(case).collect()
}

fn scores() -> Vec<RoutingCase> {
    let grouped = |groups, chosen| Some(ExpertGroups { groups, chosen });
    // Experts, experts per token, groups: none, DeepSeek-V3's,
    // groups of one, one group, odd sizes, and many.
    let choices = [
        (60, 4, None),
        (256, 8, grouped(8, 4)),
        (16, 4, grouped(16, 5)),
        (40, 6, grouped(1, 1)),
        (60, 8, grouped(4, 2)),
        (1024, 16, grouped(128, 3)),
        (896, 16, None),
    ];
    let mut cases = Vec::new();
    for (experts, top_k, groups) in choices {
        for scoring in Scoring::ALL {
            for bias in [false, true] {
                for renormalize in [false, true] {
                    let i = cases.len();
                    cases.push(RoutingCase {
                        from: types(i),
                        scoring,
                        bias,
                        renormalize,
                        groups,
                        scale: [1.0, 2.5, 0.0625][i % 3],
                        lists: i.is_multiple_of(3),
                        values: [RoutingValues::Random, RoutingValues::Ties, RoutingValues::Skewed][i / 2 % 3],
                        seed: i as u64,
                        ..RoutingCase::new([19, 5, 40][i % 3], experts, top_k)
                    });
                }
            }
        }
    }
    cases
}

fn special() -> Vec<RoutingCase> {
    let mut cases = Vec::new();
    for values in RoutingValues::ALL {
        for (tokens, experts, top_k, groups) in
            [(13, 8, 8, None), (40, 60, 6, None), (40, 64, 8, Some((8, 3))), (600, 24, 15, Some((3, 2)))]
        {
            for scoring in Scoring::ALL {
                let i = cases.len();
                cases.push(RoutingCase {
                    from: types(i),
                    scoring,
                    groups: groups.map(|(groups, chosen)| ExpertGroups { groups, chosen }),
                    bias: i % 4 == 3,
                    renormalize: i % 3 == 0,
                    lists: i % 5 != 4,
                    values,
                    seed: i as u64,
                    ..RoutingCase::new(tokens, experts, top_k)
                });
            }
        }
    }
    cases
}

fn shared() -> Vec<RoutingCase> {
    let case = |(i, (tokens, experts, top_k)): (usize, (usize, usize, usize))| RoutingCase {
        from: types(i),
        scoring: Scoring::ALL[i % 3],
        bias: i % 3 == 1,
        renormalize: i % 2 == 1,
        scale: if i % 3 == 2 { 2.5 } else { 1.0 },
        lists: i % 4 != 3,
        shared: true,
        values: [RoutingValues::Random, RoutingValues::Special][i / 2 % 2],
        seed: i as u64,
        ..RoutingCase::new(tokens, experts, top_k)
    };
    let fits = |&(_, experts, top_k): &(usize, usize, usize)| experts < 1024 && top_k < 32;
    let mut cases: Vec<RoutingCase> = SIZES.into_iter().filter(fits).enumerate().map(case).collect();
    let groups = Some(ExpertGroups { groups: 8, chosen: 4 });
    cases.extend([9, 40].map(|tokens| RoutingCase {
        groups,
        bias: true,
        shared: true,
        ..RoutingCase::new(tokens, 256, 8)
    }));
    cases
}

fn local() -> Vec<RoutingCase> {
    let case = |(i, (tokens, experts, top_k)): (usize, (usize, usize, usize))| {
        let shared = i % 3 == 2 && experts < 1024 && top_k < 32;
        let all = experts + usize::from(shared);
        let values = [RoutingValues::Random, RoutingValues::Special, RoutingValues::Skewed, RoutingValues::NearlyNone];
        let case = RoutingCase {
            from: types(i),
            scoring: Scoring::ALL[i % Scoring::ALL.len()],
            renormalize: i % 2 == 0,
            bias: i % 5 == 4,
            scale: if i % 4 == 1 { 2.5 } else { 1.0 },
            shared,
            values: values[i / 2 % values.len()],
            seed: i as u64,
            ..RoutingCase::new(tokens, experts, top_k)
        };
        // The first half, one expert, and the last ones.
        let parts = [[0, all.div_ceil(2)], [all / 3, all / 3 + 1], [all - all.div_ceil(4), all]];
        let [one, other] = [parts[i % 3], parts[(i + 1) % 3]].map(Some);
        [RoutingCase { local: one, ..case }, RoutingCase { local: other, lists: false, seed: case.seed + 100, ..case }]
    };
    SIZES.into_iter().enumerate().flat_map(case).collect()
}

fn layouts() -> Vec<RoutingCase> {
    let mut cases = Vec::new();
    for dtype in DType::ALL {
        for (gap, offset) in [(3, 0), (8, 0), (0, 1), (5, 2), (16, 3)] {
            for (tokens, experts, top_k) in [(9, 61, 5), (70, 128, 8)] {
                let i = cases.len();
                let from = RoutingFrom::Logits(dtype);
                let case = RoutingCase {
                    from,
                    gap,
                    offset,
                    bias: i % 2 == 1,
                    seed: i as u64,
                    ..RoutingCase::new(tokens, experts, top_k)
                };
                cases.push(RoutingCase { lists: i % 3 != 2, ..case });
            }
        }
    }
    cases
}

fn ids() -> Vec<RoutingCase> {
    let mut cases = Vec::new();
    for (i, (tokens, experts, top_k)) in SIZES.into_iter().enumerate() {
        for (j, values) in RoutingValues::ALL.into_iter().enumerate() {
            // Every kind for some sizes, every size with some kinds; bad ids
            // for every size.
            if (i + j).is_multiple_of(2) || values == RoutingValues::Special {
                let (offset, seed) = ((i + j) % 3, cases.len() as u64);
                cases.push(RoutingCase { values, offset, seed, ..RoutingCase::of_ids(tokens, experts, top_k) });
            }
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_scoring_and_way_to_compare_occurs_with_many_tokens_and_few() {
        let all: Vec<RoutingCase> = GROUPS.iter().flat_map(|(_, cases)| cases()).collect();
        for dtype in DType::ALL {
            let of_type = || all.iter().filter(|case| case.from == RoutingFrom::Logits(dtype));
            assert!(of_type().any(|case| case.gap > 0) && of_type().any(|case| case.offset > 0));
            assert!(of_type().any(|case| case.slots() > 8192) && of_type().any(|case| case.tokens == 1));
        }
        for scoring in Scoring::ALL {
            for (bias, grouped) in [(false, false), (false, true), (true, false), (true, true)] {
                let is_one = |case: &&RoutingCase| {
                    (case.scoring, case.bias, case.groups.is_some()) == (scoring, bias, grouped)
                        && case.from != RoutingFrom::Ids
                };
                assert!(all.iter().any(|case| is_one(&case)), "{scoring:?} {bias} {grouped}");
            }
        }
        assert!((1..=16).all(|k| [7, 9, 11, 12, 13, 14].contains(&k) || all.iter().any(|case| case.top_k == k)));
    }
}
