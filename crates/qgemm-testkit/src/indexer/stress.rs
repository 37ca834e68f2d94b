//! Random cases of `indexer`: any heads, features, keys and
//! layout from one seed.

use qgemm_hal::op::indexer::{FORMATS, MOST_CHOSEN};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::case::{IndexedKeys, IndexerCase, IndexerValues};
use crate::random::{gap, pick, skewed};

/// The random case of `seed`.
pub(super) fn random_case(seed: u64) -> IndexerCase {
    let rng = &mut StdRng::seed_from_u64(seed);
    let mut queries = skewed(rng, 80);
    let keys = match rng.random_range(0..3) {
        0 => IndexedKeys::All(skewed(rng, 3000)),
        1 => {
            let keys = skewed(rng, 1000);
            let bound = |rng: &mut StdRng| skewed(rng, keys + 20) as u32 - 1;
            IndexedKeys::Ranges(keys, (0..queries).map(|_| (bound(rng), bound(rng))).collect())
        }
        _ => {
            let (sequences, size) = (skewed(rng, 8), skewed(rng, 100));
            queries = sequences * skewed(rng, 6);
            IndexedKeys::Paged(size, (0..sequences).map(|_| skewed(rng, 600) - 1).collect())
        }
    };
    let is_paged = matches!(keys, IndexedKeys::Paged(..));
    let values = pick(
        rng,
        &[
            IndexerValues::Normal,
            IndexerValues::Integers,
            IndexerValues::Nan,
            IndexerValues::Infinite,
            IndexerValues::Zeros,
            if is_paged { IndexerValues::BadPages } else { IndexerValues::Normal },
        ],
    );
    let format = pick(rng, &FORMATS);
    let case = IndexerCase::new(queries, (skewed(rng, 130), 16 * rng.random_range(1..=16)), format, keys);
    IndexerCase {
        q_scales: rng.random(),
        values,
        best: rng.random_ratio(2, 3).then(|| skewed(rng, MOST_CHOSEN)),
        gap: gap(rng, 20),
        offset: gap(rng, 4),
        seed,
        ..case
    }
}
