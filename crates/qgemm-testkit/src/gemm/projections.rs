//! Cases of projections: X is normalized first, or W is fused,
//! with separate outputs.

use qgemm_formats::{DType, Format};
use qgemm_hal::{Activation, NormKind, XPrecision};

use super::case::{Case, Epilogue, Layout};
use super::sizes::medium_k;
use crate::activations::ActivationKind;

/// Aligned rows of X, and segments that begin at whole tiles.
pub(super) fn projection(format: Format) -> Vec<Case> {
    let medium = medium_k(format).next_multiple_of(8);
    let long = (4096 + format.block_len).next_multiple_of(8);
    let base = |(i, (m, n, k)): (usize, (usize, usize, usize))| {
        let x_dtype = DType::ALL[(i + 1) % 3];
        Case {
            x_dtype,
            x_precision: if x_dtype == DType::F32 { XPrecision::Exact } else { XPrecision::Auto },
            d_dtype: DType::ALL[i % 3],
            norm: Some(NormKind::Rms),
            layout: Layout { x_gap: i % 2 * 16, ..Layout::default() },
            seed: i as u64,
            ..Case::new(format, m, n, k)
        }
    };
    let shapes = [(1, 70, long), (7, 40, medium), (8, 67, medium), (9, 33, medium), (16, 130, medium), (2, 48, long)];
    let mut cases: Vec<Case> = shapes.into_iter().enumerate().map(base).collect();
    cases[1].gated = true;
    cases[1].epilogue.activation = Activation::Silu;
    cases[4].epilogue = Epilogue { bias: Some(DType::F16), residual: Some(DType::BF16), ..Epilogue::default() };
    // Huge and tiny rows, infinities and NaN.
    let kinds = [
        (ActivationKind::MixedMagnitudes, DType::BF16, 1),
        (ActivationKind::MixedMagnitudes, DType::F32, 2),
        (ActivationKind::NotFinite, DType::F32, 2),
        (ActivationKind::NotFinite, DType::F16, 5),
        (ActivationKind::Denormals, DType::F16, 1),
        (ActivationKind::Outliers, DType::BF16, 1),
    ];
    for (activations, x_dtype, m) in kinds {
        let x_precision = if x_dtype == DType::F32 { XPrecision::Exact } else { XPrecision::Auto };
        let case = base((cases.len(), (m, 40, medium)));
        cases.push(Case { activations, x_dtype, x_precision, d_dtype: DType::F32, ..case });
    }
    for (i, (m, segments)) in [(1, 3), (16, 4), (3, 2)].into_iter().enumerate() {
        let norm = (i != 1).then_some(NormKind::Rms);
        let layout = Layout { d_gap: i * 8, ..Layout::default() };
        cases.push(Case { segments, norm, layout, ..base((cases.len(), (m, segments * 128 + 5, medium))) });
    }
    // Segment borders between the largest tiles, for all kernels
    // that write segments. Token counts around those of the kernels.
    for (i, m) in [8, 11, 40, 70, 130].into_iter().enumerate() {
        let (segments, x_dtype) = (2 + i % 2, [DType::F16, DType::BF16][i % 2]);
        let norm = (i % 2 == 1).then_some(NormKind::Layer);
        let layout = Layout { d_gap: i % 3 * 4, ..Layout::default() };
        let epilogue = Epilogue {
            bias: (i % 2 == 0).then_some(DType::F32),
            residual: (i == 2).then_some(DType::F16),
            c: (i == 3).then_some((0.5, DType::BF16)),
            ..Epilogue::default()
        };
        let case = base((cases.len(), (m, segments * 256 + 5, medium)));
        cases.push(Case { segments, norm, layout, x_dtype, x_precision: XPrecision::Auto, epilogue, ..case });
    }
    cases
}

/// Two to four segments. Kernels support some borders and not
/// others; then more segments than they support.
pub(super) fn fused(format: Format) -> Vec<Case> {
    let k = medium_k(format);
    let shapes = [(1, 70, 3), (3, 80, 3), (16, 130, 4), (17, 70, 2), (2, 100, 5), (66, 200, 3)];
    let case = |(i, (m, n, segments)): (usize, (usize, usize, usize))| Case {
        segments,
        x_dtype: DType::ALL[i % 3],
        d_dtype: DType::ALL[(i + 1) % 3],
        norm: (i % 4 == 3).then_some(NormKind::Rms),
        epilogue: Epilogue {
            alpha: 0.5,
            c: (i % 3 == 1).then_some((0.5, DType::F16)),
            bias: i.is_multiple_of(2).then_some(DType::F32),
            channel_scale: i > 2,
            activation: if i == 2 { Activation::Relu } else { Activation::Identity },
            residual: (i % 3 == 2).then_some(DType::BF16),
            ..Epilogue::default()
        },
        layout: Layout { d_gap: i % 2 * 8, offset: i / 4, ..Layout::default() },
        seed: i as u64,
        ..Case::new(format, m, n, k)
    };
    shapes.into_iter().enumerate().map(case).collect()
}
