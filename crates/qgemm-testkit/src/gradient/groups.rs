//! The suite of `gradient`: cases that every backend must pass.

use qgemm_formats::{DType, Encoding, Format};

use super::case::{GradientCase, GradientExperts, RowGroups};
use crate::gemm::{ActOrder, Case, Epilogue, Layout};
use crate::suite::Group;
use crate::weights::WeightKind;

/// A group and its cases for a format; empty if the group does
/// not apply to the format.
type Cases = (Group, fn(Format) -> Vec<GradientCase>);

const fn group(name: &'static str, summary: &'static str, cases: fn(Format) -> Vec<GradientCase>) -> Cases {
    (Group { name, summary }, cases)
}

/// All groups.
pub(super) const GROUPS: &[Cases] = &[
    group("gradient_formats", "dX through every format and type, around tiles in every direction", formats),
    group("gradient_exact", "small integers, bit for bit", exact),
    group("gradient_nan_codes", "NaN among the codes and scales of weights", nan_codes),
    group("gradient_parts", "weights that are decoded in parts, accumulation, leading dimensions", parts),
    group("gradient_order", "permuted columns", order),
    group("gradient_gated", "gated pairs, whose dY has the gradients by the gate's sums, then by the up's", gated),
    group("gradient_experts", "dX through stacks of experts, each of which has rows of its own", experts),
];

/// Sizes of tokens and output features: 1, and around tile edges.
const SIZES: [[usize; 2]; 4] = [[1, 1], [5, 67], [33, 16], [70, 130]];

/// A K that ends inside a k-tile, and inside a block if the
/// format allows.
fn ragged_k(format: Format) -> usize {
    match (format.block_len, format.ragged_k) {
        (1, _) => 131,
        (block, true) => 2 * block + 5,
        (block, false) => (64 / block + 1) * block,
    }
}

fn dtype(i: usize) -> DType {
    DType::ALL[i % DType::ALL.len()]
}

fn formats(format: Format) -> Vec<GradientCase> {
    let k = ragged_k(format);
    let case = |(i, [tokens, n]): (usize, [usize; 2])| {
        let case =
            GradientCase::new(format, tokens, n, if i == 0 { 512usize.next_multiple_of(format.block_len) } else { k });
        let of = |dy: usize| {
            let case = case.of_types(dtype(dy), dtype(i + dy));
            GradientCase { layer: Case { weights: WeightKind::Raw, seed: (i + dy) as u64, ..case.layer }, ..case }
        };
        [of(i), of(i + 1)]
    };
    SIZES.into_iter().enumerate().flat_map(case).collect()
}

fn exact(format: Format) -> Vec<GradientCase> {
    let case = |(i, dy): (usize, DType)| {
        let layer = Case { seed: i as u64, ..Case::new(format, 19, 40, ragged_k(format)).with_exact_sums() };
        GradientCase { accumulate: (i == 1).then_some(-2.0), ..GradientCase::of(layer).of_types(dy, DType::F32) }
    };
    DType::ALL.into_iter().enumerate().map(case).collect()
}

fn nan_codes(format: Format) -> Vec<GradientCase> {
    let weights = WeightKind::Nan;
    if !weights.suits(format) {
        return Vec::new();
    }
    let case = |(i, [tokens, n]): (usize, [usize; 2])| {
        let layer = Case { weights, gated: i == 3, seed: i as u64, ..Case::new(format, tokens, n, ragged_k(format)) };
        GradientCase::of(layer).of_types(dtype(i), dtype(i + 1))
    };
    SIZES.into_iter().enumerate().map(case).collect()
}

fn parts(format: Format) -> Vec<GradientCase> {
    let plain = Layout::default();
    let layouts = [
        plain,
        Layout { x_gap: 3, d_gap: 5, ..plain },
        Layout { x_gap: 8, d_gap: 16, ..plain },
        Layout { offset: 1, ..plain },
    ];
    let k = 3 * 64usize.next_multiple_of(format.block_len);
    let case = |(i, layout)| {
        let epilogue = Epilogue { alpha: [1.0, -0.5][i % 2], channel_scale: i % 2 == 1, ..Epilogue::default() };
        let layer = Case { layout, epilogue, seed: i as u64, ..Case::new(format, 9 + 30 * i, 48, k) };
        let accumulate = [None, Some(1.0), Some(0.0), Some(-0.5)][i];
        GradientCase { accumulate, max_scratch: 0, ..GradientCase::of(layer).of_types(dtype(i), dtype(i / 2)) }
    };
    layouts.into_iter().enumerate().map(case).collect()
}

/// One part and several, whole and partial groups of a gated
/// pair; some sums are exact.
fn gated(format: Format) -> Vec<GradientCase> {
    let k = ragged_k(format);
    let case = |(i, [tokens, n]): (usize, [usize; 2])| {
        let layout = Layout { x_gap: i % 2 * 8, d_gap: i % 3, ..Layout::default() };
        let epilogue = Epilogue { channel_scale: i == 1, ..Epilogue::default() };
        let layer = Case { gated: true, epilogue, layout, seed: i as u64, ..Case::new(format, tokens, n, k) };
        let layer = if i == 2 { layer.with_exact_sums() } else { layer };
        let case = GradientCase::of(layer).of_types(dtype(i), dtype(2 * i + 1));
        GradientCase {
            accumulate: (i == 3).then_some(1.0),
            max_scratch: if i == 3 { 0 } else { case.max_scratch },
            ..case
        }
    };
    [[3, 5], [17, 72], [9, 40], [66, 129]].into_iter().enumerate().map(case).collect()
}

/// Plain and gated stacks, shared weights, column orders, parts
/// of features, and every assignment of rows.
fn experts(format: Format) -> Vec<GradientCase> {
    let k = ragged_k(format);
    let sizes = [[40, 24, 5], [130, 67, 3], [9, 40, 12], [1, 16, 2], [70, 33, 4], [25, 72, 1]];
    let mut cases = Vec::new();
    for [rows, n, count] in sizes {
        for gated in [false, true] {
            let i = cases.len();
            let layout = Layout { x_gap: i % 2 * 8, d_gap: i % 3 * 3, ..Layout::default() };
            let epilogue = Epilogue { alpha: [1.0, -0.5][i % 2], channel_scale: i % 4 == 3, ..Epilogue::default() };
            let layer = Case { gated, epilogue, layout, seed: i as u64, ..Case::new(format, rows, n, k) };
            let layer = if i % 6 == 4 { layer.with_exact_sums() } else { layer };
            let case = GradientCase::of(layer).of_types(dtype(i), dtype(i / 2));
            let groups = RowGroups::ALL[(i + i / 5) % RowGroups::ALL.len()];
            cases.push(GradientCase {
                accumulate: [None, None, Some(1.0), Some(-0.5)][(i + i / 4) % 4],
                max_scratch: if i % 3 == 1 { 0 } else { case.max_scratch },
                experts: Some(GradientExperts { count, shared: i % 5 == 4, rows: groups }),
                ..case
            });
        }
    }
    if format.encoding == Encoding::IntZero {
        for (i, gated) in [false, true].into_iter().enumerate() {
            let layer = Case::new(format, 50, 35, 3 * format.block_len + 9);
            let layer = Case { act_order: Some([ActOrder::Full, ActOrder::Padded][i]), gated, ..layer };
            let case = GradientCase::of(layer).of_types(dtype(i + 1), dtype(i));
            for rows in [RowGroups::Even, RowGroups::Wrong] {
                let experts = Some(GradientExperts { count: 3, shared: false, rows });
                cases.push(GradientCase { experts, max_scratch: i << 30, ..case });
            }
        }
    }
    cases
}

fn order(format: Format) -> Vec<GradientCase> {
    if format.encoding != Encoding::IntZero {
        return Vec::new();
    }
    let mut cases = Vec::new();
    for act_order in [ActOrder::Full, ActOrder::Padded] {
        for max_scratch in [0, 1 << 30] {
            let i = cases.len();
            let layer = Case { act_order: Some(act_order), ..Case::new(format, 21, 35, 3 * format.block_len + 9) };
            let case = GradientCase::of(Case { seed: i as u64, ..layer }).of_types(dtype(i), dtype(i + 1));
            cases.push(GradientCase { max_scratch, ..case });
        }
    }
    cases
}
