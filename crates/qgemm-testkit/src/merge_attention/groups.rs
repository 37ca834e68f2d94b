//! The suite of `merge_attention`: cases that every backend must pass,
//! and random ones.

use qgemm_formats::DType;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::case::{MergeAttentionCase, MergeAttentionLayout as L, MergeAttentionValues as V};
use crate::random::{pick, skewed};
use crate::suite::{Cases, group};

/// All groups.
pub(super) const GROUPS: &[Cases<MergeAttentionCase>] = &[
    group("merge_attention_sizes", "parts from 1 to 256, heads and dimensions around warps and CTAs, no token", sizes),
    group("merge_attention_types", "every type to every type", types),
    group("merge_attention_values", "parts that outweigh others, have no keys, are NaN", values),
    group("merge_attention_layouts", "strides of parts, tokens and heads, offsets", layouts),
];

fn sizes() -> Vec<MergeAttentionCase> {
    let parts = [1, 2, 3, 4, 5, 17, 64, 256];
    let of_parts = (1..).zip(parts).map(|(seed, parts)| {
        let case = MergeAttentionCase::new(parts, [5, 3, [64, 128, 72, 8][parts % 4]]);
        MergeAttentionCase { dtype: DType::ALL[parts % 3], lse: parts != 4, seed, ..case }
    });
    let shapes = [
        [1, 1, 8],
        [9, 1, 16],
        [1, 17, 24],
        [3, 2, 96],
        [2, 2, 192],
        [2, 5, 256],
        [3, 1, 264],
        [2, 1, 512],
        [2, 3, 576],
    ];
    let of_shapes = (20..).zip(shapes).map(|(seed, shape)| MergeAttentionCase {
        dtype: DType::F16,
        d_dtype: DType::F16,
        seed,
        ..MergeAttentionCase::new(3, shape)
    });
    of_parts.chain(of_shapes).chain([MergeAttentionCase::new(2, [0, 4, 64])]).collect()
}

fn types() -> Vec<MergeAttentionCase> {
    let pairs = DType::ALL.into_iter().flat_map(|dtype| DType::ALL.map(|d_dtype| (dtype, d_dtype)));
    let of_pair = |(seed, (dtype, d_dtype))| {
        let case = MergeAttentionCase { dtype, d_dtype, seed, ..MergeAttentionCase::new(2, [6, 4, 128]) };
        [case, MergeAttentionCase { parts: 1, ..case }, MergeAttentionCase { parts: 7, dim: 40, lse: false, ..case }]
    };
    (1..).zip(pairs).flat_map(of_pair).collect()
}

fn values() -> Vec<MergeAttentionCase> {
    let kinds = [V::Different, V::Empty, V::Broken];
    let of_kind = |(seed, (values, parts))| MergeAttentionCase {
        values,
        dtype: DType::ALL[parts % 3],
        d_dtype: DType::ALL[seed as usize % 3],
        seed,
        ..MergeAttentionCase::new(parts, [11, 2, 64])
    };
    (1..).zip(kinds.into_iter().flat_map(|kind| [1, 2, 3, 17, 64].map(|parts| (kind, parts)))).map(of_kind).collect()
}

fn layouts() -> Vec<MergeAttentionCase> {
    let case = MergeAttentionCase::new(3, [5, 4, 64]);
    let of_layout = |(seed, layout)| {
        let case = MergeAttentionCase { layout, seed, ..case };
        [
            MergeAttentionCase { gap: 8, d_gap: 16, dtype: DType::F16, d_dtype: DType::BF16, ..case },
            MergeAttentionCase { gap: 3, d_gap: 1, dtype: DType::BF16, d_dtype: DType::F16, ..case },
            MergeAttentionCase { offset: 1, d_gap: 5, dtype: DType::F16, d_dtype: DType::F32, ..case },
            MergeAttentionCase { offset: 3, gap: 1, dim: 24, values: V::Empty, d_dtype: DType::BF16, ..case },
            MergeAttentionCase { dtype: DType::BF16, tokens: 1, parts: 1, ..case },
        ]
    };
    (1..).zip(L::ALL).flat_map(of_layout).collect()
}

/// The random case of a seed.
pub(super) fn random_case(seed: u64) -> MergeAttentionCase {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x3e26_5eed_0000_0000);
    let rng = &mut rng;
    let shape = [skewed(rng, 40), skewed(rng, 9), 8 * skewed(rng, 72)];
    MergeAttentionCase {
        dtype: pick(rng, &DType::ALL),
        d_dtype: pick(rng, &DType::ALL),
        values: pick(rng, &V::ALL),
        layout: pick(rng, &L::ALL),
        lse: rng.random_bool(0.7),
        gap: pick(rng, &[0, 0, 1, 8]),
        d_gap: pick(rng, &[0, 0, 1, 8]),
        offset: pick(rng, &[0, 0, 1, 3]),
        seed,
        ..MergeAttentionCase::new(skewed(rng, 256), shape)
    }
}
