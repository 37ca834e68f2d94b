//! The suite of `convert`: cases that every backend must pass.

use qgemm_formats::DType;

use super::case::{ConvertCase, ConvertLayout, ConvertOrder, ConvertValues};
use crate::activations::ActivationKind;
use crate::suite::{Cases, group};

/// All groups.
pub(super) const GROUPS: &[Cases<ConvertCase>] = &[
    group("convert_types", "every pair of types at every size", types),
    group("convert_layouts", "leading dimensions, unaligned rows, transposed X, columns left out and added", layouts),
    group("convert_gathered", "columns in any order, and entries that are none", gathered),
    group("convert_special", "infinities, NaN, the ends of ranges, subnormal numbers, ties", special),
    group("convert_row_factors", "rows of any magnitude in f16", row_factors),
];

/// Rows and columns: one, odd, whole 16-byte vectors, and more
/// than a tile or a CTA.
const SIZES: [(usize, usize); 8] = [(1, 1), (1, 37), (5, 1), (3, 65), (8, 64), (67, 33), (2, 4101), (130, 72)];

/// One case per pair of types.
fn pairs(make: impl Fn(usize, DType, DType) -> ConvertCase) -> Vec<ConvertCase> {
    let pairs = DType::ALL.into_iter().flat_map(|from| DType::ALL.map(|to| (from, to)));
    pairs.enumerate().map(|(i, (from, to))| make(i, from, to)).collect()
}

fn types() -> Vec<ConvertCase> {
    let mut cases = Vec::new();
    for (rows, columns) in SIZES {
        for x_transposed in [false, true] {
            let layout = ConvertLayout { x_transposed, ..ConvertLayout::default() };
            let seed = cases.len() as u64;
            cases.extend(pairs(|_, from, to| ConvertCase {
                layout,
                seed,
                ..ConvertCase::new(rows, columns, from, to)
            }));
        }
    }
    cases
}

/// Layouts for which kernels may have different code.
fn all_layouts() -> [ConvertLayout; 9] {
    let plain = ConvertLayout::default();
    [
        ConvertLayout { x_gap: 3, ..plain },
        ConvertLayout { d_gap: 5, ..plain },
        ConvertLayout { x_gap: 16, d_gap: 8, ..plain },
        ConvertLayout { x_offset: 1, ..plain },
        ConvertLayout { d_offset: 1, ..plain },
        ConvertLayout { x_offset: 2, d_offset: 3, x_gap: 1, d_gap: 1, ..plain },
        ConvertLayout { x_transposed: true, x_gap: 5, ..plain },
        ConvertLayout { x_transposed: true, x_offset: 1, d_gap: 7, ..plain },
        ConvertLayout { x_transposed: true, d_offset: 1, ..plain },
    ]
}

fn layouts() -> Vec<ConvertCase> {
    let mut cases = Vec::new();
    for layout in all_layouts() {
        let seed = cases.len() as u64;
        cases.extend(pairs(|i, from, to| {
            let (rows, columns) = [(3, 67), (21, 64), (34, 40)][i % 3];
            // Zero columns past those of X, and left-out columns of X.
            let d_columns = [columns, columns + 24, columns - 8, columns + 3][(i + seed as usize / 9) % 4];
            ConvertCase { d_columns, layout, seed, ..ConvertCase::new(rows, columns, from, to) }
        }));
    }
    // More zeros than are written at once.
    cases.extend(pairs(|i, from, to| ConvertCase { d_columns: 9001 + i, ..ConvertCase::new(1, 60, from, to) }));
    cases
}

fn gathered() -> Vec<ConvertCase> {
    let plain = ConvertLayout::default();
    let layouts = [
        plain,
        ConvertLayout { x_transposed: true, ..plain },
        ConvertLayout { x_gap: 3, d_gap: 5, ..plain },
        ConvertLayout { x_transposed: true, x_gap: 1, d_offset: 1, ..plain },
        ConvertLayout { x_offset: 1, d_offset: 3, ..plain },
    ];
    let mut cases = Vec::new();
    for layout in layouts {
        for (rows, columns, d_columns) in [(1, 40, 40), (19, 67, 96), (33, 130, 45)] {
            let seed = cases.len() as u64;
            cases.extend(pairs(|i, from, to| {
                // A permutation has all columns.
                let permuted = d_columns >= columns && i % 2 == 0;
                let order = if permuted { ConvertOrder::Permuted } else { ConvertOrder::Any };
                ConvertCase { d_columns, order, layout, seed, ..ConvertCase::new(rows, columns, from, to) }
            }));
        }
    }
    cases
}

fn special() -> Vec<ConvertCase> {
    let mut cases = Vec::new();
    for values in [ConvertValues::Special, ConvertValues::Bits] {
        for (rows, columns, x_transposed) in [(4, 64, false), (9, 37, false), (37, 40, true)] {
            let layout = ConvertLayout { x_transposed, ..ConvertLayout::default() };
            let seed = cases.len() as u64;
            let case = |_, from, to| ConvertCase { values, layout, seed, ..ConvertCase::new(rows, columns, from, to) };
            cases.extend(pairs(case));
        }
    }
    cases
}

fn row_factors() -> Vec<ConvertCase> {
    let kinds = [
        ConvertValues::Like(ActivationKind::MixedMagnitudes),
        ConvertValues::Like(ActivationKind::NotFinite),
        ConvertValues::Special,
        ConvertValues::Bits,
        ConvertValues::Like(ActivationKind::Denormals),
    ];
    let plain = ConvertLayout::default();
    let layouts = [
        plain,
        ConvertLayout { x_gap: 3, d_gap: 8, ..plain },
        ConvertLayout { x_transposed: true, x_gap: 1, ..plain },
        ConvertLayout { x_offset: 1, d_offset: 1, ..plain },
    ];
    let mut cases = Vec::new();
    for (i, from) in DType::ALL.into_iter().enumerate() {
        for (j, (rows, columns)) in [(1, 1), (6, 64), (13, 2065), (65, 40)].into_iter().enumerate() {
            for (l, layout) in layouts.into_iter().enumerate() {
                let values = kinds[(i + j + l) % kinds.len()];
                let order = if (j + l) % 3 == 2 { ConvertOrder::Any } else { ConvertOrder::None };
                let d_columns = columns + [0, 24][l % 2];
                let case = ConvertCase {
                    d_columns,
                    order,
                    values,
                    layout,
                    seed: cases.len() as u64,
                    ..ConvertCase::new(rows, columns, from, DType::F16)
                };
                cases.push(ConvertCase { row_factors: true, ..case });
            }
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_types_is_transposed_gathered_and_unaligned() {
        let all: Vec<ConvertCase> = GROUPS.iter().flat_map(|(_, cases)| cases()).collect();
        for from in DType::ALL {
            for to in DType::ALL {
                let of_pair = || all.iter().filter(|case| (case.from, case.to) == (from, to));
                assert!(of_pair().any(|case| case.layout.x_transposed && case.order != ConvertOrder::None));
                assert!(of_pair().any(|case| case.layout.d_offset != 0) && of_pair().any(|case| case.rows > 64));
                assert!(
                    of_pair().any(|case| case.d_columns < case.columns)
                        && of_pair().any(|case| case.d_columns > case.columns)
                );
                assert!(of_pair().any(|case| case.values == ConvertValues::Special));
            }
            assert!(all.iter().any(|case| case.from == from && case.row_factors));
        }
    }
}
