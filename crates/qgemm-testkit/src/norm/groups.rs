//! The suite of `norm`: cases that every backend must pass.

use qgemm_api::{NormFunction, NormKind};
use qgemm_formats::{DType, XFormat};

use super::case::{NormAliasing, NormCase, NormGateCase, NormLayout, NormValues};
use crate::activations::ActivationKind;
use crate::suite::{Cases, group};

/// All groups.
pub(super) const GROUPS: &[Cases<NormCase>] = &[
    group("norm_sizes", "rows of one column to a million, one and many", sizes),
    group("norm_types", "every type of X, D, gamma and beta, and none", types),
    group("norm_layouts", "leading dimensions, unaligned rows, columns of zeros behind, D in the place of X", layouts),
    group("norm_values", "offset, constant, zero, huge and tiny rows, and what is not finite", values),
    group("norm_residual", "a residual added before, in every type, apart and in place", residual),
    group("norm_quantized", "results in every format of codes and scales", quantized),
    group("norm_gated", "gates before and after, groups of features, of every length, type and layout", gated),
];

/// Columns around the capacity of partial warps, warps, CTAs,
/// their registers and shared memory, and beyond.
const COLUMNS: [usize; 26] = [
    1, 2, 7, 8, 9, 31, 64, 100, 128, 255, 256, 257, 500, 512, 520, 1000, 1024, 1032, 2048, 4096, 4104, 8191, 16384,
    16392, 30_001, 70_000,
];

fn sizes() -> Vec<NormCase> {
    let mut cases = Vec::new();
    for (i, columns) in COLUMNS.into_iter().enumerate() {
        let rows = if columns > 4096 { [1, 2, 3][i % 3] } else { [1, 5, 33, 130][i % 4] };
        for kind in NormKind::ALL {
            let (x, d) = (DType::ALL[i % 3], DType::ALL[(i / 3 + usize::from(kind == NormKind::Layer)) % 3]);
            cases.push(NormCase { seed: cases.len() as u64, ..NormCase::new(rows, columns, kind, x, d) });
        }
    }
    cases.push(NormCase::new(1, 1 << 20, NormKind::Layer, DType::F16, DType::F16));
    cases
}

fn types() -> Vec<NormCase> {
    let optional: Vec<Option<DType>> = DType::ALL.into_iter().map(Some).chain([None]).collect();
    let mut cases = Vec::new();
    for x in DType::ALL {
        for d in DType::ALL {
            for (i, &gamma) in optional.iter().enumerate() {
                for kind in NormKind::ALL {
                    let beta = optional[(i + cases.len() / 4) % 4];
                    let columns = [40, 257, 1200][cases.len() % 3];
                    let case = NormCase::new(3, columns, kind, x, d);
                    let mut function =
                        if kind == NormKind::Rms { NormFunction::rms(1e-6) } else { NormFunction::layer(1e-6) };
                    (function.gamma, function.beta) = (gamma, beta);
                    cases.push(NormCase { function, seed: cases.len() as u64, ..case });
                }
            }
        }
    }
    cases
}

fn layouts() -> Vec<NormCase> {
    let plain = NormLayout::default();
    let layouts = [
        NormLayout { x_gap: 3, ..plain },
        NormLayout { d_gap: 5, ..plain },
        NormLayout { x_gap: 16, d_gap: 8, ..plain },
        NormLayout { x_offset: 1, ..plain },
        NormLayout { d_offset: 1, gamma_offset: 1, ..plain },
        NormLayout { x_offset: 2, d_offset: 3, x_gap: 1, d_gap: 1, gamma_offset: 2, ..plain },
    ];
    let mut cases = Vec::new();
    for layout in layouts {
        for (i, columns) in [33, 256, 1027, 16_500].into_iter().enumerate() {
            for (j, place) in [NormAliasing::Apart, NormAliasing::DInX].into_iter().enumerate() {
                let kind = NormKind::ALL[(i + j) % 2];
                let (x, d) = (DType::ALL[(i + j) % 3], DType::ALL[(i + 2 * j + 1) % 3]);
                let d = if place == NormAliasing::DInX { x } else { d };
                let case = NormCase::new(4, columns, kind, x, d);
                let padding = if place == NormAliasing::Apart { [0, 7, 24][cases.len() % 3] } else { 0 };
                cases.push(NormCase { padding, layout, place, seed: cases.len() as u64, ..case });
            }
        }
    }
    cases
}

fn values() -> Vec<NormCase> {
    let all = [
        NormValues::Offset,
        NormValues::Extreme,
        NormValues::ZeroRows,
        NormValues::Like(ActivationKind::AllEqual),
        NormValues::Like(ActivationKind::ConstantRows),
        NormValues::Like(ActivationKind::MixedMagnitudes),
        NormValues::Like(ActivationKind::NotFinite),
        NormValues::Like(ActivationKind::Outliers),
        NormValues::Like(ActivationKind::Denormals),
        NormValues::Like(ActivationKind::SmallIntegers),
    ];
    let in_f32 = |values| matches!(values, NormValues::Extreme | NormValues::Like(ActivationKind::MixedMagnitudes));
    let mut cases = Vec::new();
    for values in all {
        for kind in NormKind::ALL {
            for (i, columns) in [24, 100, 600, 3000, 17_000].into_iter().enumerate() {
                let x = if in_f32(values) { [DType::F32, DType::BF16][i % 2] } else { DType::ALL[i % 3] };
                let case = NormCase::new(9, columns, kind, x, DType::F32);
                cases.push(NormCase { values, seed: cases.len() as u64, ..case });
            }
        }
    }
    // Without eps, tiny rows have the norm of other rows.
    for (i, columns) in [40, 1000, 17_000].into_iter().enumerate() {
        let case = NormCase::new(7, columns, NormKind::ALL[i % 2], DType::F32, DType::F32);
        let mut case = NormCase { values: NormValues::Extreme, seed: cases.len() as u64, ..case };
        case.function.eps = 0.0;
        cases.push(case);
    }
    cases
}

fn residual() -> Vec<NormCase> {
    let places = [
        NormAliasing::Apart,
        NormAliasing::DInX,
        NormAliasing::SumInResidual,
        NormAliasing::SumInX,
        NormAliasing::Both,
    ];
    let layouts = [
        NormLayout::default(),
        NormLayout { x_gap: 3, d_gap: 2, residual_gap: 1, sum_gap: 5, ..NormLayout::default() },
        NormLayout { x_offset: 1, d_offset: 3, ..NormLayout::default() },
    ];
    let mut cases = Vec::new();
    for place in places {
        for x in DType::ALL {
            for (i, columns) in [56, 333, 2048, 17_001].into_iter().enumerate() {
                let other = |step: usize| DType::ALL[(cases.len() + step) % 3];
                let (residual, mut sum, mut d) = (other(0), other(1), other(i));
                if place.d_in_x() {
                    d = x;
                }
                if place.sum_in_residual() {
                    sum = residual;
                }
                if place == NormAliasing::SumInX {
                    sum = x;
                }
                let kind = NormKind::ALL[(cases.len() / 2) % 2];
                let case = NormCase::new(if columns > 2048 { 2 } else { 5 }, columns, kind, x, d).adding(residual, sum);
                cases.push(NormCase { place, layout: layouts[cases.len() % 3], seed: cases.len() as u64, ..case });
            }
        }
    }
    cases
}

/// Norms with a gate or in groups, of rows that fit in registers and
/// of longer ones, in every type and layout, also in place.
fn gated() -> Vec<NormCase> {
    let layouts = [
        NormLayout::default(),
        NormLayout { x_gap: 8, d_gap: 16, residual_gap: 8, ..NormLayout::default() },
        NormLayout { x_gap: 3, residual_gap: 5, d_offset: 1, gamma_offset: 1, ..NormLayout::default() },
        NormLayout { x_offset: 1, d_gap: 1, ..NormLayout::default() },
    ];
    let shapes = [
        [5, 128, 1],
        [130, 128, 1],
        [3, 256, 2],
        [2, 33, 3],
        [1, 7, 1],
        [4, 600, 1],
        [2, 1032, 4],
        [3, 4096, 8],
        [2, 2048, 1],
        [2, 8208, 1],
        [2, 17_001, 1],
        [1, 40_000, 2],
        [6, 48, 48],
    ];
    let mut cases = Vec::new();
    for [rows, columns, groups] in shapes {
        for gate in NormGateCase::ALL.map(Some).into_iter().chain([None].into_iter().filter(|_| groups > 1)) {
            let i = cases.len();
            let x = DType::ALL[i % 3];
            let place = if i % 5 == 4 { NormAliasing::DInX } else { NormAliasing::Apart };
            let d = if place.d_in_x() { x } else { DType::ALL[i / 3 % 3] };
            let case = NormCase::new(rows, columns, NormKind::ALL[usize::from(i % 7 == 6)], x, d);
            let padding = if groups == 1 && !place.d_in_x() { [0, 0, 9][i % 3] } else { 0 };
            let values = [NormValues::Like(ActivationKind::Normal), NormValues::ZeroRows][usize::from(i % 6 == 5)];
            let layout = layouts[i / 2 % 4];
            cases.push(NormCase { groups, gate, place, padding, values, layout, seed: i as u64, ..case });
        }
    }
    cases
}

/// Every quantized format from every type: short and long rows,
/// gaps, all kinds of values, residuals, and every aliasing of
/// operands except D in X.
fn quantized() -> Vec<NormCase> {
    let places = [NormAliasing::Apart, NormAliasing::SumInResidual, NormAliasing::SumInX];
    let layouts = [
        NormLayout::default(),
        NormLayout { x_gap: 3, d_gap: 2, sum_gap: 5, d_offset: 3, ..NormLayout::default() },
        NormLayout { x_gap: 8, residual_gap: 8, d_gap: 1, ..NormLayout::default() },
        NormLayout { x_offset: 1, d_offset: 1, gamma_offset: 1, ..NormLayout::default() },
    ];
    let values = [
        NormValues::Like(ActivationKind::Normal),
        NormValues::Like(ActivationKind::Outliers),
        NormValues::ZeroRows,
        NormValues::Like(ActivationKind::NotFinite),
        NormValues::Like(ActivationKind::PositiveMean),
        // Nearly equal values: a small eps amplifies the error of the
        // mean.
        NormValues::Offset,
    ];
    let mut cases: Vec<NormCase> = Vec::new();
    for (f, &to) in XFormat::ALL[DType::ALL.len()..].iter().enumerate() {
        for (i, columns) in [1, 40, 256, 515, 2048, 4100, 17_001].into_iter().enumerate() {
            let kind = NormKind::ALL[(f + i) % 2];
            let rows = if columns > 2048 { 2 } else { [1, 5, 3][i % 3] };
            let x = DType::ALL[(f + i) % 3];
            let case = NormCase::new(rows, columns, kind, x, DType::F32).quantized(to);
            let place = places[(f + i) % 3];
            let case = match (i % 3, place) {
                (0, _) => case,
                (_, NormAliasing::SumInX) => NormCase { place, ..case.adding(DType::ALL[i % 3], x) },
                (_, place) => NormCase { place, ..case.adding(DType::BF16, DType::BF16) },
            };
            let layout = layouts[(f + 2 * i) % 4];
            cases.push(NormCase { layout, values: values[(2 * f + i) % 6], seed: cases.len() as u64, ..case });
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_is_taken_with_gaps() {
        let all: Vec<NormCase> = GROUPS.iter().flat_map(|(_, cases)| cases()).collect();
        for place in [
            NormAliasing::DInX,
            NormAliasing::SumInResidual,
            NormAliasing::SumInX,
            NormAliasing::Both,
            NormAliasing::Apart,
        ] {
            assert!(all.iter().any(|case| case.place == place && case.layout.x_gap > 0), "{place:?}");
        }
    }
}
