//! The suite of `experts`: cases that every backend must pass.
//! `gemm` tests the products; this suite tests what experts add.

use qgemm_formats::{DType, Encoding, Format, XFormat};
use qgemm_hal::op::routing::MOST_TOP_K;
use qgemm_hal::{Activation, NormKind, XPrecision};

use super::case::{ExpertCase, FormCase, IndexKind};
use crate::gemm::{ActOrder, Case, Epilogue, Layout, OF_PAIRS};
use crate::suite::Group;
use crate::weights::WeightKind;

/// A group and its cases for a format; empty if the group does
/// not apply to the format.
type Cases = (Group, fn(Format) -> Vec<ExpertCase>);

const fn group(name: &'static str, summary: &'static str, cases: fn(Format) -> Vec<ExpertCase>) -> Cases {
    (Group { name, summary }, cases)
}

pub(super) const GROUPS: &[Cases] = &[
    group("experts_forms", "every form with every index", forms),
    group("experts_exact", "small integers, bit for bit", exact),
    group("experts_epilogue", "gated pairs, biases, factors, residuals of grouped products", epilogue),
    group("experts_layouts", "rows with gaps, unaligned rows, permuted columns", layouts),
    group("experts_faults", "ids, offsets, counts and weights that are wrong", faults),
    group("experts_grouped", "slots that are multiplied expert by expert, by given lists or their own", grouped),
    group("experts_shared", "groups of rows that share a weight: tiles of rows by their lengths", shared),
    group("experts_every_kernel", "every kernel and every way to launch it", all_candidates),
    group("experts_nan_codes", "NaN among the codes and scales of weights", nan_codes),
    group("experts_norm", "X that is normalized first", norm),
    group("experts_x_formats", "activations given in codes and scales, of every format", x_formats),
    group("experts_x_permitted", "a plain X that may be rounded to codes", permitted),
    group("experts_invariant", "bits that do not depend on other rows", invariant),
];

/// A medium K for the format.
fn medium_k(format: Format) -> usize {
    match format.ragged_k {
        true => 2 * format.block_len + 5,
        false => 192usize.next_multiple_of(format.block_len),
    }
}

/// All forms, with few and many rows and slots.
const FORMS: [(FormCase, usize, usize); 9] = [
    (FormCase::Contiguous, 4, 37),
    (FormCase::Contiguous, 9, 5),
    (FormCase::Masked { capacity: 7 }, 3, 0),
    (FormCase::Contiguous, 3, 150),
    (FormCase::Masked { capacity: 33 }, 3, 0),
    (FormCase::Indexed { top_k: 2, x_per_slot: false, combined: false }, 5, 1),
    (FormCase::Indexed { top_k: 3, x_per_slot: false, combined: true }, 6, 11),
    (FormCase::Indexed { top_k: 2, x_per_slot: true, combined: false }, 4, 9),
    (FormCase::Indexed { top_k: 2, x_per_slot: true, combined: true }, 3, 2),
];

/// A case of each form, with X types in turn.
fn every_form(format: Format, n: usize, change: impl Fn(usize, ExpertCase) -> ExpertCase) -> Vec<ExpertCase> {
    let case = |(i, &(form, experts, rows)): (usize, &(FormCase, usize, usize))| {
        let x_dtype = DType::ALL[i % 3];
        let each = Case { x_dtype, d_dtype: x_dtype, seed: i as u64, ..Case::new(format, 0, n, medium_k(format)) };
        change(i, ExpertCase::new(each, experts, rows, form))
    };
    FORMS.iter().enumerate().map(case).collect()
}

fn forms(format: Format) -> Vec<ExpertCase> {
    let kinds = [IndexKind::Uniform, IndexKind::Skewed, IndexKind::Hot, IndexKind::Sparse];
    let of = |(j, index): (usize, IndexKind)| {
        every_form(format, [33, 64, 1][j % 3], move |i, case| ExpertCase {
            index,
            // All types of X with all forms, over the kinds of index.
            each: Case { x_dtype: DType::ALL[(i + j) % 3], d_dtype: DType::ALL[(i + j) % 3], ..case.each },
            ..case
        })
    };
    let most = FormCase::Indexed { top_k: MOST_TOP_K, x_per_slot: false, combined: true };
    let of_most = ExpertCase::new(Case::new(format, 0, 33, medium_k(format)), 40, 3, most);
    kinds.into_iter().enumerate().flat_map(of).chain([of_most]).collect()
}

fn exact(format: Format) -> Vec<ExpertCase> {
    every_form(format, 48, |_, case| ExpertCase {
        each: Case { d_dtype: DType::F32, ..case.each.with_exact_sums() },
        ..case
    })
}

fn epilogue(format: Format) -> Vec<ExpertCase> {
    let plain = |i: usize, case: ExpertCase| {
        let combined = case.summed() > 1;
        let epilogue = Epilogue {
            alpha: 0.5,
            c: (!combined && i.is_multiple_of(2)).then_some((-0.5, DType::F16)),
            bias: Some(DType::ALL[i % 3]),
            token_scale: i % 3 != 1,
            channel_scale: i.is_multiple_of(2),
            activation: Activation::ALL[i % Activation::ALL.len()],
            residual: (!i.is_multiple_of(4)).then_some(DType::F32),
        };
        ExpertCase { each: Case { epilogue, ..case.each }, ..case }
    };
    let gated = |i: usize, case: ExpertCase| {
        let epilogue = Epilogue {
            alpha: 0.0625,
            bias: i.is_multiple_of(2).then_some(DType::F32),
            activation: [Activation::Silu, OF_PAIRS[0], OF_PAIRS[1]][i / 2 % 3],
            residual: i.is_multiple_of(3).then_some(DType::F16),
            ..Epilogue::default()
        };
        ExpertCase { each: Case { gated: true, epilogue, ..case.each }, ..case }
    };
    every_form(format, 40, plain).into_iter().chain(every_form(format, 20, gated)).collect()
}

fn layouts(format: Format) -> Vec<ExpertCase> {
    let ordered = format.encoding == Encoding::IntZero;
    every_form(format, 37, |i, case| ExpertCase {
        each: Case {
            layout: Layout { x_gap: i % 3 * 5, d_gap: i % 2 * 3, offset: i % 4, ..Layout::default() },
            act_order: match i % 3 {
                _ if !ordered => None,
                0 => Some(ActOrder::Full),
                1 => Some(ActOrder::Padded),
                _ => None,
            },
            ..case.each
        },
        ..case
    })
}

fn shared(format: Format) -> Vec<ExpertCase> {
    let ordered = format.encoding == Encoding::IntZero;
    every_form(format, 41, |i, case| ExpertCase {
        each: Case {
            epilogue: Epilogue { bias: (i % 2 == 0).then_some(DType::F32), ..case.each.epilogue },
            act_order: (ordered && i % 2 == 1).then_some(ActOrder::Full),
            ..case.each
        },
        index: [IndexKind::Uniform, IndexKind::Skewed, IndexKind::Hot][i % 3],
        shared: true,
        ..case
    })
}

fn faults(format: Format) -> Vec<ExpertCase> {
    every_form(format, 33, |i, case| ExpertCase { index: IndexKind::Faulty, ready: !i.is_multiple_of(2), ..case })
}

/// Many slots and few experts, which kernels with large tiles
/// serve; some with given lists.
fn grouped(format: Format) -> Vec<ExpertCase> {
    let of = |(i, (x_per_slot, combined, listed)): (usize, (bool, bool, bool))| {
        let x_dtype = [DType::F16, DType::BF16, DType::F32][i % 3];
        // Rows of X are 16-byte aligned, and blocks of any length end
        // inside.
        let k = if format.ragged_k { 2 * format.block_len.max(64) + 8 } else { medium_k(format) };
        let each = Case { x_dtype, d_dtype: x_dtype, seed: 77 + i as u64, ..Case::new(format, 0, 136, k) };
        let epilogue = Epilogue {
            bias: i.is_multiple_of(2).then_some(DType::F32),
            token_scale: i == 3,
            c: (i == 4).then_some((0.5, DType::F32)),
            residual: (i == 4).then_some(DType::F16),
            ..Epilogue::default()
        };
        let each = Case { epilogue, ..each };
        let form = FormCase::Indexed { top_k: 3, x_per_slot, combined };
        let index = [IndexKind::Skewed, IndexKind::Uniform, IndexKind::Hot, IndexKind::Faulty][i % 4];
        let ready = i % 3 != 1;
        ExpertCase { index, listed, ready, ..ExpertCase::new(each, 4, [70, 50, 20][i % 3], form) }
    };
    let all = [
        (false, false, true),
        (false, true, false),
        (true, false, true),
        (true, true, true),
        (false, false, false),
        (false, false, true),
    ];
    all.into_iter().enumerate().map(of).collect()
}

/// One case per form with all kernels, so large that both full
/// and partial tiles occur.
/// Token scales and gated pairs, which may have fast paths. More
/// experts than a warp examines at once.
fn all_candidates(format: Format) -> Vec<ExpertCase> {
    let indexed = |x_per_slot, combined| FormCase::Indexed { top_k: 3, x_per_slot, combined };
    let all = [
        (FormCase::Contiguous, 190, DType::F16, IndexKind::Skewed),
        (indexed(false, false), 62, DType::BF16, IndexKind::Skewed),
        (indexed(true, true), 60, DType::F32, IndexKind::Faulty),
        (FormCase::Masked { capacity: 70 }, 0, DType::BF16, IndexKind::Uniform),
        (indexed(false, false), 60, DType::F32, IndexKind::Uniform),
        (indexed(false, false), 61, DType::F16, IndexKind::Uniform),
    ];
    let of = |(i, (form, rows, x_dtype, index)): (usize, (FormCase, usize, DType, IndexKind))| {
        let k = if format.ragged_k { 2 * format.block_len.max(64) + 8 } else { medium_k(format) };
        let each = Case { x_dtype, d_dtype: x_dtype, seed: 91 + i as u64, ..Case::new(format, 0, 136, k) };
        let (gated, token_scale) = (i == 5, i == 4);
        let activation = if gated { Activation::Silu } else { Activation::Identity };
        let alpha = if gated { 0.0625 } else { 1.0 };
        let epilogue = Epilogue { alpha, activation, token_scale, ..Epilogue::default() };
        let each = Case { every_configuration: true, gated, epilogue, ..each };
        let (listed, ready) = (i == 1, i.is_multiple_of(2) || i == 1);
        ExpertCase { index, listed, ready, ..ExpertCase::new(each, 3, rows, form) }
    };
    let each = Case {
        x_dtype: DType::F16,
        seed: 97,
        every_configuration: true,
        ..Case::new(format, 0, 24, 2 * format.block_len.max(64))
    };
    let many = ExpertCase { index: IndexKind::Skewed, ..ExpertCase::new(each, 300, 350, FormCase::Contiguous) };
    all.into_iter().enumerate().map(of).chain([many]).collect()
}

fn nan_codes(format: Format) -> Vec<ExpertCase> {
    let weights = WeightKind::Nan;
    if !weights.suits(format) {
        return Vec::new();
    }
    every_form(format, 35, |i, case| {
        let gated = i % 3 == 1;
        let activation = if gated { Activation::Silu } else { Activation::Identity };
        let epilogue = Epilogue { alpha: if gated { 0.0625 } else { 1.0 }, activation, ..Epilogue::default() };
        ExpertCase { each: Case { weights, gated, epilogue, ..case.each }, ..case }
    })
}

fn norm(format: Format) -> Vec<ExpertCase> {
    every_form(format, 33, |i, case| {
        let gated = i % 4 == 3;
        let epilogue = Epilogue {
            alpha: if gated { 0.0625 } else { 1.0 },
            activation: if gated { Activation::Silu } else { Activation::Identity },
            ..Epilogue::default()
        };
        let each = Case {
            norm: Some(NormKind::ALL[i % 2]),
            normed_dtype: (i % 3 == 1).then_some(DType::ALL[i / 2 % 3]),
            gated,
            epilogue,
            ..case.each
        };
        ExpertCase { each, ..case }
    })
}

/// Quantized X in every format, in each form in turn: epilogues,
/// gaps, exact sums, permuted columns.
fn x_formats(format: Format) -> Vec<ExpertCase> {
    let quantized = XFormat::ALL.into_iter().filter(|format| format.plain().is_none());
    let of_format = |(i, x_format): (usize, XFormat)| {
        let ordered = (format.encoding == Encoding::IntZero && i % 2 == 0).then_some(ActOrder::Full);
        let all = every_form(format, 35, |at, case| {
            let each = match (at + i) % 3 {
                0 => case.each.with_exact_sums(),
                1 => Case { layout: Layout { x_gap: 1 + at % 3, d_gap: at % 2, ..Layout::default() }, ..case.each },
                _ => Case {
                    epilogue: Epilogue { alpha: 0.5, token_scale: true, bias: Some(DType::F16), ..Epilogue::default() },
                    act_order: ordered,
                    ..case.each
                },
            };
            let index = IndexKind::ALL[(at + i) % IndexKind::ALL.len()];
            // 8-bit codes are multiplied directly or converted first; so are
            // formats with small scaled blocks.
            let scales_blocks = matches!(x_format, XFormat::MxFp8 | XFormat::MxFp4 | XFormat::NvFp4);
            let are_bytes = matches!(x_format, XFormat::Q8_0 | XFormat::Q8_256 | XFormat::Q8_1 | XFormat::Int8Token);
            let every_configuration = are_bytes
                || matches!(format.encoding, Encoding::E4M3 | Encoding::E5M2)
                || (scales_blocks && matches!(format.encoding, Encoding::Codebook(_)));
            let shared = matches!(at, 3 | 4);
            ExpertCase { each: Case { every_configuration, ..each.with_x_format(x_format) }, index, shared, ..case }
        });
        // Three of the nine forms for each format of X; over three
        // weight formats, all forms.
        all.into_iter().skip(i % 3).step_by(3)
    };
    quantized.enumerate().flat_map(of_format).collect()
}

/// Plain X that may be quantized. Kernels that multiply quantized
/// X have a quantizing step before.
fn permitted(format: Format) -> Vec<ExpertCase> {
    let indexed = FormCase::Indexed { top_k: 2, x_per_slot: false, combined: false };
    let forms = [(FormCase::Contiguous, 70), (FormCase::Masked { capacity: 33 }, 0), (indexed, 37)];
    let precisions = [XPrecision::E4M3, XPrecision::Int8Token, XPrecision::Int8, XPrecision::MxFp4, XPrecision::NvFp4];
    let of = |(i, x_precision): (usize, XPrecision)| {
        forms.map(|(form, rows)| {
            let k = if format.ragged_k { 2 * format.block_len.max(64) } else { medium_k(format) };
            let each = Case {
                x_dtype: DType::ALL[i % DType::ALL.len()],
                x_precision,
                seed: 60 + i as u64,
                ..Case::new(format, 0, 67, k)
            };
            // For the other formats only the chosen config runs.
            let every_configuration = i == 0 && matches!(format.encoding, Encoding::E4M3 | Encoding::E5M2);
            ExpertCase::new(Case { every_configuration, ..each }, 3, rows, form)
        })
    };
    precisions.into_iter().enumerate().flat_map(of).collect()
}

fn invariant(format: Format) -> Vec<ExpertCase> {
    every_form(format, 65, |_, case| ExpertCase {
        each: Case { batch_invariant: true, ..case.each },
        index: IndexKind::Skewed,
        ..case
    })
}
