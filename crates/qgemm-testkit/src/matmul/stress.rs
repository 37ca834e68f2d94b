//! Random cases of `matmul`: any size, layout, type and epilogue
//! from one seed.

use qgemm_formats::DType;
use qgemm_hal::{Activation, FactorFormat, MatmulLayout, XPrecision};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::case::{MatmulCase, MatmulStrides};
use crate::activations::ActivationKind;
use crate::random::{gap, pick, skewed};

const MOST_ROWS: usize = 400;
const MOST_COLUMNS: usize = 400;
const MOST_K: usize = 3000;
const MOST_BATCH: usize = 6;

/// The random case of `seed`.
pub(super) fn random_case(seed: u64) -> MatmulCase {
    let rng = &mut StdRng::seed_from_u64(seed);
    let shape = [skewed(rng, MOST_ROWS), skewed(rng, MOST_COLUMNS), skewed(rng, MOST_K)];
    let batch = if rng.random_ratio(1, 3) { skewed(rng, MOST_BATCH) } else { 1 };
    let same = rng.random_ratio(3, 4);
    let a = pick(rng, &FactorFormat::ALL);
    let b = if same { a } else { pick(rng, &FactorFormat::ALL) };
    // Block scales apply to both factors.
    let (a, b) =
        if a.has_scales() || b.has_scales() { (FactorFormat::E4M3Block, FactorFormat::E4M3Block) } else { (a, b) };
    let mut scale = |format: FactorFormat| {
        let scaled = format == FactorFormat::E4M3 && rng.random();
        scaled.then(|| pick(rng, &[2.0, -0.5, 0.3]))
    };
    let scales = [scale(a), scale(b)];
    let added = rng.random_range(0..3);
    // Multiples of 16 bytes in half of the cases, because kernels
    // have a fast path for these.
    let unit = if rng.random() { 8 } else { 1 };
    let mut any_gap = |most: usize| gap(rng, most) * unit;
    let gaps = [any_gap(20), any_gap(20), any_gap(20)];
    let values = pick(rng, &[ActivationKind::Normal, ActivationKind::SmallIntegers, ActivationKind::PositiveMean]);
    let case = MatmulCase {
        k_grouped: false,
        rows_grouped: false,
        operand_precision: [XPrecision::Exact, XPrecision::Tf32, XPrecision::Bf16x3][(seed % 3) as usize],
        shape,
        batch,
        layout: pick(rng, &MatmulLayout::ALL),
        types: [a, b],
        scales,
        d_dtype: pick(rng, &DType::ALL),
        alpha: pick(rng, &[1.0, 1.0, -2.0, 0.5]),
        c: (added == 0).then(|| (pick(rng, &[1.0, -0.5]), pick(rng, &DType::ALL))),
        accumulate: (added == 1).then_some(1.0),
        bias: rng.random::<bool>().then(|| pick(rng, &DType::ALL)),
        activation: if rng.random() { Activation::Identity } else { pick(rng, &Activation::ALL) },
        values: [values; 2],
        strides: MatmulStrides {
            gaps,
            between: gap(rng, 4),
            offset: gap(rng, 4) * unit,
            one_a: rng.random_ratio(1, 4),
            one_b: rng.random_ratio(1, 4),
            one_c: rng.random_ratio(1, 4),
            d_beside: rng.random_ratio(1, 4),
        },
        every_kernel: false,
        slope: added == 0 && seed % 4 == 1,
        seed,
    };
    let case = match a.has_scales() {
        true => MatmulCase { batch: 1, layout: MatmulLayout::Nt, ..case },
        false => case,
    };
    let products = if rng.random_ratio(1, 6) { skewed(rng, 2 * MOST_BATCH) } else { 0 };
    match products {
        0 => case,
        // Every device supports row groups of one plain type.
        _ if same && a.plain().is_some() && seed.is_multiple_of(2) => case.rows_grouped(products),
        _ => case.k_grouped(products),
    }
}
