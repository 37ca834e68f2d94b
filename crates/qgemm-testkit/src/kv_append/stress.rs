//! Random cases of `kv_append`: any lengths, heads, types and
//! angles from one seed.

use qgemm_api::RotaryScaling;
use qgemm_formats::DType;
use qgemm_hal::{KvFormat, RotaryPairs};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::case::{KvAppendCase, RotaryCase};
use crate::attention::{AttentionCase, AttentionStorage, AttentionValues};
use crate::random::{gap, pick, skewed};

/// The random case of `seed`.
pub(super) fn random_case(seed: u64) -> KvAppendCase {
    let rng = &mut StdRng::seed_from_u64(seed);
    let sequences = skewed(rng, 40);
    let ragged = rng.random();
    let each = skewed(rng, 40) - 1;
    let length = |rng: &mut StdRng| (if ragged { skewed(rng, 40) - 1 } else { each }, skewed(rng, 200) - 1);
    let lengths: Vec<(usize, usize)> = (0..sequences).map(|_| length(rng)).collect();
    let kv_heads = pick(rng, &[1, 2, 3, 8]);
    let heads = (kv_heads * pick(rng, &[1, 2, 4, 7]), kv_heads);
    let kv = pick(rng, &KvFormat::ALL);
    let dim = |rng: &mut StdRng| (8 * rng.random_range(1..=32usize)).next_multiple_of(kv.step());
    let dims = (dim(rng), dim(rng));
    let paged = AttentionStorage::Paged(skewed(rng, 64));
    let places = pick(rng, &[AttentionStorage::Lengths(3), AttentionStorage::Offsets, paged, paged]);
    let is_paged = matches!(places, AttentionStorage::Paged(_));
    let values = if is_paged && rng.random_ratio(1, 3) { AttentionValues::BadPages } else { AttentionValues::Normal };
    let dtype = pick(rng, &DType::ALL);
    let of = AttentionCase {
        ragged,
        places,
        dims,
        kv,
        head_major: is_paged && rng.random(),
        values,
        gap: gap(rng, 20),
        offset: gap(rng, 4),
        seed,
        ..AttentionCase::new(&lengths, heads, 8, dtype)
    };
    let scaling = pick(
        rng,
        &[
            RotaryScaling::None,
            RotaryScaling::Linear { factor: 2.0 },
            RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192 },
            RotaryScaling::Yarn { factor: 4.0, fast: 32.0, slow: 1.0, original: 2048, truncate: true },
        ],
    );
    let rotary = RotaryCase {
        dim: 2 * rng.random_range(1..=dims.0 / 2),
        pairs: pick(rng, &RotaryPairs::ALL),
        base: pick(rng, &[10_000.0, 1e6]),
        scaling,
        tables: rng.random_ratio(1, 4).then(|| skewed(rng, 200)),
        inverse: rng.random_ratio(1, 4),
    };
    let head_norm = (rotary.tables.is_none() && rng.random_ratio(1, 3)).then(|| (1e-6, pick(rng, &DType::ALL)));
    let in_place = rng.random_ratio(1, 5);
    let mut hadamard = || rng.random_ratio(1, 2);
    KvAppendCase {
        of,
        hadamard: [hadamard(), hadamard() && !in_place],
        in_place,
        head_norm,
        has_queries: in_place || rng.random_ratio(4, 5),
        rotary: rng.random_ratio(5, 6).then_some(rotary),
        positions_from: rng.random_ratio(1, 3).then(|| rng.random_range(0..100_000)),
    }
}
