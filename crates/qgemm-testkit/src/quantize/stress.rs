//! Random cases of `quantize`: any size, type, format and layout
//! from one seed.

use qgemm_formats::{DType, XFactor, XFormat};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::case::{QuantizeCase, QuantizeLayout};
use crate::activations::ActivationKind;
use crate::convert::ConvertValues;
use crate::random::{gap, pick, skewed};

const MAX_ROWS: usize = 300;
const MAX_COLUMNS: usize = 9000;

/// The random case of `seed`, of `format` if given.
pub(super) fn random_case(format: Option<XFormat>, seed: u64) -> QuantizeCase {
    let rng = &mut StdRng::seed_from_u64(seed);
    let (rows, columns) = (skewed(rng, MAX_ROWS), skewed(rng, MAX_COLUMNS));
    let formats: Vec<XFormat> = QuantizeCase::formats().collect();
    let case = QuantizeCase::new(rows, columns, pick(rng, &DType::ALL), format.unwrap_or(pick(rng, &formats)));
    let takes_factor = case.to.parts(true, None).is_some_and(|parts| parts.factor == XFactor::Given);
    let given = takes_factor && (case.factor.is_some() || rng.random());
    QuantizeCase {
        factor: given.then(|| pick(rng, &[1.0, 0.01, 3.3e-5, 7e8])),
        sum_span: case.to.desc().sum_span.filter(|_| rng.random()).map(|_| pick(rng, &[16, 32])),
        values: match rng.random_range(0..4) {
            0 => ConvertValues::Special,
            1 => ConvertValues::Bits,
            _ => ConvertValues::Like(pick(rng, &ActivationKind::ALL)),
        },
        layout: QuantizeLayout {
            x_transposed: rng.random_ratio(1, 4),
            x_gap: gap(rng, 40),
            x_offset: gap(rng, 8),
            gap: gap(rng, 5),
            offset: gap(rng, 8),
        },
        seed,
        ..case
    }
}
