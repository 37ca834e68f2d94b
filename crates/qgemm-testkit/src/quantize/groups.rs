//! The suite of `quantize`: cases that every backend must pass.

use qgemm_formats::{DType, XFactor, XFormat};

use super::case::{QuantizeCase, QuantizeLayout};
use crate::activations::ActivationKind;
use crate::convert::ConvertValues;
use crate::suite::{Cases, group};

/// All groups.
pub(super) const GROUPS: &[Cases<QuantizeCase>] = &[
    group("quantize_formats", "every format of activations from every type at every size", formats),
    group(
        "quantize_layouts",
        "row strides, unaligned and transposed X, gaps between rows of codes, scales and sums",
        layouts,
    ),
    group("quantize_special", "infinities, NaN, zeros, the ends of ranges, subnormal numbers, ties", special),
    group("quantize_factors", "factors that are given, those without an inverse among them, and sums of 16", factors),
];

/// Rows and columns: one, odd, whole blocks, more than a CTA
/// holds.
const SIZES: [(usize, usize); 7] = [(1, 1), (1, 37), (5, 16), (3, 257), (17, 64), (2, 4101), (3, 512)];

/// One case per format and type.
fn pairs(make: impl Fn(usize, DType, XFormat) -> QuantizeCase) -> Vec<QuantizeCase> {
    let pairs = QuantizeCase::formats().flat_map(|to| DType::ALL.map(|from| (from, to)));
    pairs.enumerate().map(|(i, (from, to))| make(i, from, to)).collect()
}

fn formats() -> Vec<QuantizeCase> {
    let mut cases = Vec::new();
    for (rows, columns) in SIZES {
        let seed = cases.len() as u64;
        cases.extend(pairs(|_, from, to| QuantizeCase { seed, ..QuantizeCase::new(rows, columns, from, to) }));
    }
    // A row that exceeds shared memory.
    let wide = |to| QuantizeCase::new(1, 60_100, DType::F32, to);
    cases.extend([XFormat::Int8Token, XFormat::E4M3Token, XFormat::NvFp4].map(wide));
    cases
}

fn layouts() -> Vec<QuantizeCase> {
    let plain = QuantizeLayout::default();
    let all = [
        QuantizeLayout { x_gap: 3, ..plain },
        QuantizeLayout { x_gap: 16, gap: 1, offset: 4, ..plain },
        QuantizeLayout { x_offset: 1, gap: 2, offset: 1, ..plain },
        QuantizeLayout { x_transposed: true, x_gap: 5, offset: 3, ..plain },
    ];
    let mut cases = Vec::new();
    for layout in all {
        let seed = cases.len() as u64;
        cases.extend(pairs(|i, from, to| {
            let (rows, columns) = [(3, 67), (21, 64), (34, 300)][(i / 2) % 3];
            QuantizeCase { layout, seed, ..QuantizeCase::new(rows, columns, from, to) }
        }));
    }
    cases
}

fn special() -> Vec<QuantizeCase> {
    let like = ConvertValues::Like;
    let kinds = [
        ConvertValues::Special,
        ConvertValues::Bits,
        like(ActivationKind::MixedMagnitudes),
        like(ActivationKind::NotFinite),
        like(ActivationKind::Denormals),
    ];
    let mut cases = Vec::new();
    for values in kinds {
        for (rows, columns) in [(9, 137), (4, 640)] {
            let seed = cases.len() as u64;
            cases.extend(pairs(|_, from, to| QuantizeCase {
                values,
                seed,
                ..QuantizeCase::new(rows, columns, from, to)
            }));
        }
    }
    cases
}

fn factors() -> Vec<QuantizeCase> {
    let factors = [1.0, 0.003, 1.7e30, 2f32.powi(-126), 2f32.powi(126), 0.0, -1.0, 1e-40, f32::INFINITY, f32::NAN];
    let takes = |to: &XFormat| to.parts(true, None).is_some_and(|parts| parts.factor == XFactor::Given);
    let mut cases = Vec::new();
    for to in QuantizeCase::formats().filter(takes) {
        for (i, factor) in factors.into_iter().enumerate() {
            let values =
                [ConvertValues::Bits, ConvertValues::Special, ConvertValues::Like(ActivationKind::Normal)][i % 3];
            let case = QuantizeCase::new(5, 200, DType::ALL[i % 3], to);
            cases.push(QuantizeCase { factor: Some(factor), values, seed: i as u64, ..case });
        }
    }
    let has_sums = |to: &XFormat| to.desc().sum_span.is_some();
    for to in QuantizeCase::formats().filter(has_sums) {
        for (from, span) in DType::ALL.into_iter().flat_map(|from| [16, 32].map(|span| (from, span))) {
            cases.push(QuantizeCase { sum_span: Some(span), ..QuantizeCase::new(7, 333, from, to) });
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_and_type_is_strided_transposed_and_special() {
        let all: Vec<QuantizeCase> = GROUPS.iter().flat_map(|(_, cases)| cases()).collect();
        for (from, to) in DType::ALL.into_iter().flat_map(|from| QuantizeCase::formats().map(move |to| (from, to))) {
            let of_pair = || all.iter().filter(|case| case.from == from && case.to == to);
            assert!(of_pair().any(|case| case.layout.x_transposed) && of_pair().any(|case| case.layout.x_offset > 0));
            assert!(of_pair().any(|case| case.values == ConvertValues::Special) && of_pair().any(|c| c.columns > 4096));
        }
    }
}
