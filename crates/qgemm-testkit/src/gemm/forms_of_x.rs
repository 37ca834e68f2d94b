//! Groups of `gemm` by the form of X: converted, in codes and scales,
//! normalized.

use qgemm_formats::{DType, Encoding, Format, XFormat};
use qgemm_hal::{Activation, Math, NormKind, XPrecision};

use super::activation::BENT;
use super::case::{ActOrder, Case, Epilogue, Layout};
use super::configurations::REPRESENTATIVES;
use super::sizes::{depths, medium_k};
use crate::activations::ActivationKind;
use crate::weights::WeightKind;

/// Activations that a prologue must convert before MMA: f32 (and
/// bf16 on older chips), transposed, gathered.
/// The last cases have activations that the prologue must not round.
pub(super) fn x_prologue(format: Format) -> Vec<Case> {
    if matches!(format.encoding, Encoding::Plain(DType::F32 | DType::BF16)) {
        return Vec::new();
    }
    let k = medium_k(format);
    let case = |m, activations, seed| Case { activations, seed, ..Case::new(format, m, 67, k) };
    let tensor = Some(Math::TensorF16);
    let kinds = [ActivationKind::MixedMagnitudes, ActivationKind::NotFinite, ActivationKind::Outliers];
    let mut cases = Vec::new();
    for (i, m) in [1, 2, 3, 17, 65].into_iter().enumerate() {
        let kind = |salt: usize| kinds[(i + salt) % kinds.len()];
        let ordered = |order| (format.encoding == Encoding::IntZero).then_some(order);
        let (act_order, seed) = (ordered(ActOrder::Padded).filter(|_| i % 2 == 0), i as u64);
        cases.push(Case { math: tensor, act_order, ..case(m, kind(0), seed) });
        let layout = Layout { x_transposed: true, x_gap: i % 2, ..Layout::default() };
        let act_order = ordered(ActOrder::Full).filter(|_| i % 2 == 1);
        let k = if act_order.is_some() { 3 * format.block_len } else { k };
        cases.push(Case { math: tensor, act_order, layout, k, ..case(m, kind(1), seed) });
        if format.encoding != Encoding::Plain(DType::F16) && i % 2 == 0 {
            cases.push(Case { math: tensor, x_dtype: DType::BF16, ..case(m, kind(2), seed) });
        }
    }
    cases.push(Case { x_precision: XPrecision::Exact, ..case(17, ActivationKind::MixedMagnitudes, 6) });
    cases.push(Case { math: tensor, batch_invariant: true, ..case(33, ActivationKind::MixedMagnitudes, 7) });
    cases
}

/// Quantized X in every format: few and many tokens, exact sums,
/// gaps, special values, epilogues.
pub(super) fn x_formats(format: Format) -> Vec<Case> {
    let k = medium_k(format);
    let quantized = XFormat::ALL.into_iter().filter(|format| format.plain().is_none());
    let of_format = |(i, x_format): (usize, XFormat)| {
        let case = |m, n, seed| Case { weights: WeightKind::Raw, seed, ..Case::new(format, m, n, k) };
        let act_order = (format.encoding == Encoding::IntZero && i % 2 == 0).then_some(ActOrder::Padded);
        let k_ordered = if act_order.is_some() { 3 * format.block_len - 1 } else { k };
        let layout = Layout { x_gap: 1 + i % 3, d_gap: i % 2, ..Layout::default() };
        let epilogue = Epilogue { alpha: 0.5, token_scale: true, bias: Some(DType::F16), ..Epilogue::default() };
        let kinds = [ActivationKind::MixedMagnitudes, ActivationKind::NotFinite, ActivationKind::Outliers];
        let cases = [
            case(1, 67, 1),
            Case { layout, epilogue, d_dtype: DType::BF16, ..case(5 + i, 33, 2) },
            Case { activations: kinds[i % 3], act_order, k: k_ordered, ..case(17, 35, 3) },
            Case { layout, ..case(66 - i, 65, 4) }.with_exact_sums(),
            Case { batch_invariant: true, ..case(9, 130, 5) },
            // K below a stage, tokens below a tile, and scales over the
            // whole range of the format.
            Case { weights: WeightKind::TinyScales, k: depths(format)[0], d_dtype: DType::F32, ..case(17, 11, 6) },
        ];
        cases.map(|case| case.with_x_format(x_format))
    };
    // A permitted precision is not required: families that quantize
    // X, or have it quantized first, may be slower.
    let permitted = [
        XPrecision::Int8,
        XPrecision::Int8Token,
        XPrecision::E4M3,
        XPrecision::E4M3Token,
        XPrecision::MxFp8,
        XPrecision::MxFp4,
        XPrecision::NvFp4,
    ];
    let permitted = permitted.into_iter().enumerate().map(|(i, x_precision)| Case {
        x_precision,
        x_dtype: DType::ALL[i % DType::ALL.len()],
        every_configuration: REPRESENTATIVES.contains(&format.name),
        ..Case::new(format, 21, 67, k)
    });
    quantized.enumerate().flat_map(of_format).chain(permitted).chain(sums_beyond_32_bits(format)).collect()
}

/// Equal bytes over so many columns that their sum of products
/// overflows 32 bits.
fn sums_beyond_32_bits(format: Format) -> Option<Case> {
    let are_bytes = format.scale_planes.is_empty() && format.code_planes == [8] && format.encoding.is_integer();
    let case =
        Case { weights: WeightKind::Raw, activations: ActivationKind::AllEqual, ..Case::new(format, 20, 33, 140_032) };
    are_bytes.then(|| case.with_x_format(XFormat::Int8Token))
}

/// Formats that norms write, spread over the weights' formats.
const NORMED: [XFormat; 10] = [
    XFormat::Q8_0,
    XFormat::Q8_1,
    XFormat::Int8Token,
    XFormat::E4M3Token,
    XFormat::E4M3Block,
    XFormat::E4M3Tensor,
    XFormat::Q8_256,
    XFormat::MxFp8,
    XFormat::MxFp4,
    XFormat::NvFp4,
];

/// Both norms with every type, few and many tokens, long K, gated
/// pairs, permuted columns and X with gaps.
pub(super) fn norm(format: Format) -> Vec<Case> {
    let k = medium_k(format);
    let long = if format.ragged_k { 4096 + format.block_len / 2 } else { 4096 + format.block_len };
    let shapes = [(1, 65, k), (2, 33, long), (7, 40, k), (16, 67, k), (33, 35, k), (129, 24, k)];
    let mut cases = Vec::new();
    for (i, (m, n, k)) in shapes.into_iter().enumerate() {
        for (j, kind) in NormKind::ALL.into_iter().enumerate() {
            let case = Case::new(format, m, n, k);
            let gated = i % 3 == 2;
            let epilogue = Epilogue {
                alpha: if gated { BENT } else { 1.0 },
                bias: i.is_multiple_of(2).then_some(DType::F32),
                activation: if gated { Activation::Silu } else { Activation::Identity },
                ..Epilogue::default()
            };
            cases.push(Case {
                x_dtype: DType::ALL[(i + j) % 3],
                normed_dtype: (i % 4 == 3).then_some(DType::ALL[(i + j + 1) % 3]),
                d_dtype: DType::ALL[(i + 2 * j) % 3],
                x_precision: [XPrecision::F16, XPrecision::Auto, XPrecision::Exact][(i + j) % 3],
                norm: Some(kind),
                gated,
                epilogue,
                act_order: (format.encoding == Encoding::IntZero && i.is_multiple_of(2)).then_some(ActOrder::Padded),
                activations: [ActivationKind::Normal, ActivationKind::PositiveMean][j],
                layout: Layout { x_gap: i % 3 * 5, offset: i % 2, ..Layout::default() },
                batch_invariant: i == 4,
                seed: cases.len() as u64,
                ..case
            });
        }
    }
    // A residual stream in f32, of which a token is rounded once it is normalized.
    let streams =
        [(k, ActivationKind::Normal), (long, ActivationKind::MixedMagnitudes), (k, ActivationKind::Denormals)];
    for (i, (k, activations)) in streams.into_iter().enumerate() {
        cases.push(Case {
            x_dtype: DType::F32,
            normed_dtype: Some([DType::F16, DType::BF16][i % 2]),
            x_precision: XPrecision::F16,
            norm: Some(NormKind::Rms),
            gated: i == 1,
            activations,
            seed: cases.len() as u64,
            ..Case::new(format, 1, 40 + i, k)
        });
    }
    // A norm that writes quantized rows.
    let place = Format::all().position(|other| other == format).unwrap_or(0);
    for (i, (m, n)) in [(3, 40), (40, 33)].into_iter().enumerate() {
        cases.push(Case {
            x_dtype: DType::ALL[(place + i) % 3],
            norm: Some(NormKind::ALL[(place + i) % 2]),
            normed_format: Some(NORMED[(2 * place + i) % NORMED.len()]),
            layout: Layout { x_gap: 8 * i, ..Layout::default() },
            seed: cases.len() as u64,
            ..Case::new(format, m, n, k)
        });
    }
    cases
}
