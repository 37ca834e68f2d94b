//! The conformance suite: which cases a backend must pass, in groups that a test runner shows one by one.

use qgemm_formats::{DType, Encoding, Format};

use crate::activations::ActivationKind;
use crate::case::{ActOrder, Case, Epilogue, Layout};
use crate::weights::WeightKind;

/// Numbers of tokens that every format is tested with: around each tile width of every kernel family.
pub const TOKENS: [usize; 11] = [1, 2, 3, 7, 8, 9, 17, 33, 64, 65, 129];

/// A named part of the suite.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// Its name, which is the test's name.
    pub name: &'static str,
    /// What it shows, as half a sentence.
    pub summary: &'static str,
    /// Its cases for one format; none where the group does not concern the format.
    pub cases: fn(Format) -> Vec<Case>,
}

/// The whole suite. Shapes are split by encoding, so that a format always belongs to exactly one of them.
pub const GROUPS: &[Group] = &[
    Group {
        name: "shapes_plain",
        summary: "all shapes of unquantized formats",
        cases: |f| shapes_if(f, matches!(f.encoding, Encoding::Plain(_))),
    },
    Group {
        name: "shapes_int_offset",
        summary: "all shapes of formats with a fixed offset",
        cases: |f| shapes_if(f, matches!(f.encoding, Encoding::IntOffset { .. })),
    },
    Group {
        name: "shapes_int_affine",
        summary: "all shapes of formats with a minimum per block",
        cases: |f| shapes_if(f, f.encoding == Encoding::IntAffine),
    },
    Group {
        name: "shapes_int_zero",
        summary: "all shapes of formats with integer zero points",
        cases: |f| shapes_if(f, f.encoding == Encoding::IntZero),
    },
    Group {
        name: "shapes_codebook",
        summary: "all shapes of formats with a table of values",
        cases: |f| shapes_if(f, matches!(f.encoding, Encoding::Codebook(_))),
    },
    Group {
        name: "shapes_float8",
        summary: "all shapes of FP8 formats",
        cases: |f| shapes_if(f, matches!(f.encoding, Encoding::E4M3 | Encoding::E5M2)),
    },
    Group { name: "exact", summary: "small integers, bit for bit", cases: exact },
    Group { name: "values", summary: "every kind of weights with every kind of activations", cases: values },
    Group { name: "deep_k", summary: "long K, which kernels split", cases: deep_k },
    Group { name: "epilogue", summary: "alpha, beta and C, bias, output types", cases: epilogue },
    Group { name: "layouts", summary: "leading dimensions, unaligned rows, transposed operands", cases: layouts },
    Group { name: "act_order", summary: "permuted columns", cases: act_order },
    Group { name: "batch_invariant", summary: "bits that do not depend on the batch", cases: batch_invariant },
];

/// The group of this name.
pub fn group(name: &str) -> Option<&'static Group> {
    GROUPS.iter().find(|g| g.name == name)
}

/// Odd numbers of output features, from one up past every tile height.
const FEATURES: [usize; 4] = [33, 1, 129, 67];

/// The smallest K that the format allows and one that ends in the middle of a kernel's step (and, where the
/// format allows, of a block).
fn depths(format: Format) -> Vec<usize> {
    let block = format.block_len;
    match (block, format.ragged_k) {
        (1, _) => vec![1, 67, 256],
        (_, true) => vec![1, block - 1, 2 * block + 5],
        (16, false) => vec![16, 13 * 16],
        (_, false) => vec![block, 3 * block],
    }
}

/// A K of medium length that suits every kernel step.
fn medium_k(format: Format) -> usize {
    match format.ragged_k {
        true => 2 * format.block_len + 5,
        false => 512usize.next_multiple_of(format.block_len),
    }
}

fn shapes_if(format: Format, concerned: bool) -> Vec<Case> {
    if concerned { shapes(format) } else { Vec::new() }
}

/// Every number of tokens with every depth and every type of X.
fn shapes(format: Format) -> Vec<Case> {
    let mut cases = Vec::new();
    for m in TOKENS {
        for k in depths(format) {
            for x_dtype in DType::ALL {
                let seed = cases.len() as u64;
                let n = FEATURES[cases.len() % FEATURES.len()];
                let weights = if seed.is_multiple_of(2) { WeightKind::Quantized } else { WeightKind::Raw };
                cases.push(Case { x_dtype, d_dtype: x_dtype, weights, seed, ..Case::new(format, m, n, k) });
            }
        }
    }
    cases
}

fn exact(format: Format) -> Vec<Case> {
    let shapes = [(1, 33), (2, 1), (3, 67), (8, 129), (33, 67), (65, 65)];
    let types = [
        (DType::F16, DType::F32),
        (DType::BF16, DType::F32),
        (DType::F32, DType::F32),
        (DType::F16, DType::F16),
        (DType::BF16, DType::BF16),
        (DType::F32, DType::F16),
    ];
    let case = |((m, n), (x_dtype, d_dtype)): ((usize, usize), (DType, DType))| Case {
        x_dtype,
        d_dtype,
        weights: WeightKind::Exact,
        activations: ActivationKind::SmallIntegers,
        seed: (m * n) as u64,
        ..Case::new(format, m, n, medium_k(format))
    };
    shapes.into_iter().zip(types).map(case).collect()
}

/// Extreme weights and activations store D in f32: no range of the output is under test here.
fn values(format: Format) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, weights) in WeightKind::ALL.into_iter().enumerate() {
        for (j, activations) in ActivationKind::ALL.into_iter().enumerate() {
            let x_dtype = DType::ALL[(i + j) % 3];
            let (m, n) = [(1, 65), (5, 33), (20, 35)][(i + j / 3) % 3];
            let k = medium_k(format);
            cases.push(Case { x_dtype, weights, activations, seed: cases.len() as u64, ..Case::new(format, m, n, k) });
        }
    }
    cases
}

fn deep_k(format: Format) -> Vec<Case> {
    let k = match format.ragged_k {
        true => 4096 + format.block_len / 2,
        false => 4096 + format.block_len,
    };
    let shapes = [(1, 65, DType::F16), (2, 33, DType::BF16), (17, 33, DType::F16), (33, 17, DType::F32)];
    let case = |(m, n, x_dtype)| Case { x_dtype, weights: WeightKind::Raw, ..Case::new(format, m, n, k) };
    shapes.into_iter().map(case).collect()
}

fn epilogue(format: Format) -> Vec<Case> {
    let (f16, bf16, f32) = (Some(DType::F16), Some(DType::BF16), Some(DType::F32));
    let epilogues = [
        (-0.5, None, None),
        (1.0, None, f32),
        (1.0, None, f16),
        (2.0, Some((1.0, DType::F32)), None),
        (1.0, Some((-3.0, DType::F16)), bf16),
        (0.0, Some((0.5, DType::BF16)), f32),
        (1.0, Some((0.0, DType::F32)), f32),
    ];
    let mut cases = Vec::new();
    for (i, (alpha, c, bias)) in epilogues.into_iter().enumerate() {
        for (m, n) in [(1, 67), (19, 45)] {
            let (x_dtype, d_dtype) = (DType::ALL[i % 3], DType::ALL[(i + m) % 3]);
            let epilogue = Epilogue { alpha, c, bias };
            let seed = cases.len() as u64;
            cases.push(Case { x_dtype, d_dtype, epilogue, seed, ..Case::new(format, m, n, medium_k(format)) });
        }
    }
    cases
}

fn layouts(format: Format) -> Vec<Case> {
    let plain = Layout::default();
    let mut layouts = vec![
        Layout { x_gap: 3, ..plain },
        Layout { x_gap: 16, d_gap: 16, ..plain },
        Layout { d_gap: 5, ..plain },
        Layout { d_gap: 1, c_gap: 7, ..plain },
        Layout { offset: 1, ..plain },
        Layout { offset: 2, x_gap: 1, d_gap: 3, c_gap: 2, ..plain },
        Layout { x_transposed: true, ..plain },
        Layout { x_transposed: true, x_gap: 5, offset: 1, ..plain },
    ];
    if matches!(format.encoding, Encoding::Plain(_)) {
        layouts.push(Layout { w_transposed: true, ..plain });
        layouts.push(Layout { w_transposed: true, x_transposed: true, ..plain });
    }
    let mut cases = Vec::new();
    for (i, layout) in layouts.into_iter().enumerate() {
        for (j, (m, n)) in [(1, 33), (2, 67), (21, 64)].into_iter().enumerate() {
            let x_dtype = DType::ALL[(i + j) % 3];
            let c = (layout.c_gap != 0).then_some((0.5, DType::ALL[(i + 1) % 3]));
            cases.push(Case {
                x_dtype,
                d_dtype: x_dtype,
                layout,
                epilogue: Epilogue { c, ..Epilogue::default() },
                seed: cases.len() as u64,
                ..Case::new(format, m, n, medium_k(format))
            });
        }
    }
    cases
}

/// Only group formats come with permuted columns (GPTQ's `g_idx`).
fn act_order(format: Format) -> Vec<Case> {
    if format.encoding != Encoding::IntZero {
        return Vec::new();
    }
    let mut cases = Vec::new();
    for order in [ActOrder::Full, ActOrder::Padded] {
        for (i, m) in [1, 2, 9, 65].into_iter().enumerate() {
            let x_dtype = DType::ALL[i % 3];
            let k = 3 * format.block_len + 9;
            let seed = cases.len() as u64;
            let layout = Layout { x_transposed: i == 2, x_gap: i, ..Layout::default() };
            let act_order = Some(order);
            cases.push(Case { x_dtype, act_order, layout, seed, ..Case::new(format, m, 35, k) });
        }
    }
    cases
}

fn batch_invariant(format: Format) -> Vec<Case> {
    let case = |(i, m): (usize, usize)| Case {
        x_dtype: DType::ALL[i % 3],
        batch_invariant: true,
        weights: WeightKind::Raw,
        seed: i as u64,
        ..Case::new(format, m, 67, medium_k(format))
    };
    [2, 3, 9, 17, 65].into_iter().enumerate().map(case).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_has_shapes_in_exactly_one_group_and_all_tokens() {
        for format in Format::all() {
            let mut with_shapes = 0;
            for group in GROUPS.iter().filter(|g| g.name.starts_with("shapes_")) {
                let cases = (group.cases)(format);
                if !cases.is_empty() {
                    with_shapes += 1;
                    for m in TOKENS {
                        for x in DType::ALL {
                            assert!(cases.iter().any(|c| c.m == m && c.x_dtype == x), "{format} lacks {m} tokens, {x}");
                        }
                    }
                }
            }
            assert_eq!(with_shapes, 1, "{format}");
        }
    }

    #[test]
    fn every_case_suits_its_format() {
        for format in Format::all() {
            for case in GROUPS.iter().flat_map(|g| (g.cases)(format)) {
                format.check_k(case.k).unwrap_or_else(|e| panic!("{case}: {e}"));
            }
        }
    }
}
