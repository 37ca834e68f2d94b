//! The suite of `gemm`: cases that every backend must pass.

use qgemm_formats::{DType, Encoding, Format, XFormat};
use qgemm_hal::{Activation, XPrecision};

use super::activation::{BENT, OF_PAIRS};
use super::case::{ActOrder, Case, Epilogue, Layout};
use super::configurations::{REPRESENTATIVES, configurations, with_block_scales_of};
use super::forms_of_x::{norm, x_formats, x_prologue};
use super::projections::{fused, projection};
use super::sizes::{FEATURES, TOKENS, depths, medium_k};
use crate::activations::ActivationKind;
use crate::suite::Group;
use crate::weights::WeightKind;

/// A group and its cases for a format; empty if the group does
/// not apply to the format.
type Cases = (Group, fn(Format) -> Vec<Case>);

const fn group(name: &'static str, summary: &'static str, cases: fn(Format) -> Vec<Case>) -> Cases {
    (Group { name, summary }, cases)
}

/// All groups. Shapes are split by encoding, so that a format
/// belongs to exactly one such group.
pub(super) const GROUPS: &[Cases] = &[
    group("shapes_plain", "all shapes of unquantized formats", |f| {
        shapes_if(f, matches!(f.encoding, Encoding::Plain(_)))
    }),
    group("shapes_int_offset", "all shapes of formats with a fixed offset", |f| {
        shapes_if(f, matches!(f.encoding, Encoding::IntOffset { .. }))
    }),
    group("shapes_int_affine", "all shapes of formats with a minimum per block", |f| {
        shapes_if(f, f.encoding == Encoding::IntAffine)
    }),
    group("shapes_int_zero", "all shapes of formats with integer zero points", |f| {
        shapes_if(f, f.encoding == Encoding::IntZero)
    }),
    group("shapes_codebook", "all shapes of formats with a table of values", |f| {
        shapes_if(f, matches!(f.encoding, Encoding::Codebook(_)))
    }),
    group("shapes_float8", "all shapes of FP8 formats", |f| {
        shapes_if(f, matches!(f.encoding, Encoding::E4M3 | Encoding::E5M2))
    }),
    group("exact", "small integers, bit for bit", exact),
    group("values", "every kind of weights with every kind of activations", values),
    group("deep_k", "long K, which kernels split", deep_k),
    group("epilogue", "alpha, beta and C, bias, output types", epilogue),
    group("scales", "factors of tokens and of output features, residuals", scales),
    group("activations", "every activation, of exact sums and of ordinary ones", activations),
    group("gated", "gated pairs with everything that the epilogue adds", gated),
    group("whole_tiles", "activations, gated pairs and residuals where tiles are whole", whole_tiles),
    group("layouts", "leading dimensions, unaligned rows, transposed operands", layouts),
    group("act_order", "permuted columns", act_order),
    group("x_prologue", "activations converted for matrix instructions", x_prologue),
    group("x_formats", "activations given in codes and scales, of every format", x_formats),
    group("nan_codes", "NaN among the codes and scales of weights and of X", nan_codes),
    group("norm", "X that is normalized first", norm),
    group("fused", "weights fused of several, each with an output of its own", fused),
    group("projection", "a few tokens, normalized and to outputs of their own, where one launch can do it", projection),
    group("batch_invariant", "bits that do not depend on the batch", batch_invariant),
    group("configurations", "every tile that could be chosen, whole and cut", configurations),
];

fn shapes_if(format: Format, concerned: bool) -> Vec<Case> {
    if concerned { shapes(format) } else { Vec::new() }
}

/// Every token count with every depth and every type of X.
fn shapes(format: Format) -> Vec<Case> {
    let mut cases = Vec::new();
    for m in TOKENS {
        for k in depths(format) {
            for x_dtype in DType::ALL {
                let seed = cases.len() as u64;
                let n = FEATURES[cases.len() % FEATURES.len()];
                let weights = if seed.is_multiple_of(2) { WeightKind::Quantized } else { WeightKind::Raw };
                let x_precision = if (seed / 2).is_multiple_of(2) { XPrecision::Auto } else { XPrecision::F16 };
                cases.push(Case {
                    x_dtype,
                    x_precision,
                    d_dtype: x_dtype,
                    weights,
                    seed,
                    ..Case::new(format, m, n, k)
                });
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
    let case = |((m, n), (x_dtype, d_dtype)): ((usize, usize), (DType, DType))| {
        let case = Case::new(format, m, n, medium_k(format)).with_exact_sums();
        Case { x_dtype, d_dtype, seed: (m * n) as u64, ..case }
    };
    shapes.into_iter().zip(types).map(case).collect()
}

/// Extreme weights and activations. D is f32, because the
/// output's range is not under test.
fn values(format: Format) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, weights) in WeightKind::ALL.into_iter().enumerate() {
        for (j, activations) in ActivationKind::ALL.into_iter().enumerate() {
            let x_dtype = DType::ALL[(i + j) % 3];
            let (m, n) = [(1, 65), (5, 33), (20, 35)][(i + j / 3) % 3];
            let x_precision = [XPrecision::F16, XPrecision::Auto][(i + j) % 2];
            let seed = cases.len() as u64;
            let case = Case::new(format, m, n, medium_k(format));
            cases.push(Case { x_dtype, x_precision, weights, activations, seed, ..case });
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
            let epilogue = Epilogue { alpha, c, bias, ..Epilogue::default() };
            let seed = cases.len() as u64;
            cases.push(Case { x_dtype, d_dtype, epilogue, seed, ..Case::new(format, m, n, medium_k(format)) });
        }
    }
    cases
}

/// Scales, alone and together; residuals with the layout of D and
/// with another.
fn scales(format: Format) -> Vec<Case> {
    let none = Epilogue::default();
    let (f16, bf16, f32) = (Some(DType::F16), Some(DType::BF16), Some(DType::F32));
    let epilogues = [
        (Epilogue { token_scale: true, ..none }, 0, WeightKind::Exact),
        (Epilogue { channel_scale: true, ..none }, 0, WeightKind::Exact),
        (Epilogue { residual: f32, ..none }, 0, WeightKind::Exact),
        (Epilogue { residual: f16, bias: bf16, ..none }, 3, WeightKind::Raw),
        (Epilogue { residual: bf16, c: Some((0.5, DType::F16)), token_scale: true, ..none }, 16, WeightKind::Raw),
        (
            Epilogue { alpha: 0.25, residual: f16, token_scale: true, channel_scale: true, bias: f32, ..none },
            5,
            WeightKind::Quantized,
        ),
    ];
    let mut cases = Vec::new();
    for (i, (epilogue, residual_gap, weights)) in epilogues.into_iter().enumerate() {
        for (j, (m, n)) in [(2, 67), (19, 48)].into_iter().enumerate() {
            let case = Case { weights, ..Case::new(format, m, n, medium_k(format)) };
            cases.push(Case {
                x_dtype: DType::ALL[(i + j) % 3],
                d_dtype: DType::ALL[(i + 2 * j) % 3],
                epilogue,
                layout: Layout { residual_gap, offset: residual_gap % 4, ..Layout::default() },
                seed: cases.len() as u64,
                ..if weights == WeightKind::Exact { case.with_exact_sums() } else { case }
            });
        }
    }
    cases
}

fn activations(format: Format) -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, activation) in Activation::ALL.into_iter().skip(1).enumerate() {
        // Exact sums show the activation's error; the other cases add
        // all other errors.
        let exact = Epilogue { alpha: BENT, activation, ..Epilogue::default() };
        let bias = Some(DType::ALL[i % 3]);
        let c = Some((0.25, DType::ALL[(i + 1) % 3]));
        let added = Epilogue { bias, c, token_scale: true, residual: Some(DType::ALL[(i + 2) % 3]), ..exact };
        let shapes = [(1, 65, exact), (33, 40, exact), (3, 33, added), (17, 65, added)];
        for (j, (m, n, epilogue)) in shapes.into_iter().enumerate() {
            let case = Case::new(format, m, n, medium_k(format));
            cases.push(Case {
                x_dtype: DType::ALL[(i + j) % 3],
                d_dtype: DType::ALL[(i + j / 2) % 3],
                epilogue,
                seed: cases.len() as u64,
                ..match j < 2 {
                    true => case.with_exact_sums(),
                    false => Case { activations: ActivationKind::PositiveMean, ..case },
                }
            });
        }
    }
    cases
}

/// N around the eights in which rows are interleaved, and K that
/// kernels split.
fn gated(format: Format) -> Vec<Case> {
    let long = match format.ragged_k {
        true => 4096 + format.block_len / 2,
        false => 4096 + format.block_len,
    };
    let k = medium_k(format);
    let pair = Epilogue { alpha: BENT, ..Epilogue::default() };
    let scaled = Epilogue { token_scale: true, channel_scale: true, ..pair };
    let all = Epilogue { bias: Some(DType::F16), residual: Some(DType::F32), ..scaled };
    let case = |m, n, k, epilogue| Case { gated: true, epilogue, ..Case::new(format, m, n, k) };
    let mut cases = vec![
        case(1, 67, k, pair).with_exact_sums(),
        case(9, 1, k, pair).with_exact_sums(),
        case(2, 8, k, scaled).with_exact_sums(),
        case(33, 136, k, Epilogue { bias: Some(DType::F32), ..pair }).with_exact_sums(),
        case(65, 40, k, Epilogue { bias: Some(DType::BF16), residual: Some(DType::F16), ..pair }),
        case(3, 133, k, all),
        case(1, 29, long, Epilogue { alpha: BENT / 2.0, ..all }),
        case(20, 24, long, Epilogue { alpha: BENT / 2.0, ..pair }),
        case(1, 35, k, Epilogue { bias: Some(DType::BF16), ..pair }).with_exact_sums(),
        case(17, 40, k, Epilogue { bias: Some(DType::BF16), ..scaled }),
        case(4, 72, k, all),
    ];
    for (i, case) in cases.iter_mut().enumerate() {
        let activation = match i {
            8.. => [OF_PAIRS[0], OF_PAIRS[1], Activation::ReluSquared][i % 8],
            _ => [1, 2, 3, 4, 0].map(|a| Activation::ALL[a])[(i + 1) % 5],
        };
        case.epilogue.activation = activation;
        case.x_dtype = DType::ALL[i % 3];
        case.d_dtype = DType::ALL[(i + 1 + i / 3) % 3];
        case.layout = match i % 4 {
            3 => Layout { d_gap: 3, residual_gap: 1, offset: 1, ..Layout::default() },
            _ => Layout::default(),
        };
        case.batch_invariant = i == 5;
        case.seed = i as u64;
    }
    if format.encoding == Encoding::IntZero {
        let act_order = Some(ActOrder::Padded);
        let epilogue = Epilogue { activation: Activation::Silu, ..pair };
        cases.push(Case { act_order, ..case(5, 35, 3 * format.block_len + 9, epilogue) });
    }
    cases
}

/// Whole tiles of features and tokens, and partial ones. X and D
/// have one type and aligned rows.
/// Every possible tile runs, because kernels may have fast paths
/// for these cases.
fn whole_tiles(format: Format) -> Vec<Case> {
    let is_representative = REPRESENTATIVES.contains(&format.name);
    let (f16, bf16) = (DType::F16, DType::BF16);
    let cases = [
        (70, true, f16, Activation::Silu, Some(f16), Some(bf16)),
        (41, false, bf16, Activation::GeluTanh, Some(bf16), None),
        // Epilogues that kernels may have fast paths for.
        (70, true, bf16, Activation::Silu, None, Some(f16)),
        (150, true, f16, Activation::GeluTanh, None, None),
        (100, false, f16, Activation::Identity, None, Some(DType::F32)),
        (133, false, bf16, Activation::Identity, Some(bf16), Some(bf16)),
        (77, false, f16, Activation::Identity, None, Some(bf16)),
        (70, true, bf16, OF_PAIRS[0], None, Some(bf16)),
    ];
    let case = |(i, (m, gated, dtype, activation, residual, bias))| {
        let epilogue =
            Epilogue { alpha: BENT, activation, residual, bias, channel_scale: i % 2 == 1, ..Epilogue::default() };
        let n = if gated { 136 } else { 264 };
        let k = medium_k(format).next_multiple_of(8);
        let plain = Case { gated, epilogue, seed: i as u64, ..Case::new(format, m, n, k) };
        let d_dtype = if i == 6 { DType::F32 } else { dtype };
        Case { x_dtype: dtype, d_dtype, every_configuration: true, ..plain }
    };
    let plain: Vec<Case> = cases.into_iter().enumerate().map(case).collect();
    // FP8 by FP8, which has special stores.
    let alone = |case: &Case, x| {
        let epilogue = Epilogue { residual: None, bias: None, ..case.epilogue };
        Case { epilogue, ..*case }.with_x_format(x)
    };
    let of_e4m3 = (is_representative && format.encoding == Encoding::E4M3).then_some(XFormat::E4M3Block);
    let pairs =
        of_e4m3.into_iter().flat_map(|x| plain.iter().filter(|case| case.gated).map(move |case| alone(case, x)));
    let block_scaled =
        with_block_scales_of(format).flat_map(|x| plain.iter().step_by(2).map(move |case| alone(case, x)));
    let codes: Vec<_> = pairs.chain(block_scaled).collect();
    if is_representative { plain.into_iter().chain(codes).collect() } else { codes }
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

/// Permuted columns (GPTQ's `g_idx`), which only group formats
/// have.
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

/// Rows with and without NaN: few and many tokens, X of zeros,
/// gated pairs, activations, every kernel once, and quantized X.
fn nan_codes(format: Format) -> Vec<Case> {
    let weights = WeightKind::Nan;
    if !weights.suits(format) {
        return Vec::new();
    }
    let k = medium_k(format);
    let case = |m, n, seed| Case { weights, seed, ..Case::new(format, m, n, k) };
    let mut cases = Vec::new();
    for (i, (m, n)) in [(1, 67), (2, 33), (5, 40), (17, 67), (40, 33), (70, 130)].into_iter().enumerate() {
        for (j, x_dtype) in DType::ALL.into_iter().enumerate() {
            let activations = if j == i % 3 { ActivationKind::MixedMagnitudes } else { ActivationKind::Normal };
            let d_dtype = if j == i % 3 { DType::F32 } else { x_dtype };
            let x_precision = [XPrecision::Auto, XPrecision::F16, XPrecision::Exact][(i / 3 + j) % 3];
            cases.push(Case { x_dtype, d_dtype, x_precision, activations, ..case(m, n, (3 * i + j) as u64) });
        }
    }
    for (i, activation) in Activation::ALL.into_iter().enumerate() {
        let epilogue = Epilogue { alpha: BENT, activation, bias: Some(DType::F32), ..Epilogue::default() };
        let x_dtype = DType::ALL[i % 3];
        cases.push(Case { x_dtype, epilogue, gated: i % 2 == 1, ..case([3, 36][i % 2], 40, 20 + i as u64) });
    }
    let aligned = k.next_multiple_of(8);
    cases.push(Case { x_dtype: DType::F16, k: aligned, every_configuration: true, ..case(20, 40, 30) });
    let quantized = XFormat::ALL.into_iter().filter(|format| format.plain().is_none());
    for (i, x_format) in quantized.enumerate() {
        let seed = 40 + i as u64;
        cases.push(case(1 + 34 * (i % 2), 67, seed).with_x_format(x_format));
        let x = Case { weights: WeightKind::Raw, activations: ActivationKind::NotFinite, ..case(35, 33, seed) };
        cases.push(x.with_x_format(x_format));
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
            for (_, cases) in GROUPS.iter().filter(|(group, _)| group.name.starts_with("shapes_")) {
                let cases = cases(format);
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
            for case in GROUPS.iter().flat_map(|(_, cases)| cases(format)) {
                format.check_k(case.k).unwrap_or_else(|e| panic!("{case}: {e}"));
            }
        }
    }
}
