//! The suite of `linear_attention`: cases that every backend must pass,
//! and random ones.

use qgemm_formats::DType;
use qgemm_hal::op::linear_attention::{BetaSource, DecayPer, DecaySource};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::case::{LinearAttentionCase as Case, LinearAttentionGates as G};
use crate::random::{pick, skewed};
use crate::suite::{Cases, group};

/// All groups.
pub(super) const GROUPS: &[Cases<Case>] = &[
    group("linear_attention_sizes", "head dimensions from 16 to 256, heads that share keys, one token to 70", sizes),
    group(
        "linear_attention_forms",
        "delta rule, KDA, Mamba-2, every type, decays and betas made of activations",
        forms,
    ),
    group("linear_attention_gates", "betas 0, 1 and 2, decays of 0, -inf, NaN, subnormals, states that last", gates),
    group("linear_attention_sequences", "ragged sequences, slots, zero states, advances and pending tokens", sequences),
    group("linear_attention_layouts", "strides of tokens, heads, gates and slots, offsets", layouts),
    group(
        "linear_attention_chunks",
        "as many tokens as are processed in chunks: forms, sizes, gates, segments",
        chunks,
    ),
    group("linear_attention_long", "4096 tokens of one sequence", long),
];

fn sizes() -> Vec<Case> {
    let dims = [
        (16, 16),
        (32, 48),
        (64, 64),
        (80, 96),
        (96, 32),
        (128, 128),
        (128, 64),
        (144, 80),
        (192, 16),
        (256, 256),
        (64, 256),
        (240, 112),
    ];
    let of_dims = (1..).zip(dims).map(|(seed, dims)| Case {
        dtype: DType::ALL[seed as usize % 3],
        seed,
        ..Case::new(&[[1, 3, 17][seed as usize % 3]; 2], (2, 1), dims)
    });
    let heads = [(1, 1), (3, 1), (6, 2), (48, 16), (4, 4)];
    let of_heads = (30..).zip(heads).map(|(seed, heads)| Case { seed, ..Case::new(&[5], heads, (64, 32)) });
    let lengths = [2, 7, 8, 9, 15, 16, 31, 33, 70];
    let of_lengths = (60..).zip(lengths).map(|(seed, length)| {
        let case = Case { seed, ..Case::new(&[length], (2, 2), (64, 64)) };
        if length % 2 == 0 { case } else { case.per_feature() }
    });
    let none = [Case::new(&[0, 0], (2, 1), (64, 64)), Case { ragged: true, ..Case::new(&[0], (2, 1), (64, 64)) }];
    of_dims.chain(of_heads).chain(of_lengths).chain(none).collect()
}

fn forms() -> Vec<Case> {
    let base = |dtype, seed| Case { dtype, seed, ..Case::new(&[4, 21], (4, 2), (64, 80)) };
    let of_dtype = |(seed, dtype): (u64, DType)| {
        let case = base(dtype, seed);
        let kda = case.clone().per_feature();
        let mamba = case.clone().mamba();
        let other = DType::ALL[(seed as usize + 1) % 3];
        [
            case.clone(),
            Case { decay: None, ..case.clone() },
            Case { decay: None, beta: None, norm: false, ..case.clone() },
            Case { skip: true, ..case.clone() },
            case.clone().made(dtype),
            case.clone().made(other),
            kda.clone(),
            Case { norm: false, beta: None, ..kda.clone() },
            kda.clone().made(dtype),
            mamba.clone(),
            Case { beta: Some(BetaSource::TimeStep), ..mamba.clone().made(DType::F32) },
            Case { beta: Some(BetaSource::TimeStep), ..case.clone().made(other) },
            Case { beta: Some(BetaSource::Sigmoid), tiled: true, ..case.clone() },
            Case { delta: false, ..kda },
            Case { decay: None, beta: None, ..mamba },
        ]
    };
    (1..).zip(DType::ALL).flat_map(of_dtype).collect()
}

fn gates() -> Vec<Case> {
    let of_kind = |(seed, gates): (u64, G)| {
        // A chunk spreads NaN to its earlier tokens.
        let batch_invariant = gates == G::Broken;
        let case = Case { gates, seed, batch_invariant, ..Case::new(&[40, 9], (6, 3), (64, 32)) };
        let made = if gates == G::Broken { case.clone() } else { case.clone().made(DType::F32) };
        [
            case.clone(),
            case.clone().per_feature(),
            case.clone().mamba(),
            Case { dtype: DType::BF16, ..case },
            made.clone(),
            made.per_feature_of_source(),
        ]
    };
    (1..).zip(G::ALL).flat_map(of_kind).collect()
}

impl Case {
    /// The decay of each key feature, from the same source.
    fn per_feature_of_source(self) -> Self {
        Self { decay: self.decay.map(|(_, source)| (DecayPer::Feature, source)), ..self }
    }
}

fn sequences() -> Vec<Case> {
    let lengths: [&[usize]; 4] = [&[1; 9], &[4; 5], &[3, 0, 1, 16, 8, 2, 19], &[33, 1, 18, 0, 5, 16, 7, 1, 2, 40]];
    let of_lengths = |(seed, lengths): (u64, &[usize])| {
        let case = Case { seed, dtype: DType::ALL[seed as usize % 3], ..Case::new(lengths, (3, 1), (64, 48)) };
        let indices = Case { slots: (lengths.len() + 3, true), ..case.clone() };
        [
            case.clone(),
            Case { from_zero: true, ..case.clone() },
            Case { ragged: true, ..indices.clone() },
            Case { from_zero: true, advance: true, ..indices.clone() },
            Case { advance: true, ..case.clone() },
            Case { pending: true, ..case.clone().per_feature() },
            Case { advance: true, pending: true, ..indices },
            Case { slots: (0, false), ..case },
        ]
    };
    (1..).zip(lengths).flat_map(of_lengths).collect()
}

fn layouts() -> Vec<Case> {
    let of_dtype = |(seed, dtype): (u64, DType)| {
        let case = Case { dtype, seed, ..Case::new(&[3, 18], (4, 2), (64, 48)) };
        [
            Case { gap: 8, d_gap: 16, ..case.clone() },
            Case { gap: 3, d_gap: 1, ..case.clone().made(dtype) },
            Case { offset: 1, d_gap: 5, ..case.clone().per_feature() },
            Case { offset: 3, gap: 1, ..case.clone().mamba() },
            Case { lengths: vec![1], ragged: false, slots: (1, false), offset: 1, ..case },
        ]
    };
    (1..).zip(DType::ALL).flat_map(of_dtype).collect()
}

fn chunks() -> Vec<Case> {
    let base = |seed: u64, tokens: usize, dims| Case {
        dtype: DType::ALL[seed as usize % 3],
        seed,
        ..Case::new(&[tokens], (2, 1), dims)
    };
    let dims = [(16, 16), (64, 64), (80, 96), (112, 48), (128, 128), (128, 16), (32, 256)];
    let of_dims = (1..).zip(dims).flat_map(|(seed, dims)| {
        let case = base(seed, 128 + seed as usize, dims);
        [case.clone(), Case { seed: seed + 10, ..case.per_feature() }]
    });
    let lengths = [96, 127, 161, 256];
    let of_lengths = (30..).zip(lengths).map(|(seed, tokens)| base(seed, tokens, (64, 64)).mamba());
    let kinds = [G::Slow, G::Whole, G::Extreme];
    let of_gates = (40..).zip(kinds).flat_map(|(seed, gates)| {
        let case = Case { gates, ..base(seed, 130, (64, 32)) };
        let made = case.clone().made(DType::F32);
        [case.clone(), case.clone().per_feature(), case.mamba(), made.clone(), made.per_feature_of_source()]
    });
    let case = base(51, 200, (64, 48));
    let forms = [
        Case { decay: None, ..case.clone() },
        Case { decay: None, beta: None, norm: false, ..case.clone() },
        Case { skip: true, from_zero: true, ..case.clone() },
        Case { heads: (6, 3), offset: 1, gap: 1, d_gap: 3, ..case.clone() },
        Case { slots: (4, true), ..case.clone() },
        Case { heads: (6, 3), beta: Some(BetaSource::Sigmoid), tiled: true, ..case.clone() },
        Case { beta: Some(BetaSource::TimeStep), ..case.clone().mamba().made(DType::F32) },
        Case { lengths: vec![150, 0, 1, 33, 97, 64], ragged: true, slots: (8, true), ..case.clone() },
        // Room for a few chunks at once, and for none.
        Case { max_workspace: Some(160_000), ..case.clone() },
        Case { max_workspace: Some(150_000), from_zero: true, ..case.clone().per_feature() },
        Case {
            max_workspace: Some(300_000),
            lengths: vec![150, 20, 65],
            ragged: true,
            slots: (3, false),
            ..case.clone()
        },
        Case { max_workspace: Some(70_000), ..case },
    ];
    of_dims.chain(of_lengths).chain(of_gates).chain(forms).collect()
}

fn long() -> Vec<Case> {
    let case = Case { gates: G::Slow, ..Case::new(&[4096], (2, 1), (32, 16)) };
    vec![
        case.clone(),
        Case { seed: 2, ..case.clone().per_feature() },
        Case { seed: 3, ..case.clone().mamba() },
        Case { seed: 4, dtype: DType::BF16, ..case.clone().made(DType::BF16) },
        Case { seed: 5, gates: G::Whole, ..case },
    ]
}

/// A source of beta that suits the decay.
fn beta(rng: &mut StdRng, decay: Option<(DecayPer, DecaySource)>) -> Option<BetaSource> {
    let has_step = matches!(decay, Some((DecayPer::Head, DecaySource::Softplus(_))));
    match rng.random_range(0..10) {
        0..3 => None,
        3..5 => Some(BetaSource::Sigmoid),
        5..7 if has_step => Some(BetaSource::TimeStep),
        _ => Some(BetaSource::Given),
    }
}

/// The random case of a seed.
pub(super) fn random_case(seed: u64) -> Case {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x11ea_5eed_0000_0000);
    let rng = &mut rng;
    let ragged = rng.random_bool(0.5);
    let count = skewed(rng, 9);
    let each = if rng.random_bool(0.2) { rng.random_range(32..=200) } else { skewed(rng, 40) };
    let lengths: Vec<usize> = (0..count).map(|_| if ragged { rng.random_range(0..=each) } else { each }).collect();
    let (key_heads, group) = (skewed(rng, 4), skewed(rng, 4));
    let dims = (16 * skewed(rng, 16), 16 * skewed(rng, 16));
    let decay = rng.random_bool(0.8).then(|| {
        let source =
            if rng.random_bool(0.6) { DecaySource::Log } else { DecaySource::Softplus(pick(rng, &DType::ALL)) };
        (pick(rng, &[DecayPer::Head, DecayPer::Feature]), source)
    });
    let slots = if rng.random_bool(0.5) { (count + 2, true) } else { (count, false) };
    let gates = pick(rng, &G::ALL);
    let case = Case {
        dtype: pick(rng, &DType::ALL),
        decay,
        delta: rng.random_bool(0.7),
        beta: beta(rng, decay),
        tiled: rng.random_bool(0.2),
        skip: rng.random_bool(0.4),
        norm: rng.random_bool(0.6),
        gates,
        // A chunk spreads NaN to its earlier tokens.
        batch_invariant: gates == G::Broken || rng.random_bool(0.2),
        max_workspace: pick(rng, &[None, None, Some(200_000)]),
        ragged,
        slots,
        from_zero: rng.random_bool(0.3),
        advance: rng.random_bool(0.4),
        pending: rng.random_bool(0.4),
        gap: pick(rng, &[0, 0, 1, 8]),
        d_gap: pick(rng, &[0, 0, 1, 8]),
        offset: pick(rng, &[0, 0, 1, 3]),
        seed,
        ..Case::new(&lengths, (key_heads * group, key_heads), dims)
    };
    // A time step of an infinite number is an infinite beta, which
    // a chunk spreads as NaN.
    let is_infinite = gates == G::Extreme && case.beta == Some(BetaSource::TimeStep);
    Case { batch_invariant: case.batch_invariant || is_infinite, ..case }
}
