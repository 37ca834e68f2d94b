//! Random cases of `convert`: any size, pair of types, layout and
//! order from one seed.

use qgemm_formats::DType;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::case::{ConvertCase, ConvertLayout, ConvertOrder, ConvertValues};
use crate::activations::ActivationKind;
use crate::random::{gap, pick, skewed};

const MAX_ROWS: usize = 300;
const MAX_COLUMNS: usize = 9000;

/// The random case of `seed`.
pub(super) fn random_case(seed: u64) -> ConvertCase {
    let rng = &mut StdRng::seed_from_u64(seed);
    let (rows, columns) = (skewed(rng, MAX_ROWS), skewed(rng, MAX_COLUMNS));
    let (from, to) = (pick(rng, &DType::ALL), pick(rng, &DType::ALL));
    let order = pick(rng, &[ConvertOrder::None, ConvertOrder::None, ConvertOrder::Permuted, ConvertOrder::Any]);
    let like = |rng: &mut StdRng| ConvertValues::Like(pick(rng, &ActivationKind::ALL));
    ConvertCase {
        d_columns: match (rng.random_range(0..4), order) {
            (0, _) => columns + gap(rng, 200),
            // A permutation has all columns.
            (1, ConvertOrder::None | ConvertOrder::Any) => skewed(rng, MAX_COLUMNS),
            _ => columns,
        },
        order,
        row_factors: to == DType::F16 && rng.random(),
        values: match rng.random_range(0..4) {
            0 => ConvertValues::Special,
            1 | 2 => ConvertValues::Bits,
            _ => like(rng),
        },
        layout: ConvertLayout {
            x_transposed: rng.random_ratio(1, 3),
            x_gap: gap(rng, 40),
            d_gap: gap(rng, 40),
            x_offset: gap(rng, 8),
            d_offset: gap(rng, 8),
        },
        seed,
        ..ConvertCase::new(rows, columns, from, to)
    }
}
