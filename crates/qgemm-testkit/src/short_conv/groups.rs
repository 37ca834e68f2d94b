//! The suite of `short_conv`: cases that every backend must pass,
//! and random ones.

use qgemm_formats::DType;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::case::{ShortConvAdvance as A, ShortConvCase, ShortConvState as S};
use crate::random::{pick, skewed};
use crate::suite::{Cases, group};

/// All groups.
pub(super) const GROUPS: &[Cases<ShortConvCase>] = &[
    group("short_conv_sizes", "channels around vectors and CTAs, tokens around windows and tiles, no token", sizes),
    group("short_conv_types", "every type and width, with and without bias and SiLU", types),
    group("short_conv_sequences", "ragged, empty, many and bounded sequences, tokens of none", sequences),
    group("short_conv_state", "slots that do not exist, states from zeros, any prefix of guesses", state),
    group("short_conv_gates", "gates before and after the convolution", gates),
    group("short_conv_layouts", "gaps between rows and slots, offsets", layouts),
];

fn sizes() -> Vec<ShortConvCase> {
    let channels = [1, 2, 7, 8, 9, 24, 64, 130, 1024, 1032];
    let of_channels = (1..).zip(channels).map(|(seed, channels)| ShortConvCase {
        dtype: DType::ALL[seed as usize % 3],
        seed,
        ..ShortConvCase::new([2, 5], channels, 2 + channels % 3)
    });
    let counts = [[1, 1], [1, 2], [1, 3], [2, 4], [1, 17], [1, 64], [2, 65], [1, 200], [3, 16], [0, 3], [2, 0]];
    let of_counts = (20..).zip(counts).map(|(seed, counts)| ShortConvCase {
        dtype: DType::ALL[seed as usize % 3],
        seed,
        ..ShortConvCase::new(counts, 40, 4 - seed as usize % 2)
    });
    of_channels.chain(of_counts).collect()
}

fn types() -> Vec<ShortConvCase> {
    let all = DType::ALL.into_iter().flat_map(|dtype| [2, 3, 4].map(|width| (dtype, width)));
    let of_pair = |(seed, (dtype, width))| {
        let case = ShortConvCase { dtype, seed, ..ShortConvCase::new([2, 9], 72, width) };
        [
            ShortConvCase { bias: false, silu: false, state: None, ..case.clone() },
            ShortConvCase { bias: false, ..case.clone() },
            ShortConvCase { silu: false, ..case.clone() },
            case,
        ]
    };
    (1..).zip(all).flat_map(of_pair).collect()
}

fn sequences() -> Vec<ShortConvCase> {
    let ragged = |lengths: &[usize], width| ShortConvCase::ragged(lengths, 48, width);
    let many: Vec<usize> = (0..70).map(|i| [1, 0, 2, 1, 5, 3][i % 6]).collect();
    // Enough tokens that a CTA has several, of several sequences.
    let walked: Vec<usize> = (0..1600).map(|i| [1, 0, 7, 3, 16, 2, 4, 5][i % 8]).chain([1900]).collect();
    let walked = |channels, width| {
        let state = S { advance: A::Some, absent: true, ..S::PLAIN };
        ShortConvCase { state: Some(state), ..ShortConvCase::ragged(&walked, channels, width) }
    };
    let cases = vec![
        walked(8, 4),
        walked(3, 3),
        ShortConvCase { gates: [true; 2], ..walked(8, 2) },
        ragged(&[0, 3, 1, 0, 9, 2, 4, 0], 4),
        ragged(&[2, 2, 2, 2, 2, 2, 2], 4),
        ragged(&[1; 40], 3),
        ragged(&[130, 1, 1, 70], 4),
        ragged(&many, 4),
        ragged(&[5], 2),
        ShortConvCase { before: 3, ..ragged(&[2, 6, 1], 4) },
        ShortConvCase { most: Some(4), ..ragged(&[2, 9, 1, 5], 4) },
        ShortConvCase { most: Some(2), state: Some(S { advance: A::Some, ..S::PLAIN }), ..ragged(&[7, 1, 3], 4) },
        ShortConvCase::new([33, 1], 16, 4),
        ShortConvCase::new([9, 3], 16, 4),
    ];
    let numbered = (1..).zip(cases);
    numbered.map(|(seed, case)| ShortConvCase { dtype: DType::ALL[seed as usize % 3], seed, ..case }).collect()
}

fn state() -> Vec<ShortConvCase> {
    let counts = [1, 2, 3, 4, 16];
    let of_count = |(seed, count): (u64, usize)| {
        let case = ShortConvCase { dtype: DType::ALL[seed as usize % 3], ..ShortConvCase::new([4, count], 24, 4) };
        let states = [
            S { absent: true, ..S::PLAIN },
            S { from_zeros: true, spare: 3, ..S::PLAIN },
            S { advance: A::None, ..S::PLAIN },
            S { advance: A::Some, ..S::PLAIN },
            S { advance: A::Beyond, absent: true, ..S::PLAIN },
            S { advance: A::Some, from_zeros: true, ..S::PLAIN },
        ];
        let of_state = |(i, state)| ShortConvCase { state: Some(state), seed: seed * 10 + i, ..case.clone() };
        (0..).zip(states).map(of_state).collect::<Vec<_>>()
    };
    (1..).zip(counts).flat_map(of_count).collect()
}

fn gates() -> Vec<ShortConvCase> {
    let all = DType::ALL.into_iter().flat_map(|dtype| [[true, false], [false, true], [true, true]].map(|g| (dtype, g)));
    let of_pair = |(seed, (dtype, gates))| {
        let case = ShortConvCase { dtype, gates, seed, ..ShortConvCase::new([3, 6], 56, 3) };
        let lfm2 = ShortConvCase { bias: false, silu: false, gap: 112, ..case.clone() };
        [
            ShortConvCase { state: Some(S { advance: A::Some, ..S::PLAIN }), ..lfm2.clone() },
            ShortConvCase { channels: 13, ..lfm2 },
            ShortConvCase { lengths: vec![1; 3], ..case },
        ]
    };
    (1..).zip(all).flat_map(of_pair).collect()
}

fn layouts() -> Vec<ShortConvCase> {
    let of_type = |(seed, dtype)| {
        let case = ShortConvCase { dtype, seed, gates: [true; 2], ..ShortConvCase::new([2, 7], 32, 4) };
        [
            ShortConvCase { gap: 8, d_gap: 16, ..case.clone() },
            ShortConvCase { gap: 3, d_gap: 1, gates: [false; 2], ..case.clone() },
            ShortConvCase { offset: 1, d_gap: 5, ..case.clone() },
            ShortConvCase { offset: 3, gap: 1, channels: 21, ..case.clone() },
            ShortConvCase { state: Some(S { gap: 8, ..S::PLAIN }), ..case.clone() },
            ShortConvCase { state: Some(S { gap: 5, spare: 2, ..S::PLAIN }), gates: [false; 2], ..case },
        ]
    };
    (1..).zip(DType::ALL).flat_map(of_type).collect()
}

/// The random case of a seed.
pub(super) fn random_case(seed: u64) -> ShortConvCase {
    let mut rng = StdRng::seed_from_u64(seed ^ 0xc0_5eed << 40);
    let rng = &mut rng;
    let (sequences, channels, width) = (skewed(rng, 40), skewed(rng, 300), rng.random_range(2..=4));
    let ragged = rng.random_bool(0.6);
    let case = match ragged {
        true => {
            let lengths: Vec<usize> = (0..sequences).map(|_| skewed(rng, 60) - 1).collect();
            ShortConvCase {
                before: pick(rng, &[0, 0, 2]),
                most: pick(rng, &[None, None, Some(5)]),
                ..ShortConvCase::ragged(&lengths, channels, width)
            }
        }
        false => ShortConvCase::new([sequences, skewed(rng, 60)], channels, width),
    };
    let state = S {
        spare: rng.random_range(0..3),
        absent: rng.random_bool(0.3),
        from_zeros: rng.random_bool(0.3),
        advance: pick(rng, &A::ALL),
        gap: pick(rng, &[0, 0, 3, 8]),
    };
    ShortConvCase {
        dtype: pick(rng, &DType::ALL),
        bias: rng.random_bool(0.5),
        silu: rng.random_bool(0.5),
        gates: [rng.random_bool(0.3), rng.random_bool(0.3)],
        state: rng.random_bool(0.8).then_some(state),
        gap: pick(rng, &[0, 0, 1, 8]),
        d_gap: pick(rng, &[0, 0, 1, 8]),
        offset: pick(rng, &[0, 0, 1, 3]),
        seed,
        ..case
    }
}
