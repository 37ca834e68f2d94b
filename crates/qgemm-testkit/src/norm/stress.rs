//! Random cases of `norm`: any size, type, residual and layout
//! from one seed.

use qgemm_api::{NormFunction, NormKind};
use qgemm_formats::{DType, XFormat};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::case::{NormAliasing, NormCase, NormGateCase, NormLayout, NormValues};
use crate::activations::ActivationKind;
use crate::random::{gap, pick, skewed};

const MAX_ROWS: usize = 200;
const MAX_COLUMNS: usize = 40_000;
/// Most elements of a case.
const MAX_ELEMENTS: usize = 300_000;

/// The random case of `seed`.
pub(super) fn random_case(to: Option<XFormat>, seed: u64) -> NormCase {
    let rng = &mut StdRng::seed_from_u64(seed);
    let columns = skewed(rng, MAX_COLUMNS);
    let rows = skewed(rng, MAX_ROWS).min((MAX_ELEMENTS / columns).max(1));
    let (kind, x) = (pick(rng, &NormKind::ALL), pick(rng, &DType::ALL));
    let dtype = |rng: &mut StdRng| pick(rng, &DType::ALL);
    let maybe = |rng: &mut StdRng| if rng.random() { Some(pick(rng, &DType::ALL)) } else { None };
    let eps = pick(rng, &[1e-5, 1e-6, 1e-12]);
    let mut function = if kind == NormKind::Rms { NormFunction::rms(eps) } else { NormFunction::layer(eps) };
    (function.gamma, function.beta) = (maybe(rng), maybe(rng));
    let added = if rng.random() { Some([dtype(rng), dtype(rng)]) } else { None };
    let apart = [NormAliasing::Apart, NormAliasing::DInX];
    let all = [
        NormAliasing::Apart,
        NormAliasing::DInX,
        NormAliasing::SumInResidual,
        NormAliasing::SumInX,
        NormAliasing::Both,
    ];
    let place = if added.is_some() { pick(rng, &all) } else { pick(rng, &apart) };
    let added = added.map(|[residual, sum]| match place {
        NormAliasing::SumInX => [residual, x],
        place if place.sum_in_residual() => [residual, residual],
        _ => [residual, sum],
    });
    let values = match rng.random_range(0..4) {
        0 => NormValues::Offset,
        1 => NormValues::ZeroRows,
        _ => NormValues::Like(pick(rng, &ActivationKind::ALL)),
    };
    let formats = &XFormat::ALL[DType::ALL.len()..];
    let drawn = rng.random_ratio(1, 3).then(|| pick(rng, formats));
    let to = to.or(drawn).filter(|_| !place.d_in_x());
    let case = NormCase {
        padding: if place.d_in_x() { 0 } else { gap(rng, 80) },
        function,
        added,
        place,
        values,
        layout: NormLayout {
            x_gap: gap(rng, 40),
            d_gap: gap(rng, 40),
            residual_gap: gap(rng, 40),
            sum_gap: gap(rng, 40),
            x_offset: gap(rng, 8),
            d_offset: gap(rng, 8),
            gamma_offset: gap(rng, 8),
        },
        seed,
        ..NormCase::new(rows, columns, kind, x, if place.d_in_x() { x } else { dtype(rng) })
    };
    if to.is_none() && added.is_none() && rng.random_ratio(1, 3) {
        let gate = rng.random_bool(0.8).then(|| pick(rng, &NormGateCase::ALL));
        let groups = [8, 3, 2].into_iter().find(|&groups| columns.is_multiple_of(groups)).filter(|_| rng.random());
        let padding = if groups.is_some() { 0 } else { case.padding };
        return NormCase { gate, groups: groups.unwrap_or(1), padding, ..case };
    }
    to.map_or(case, |to| case.quantized(to))
}
