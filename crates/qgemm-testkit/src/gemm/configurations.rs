//! Cases that run every tile which could be chosen, whole and cut.

use qgemm_formats::{DType, Format, ScaleType, XFormat};

use super::case::{Case, Layout};
use super::groups::{medium_k, with_block_scales_of};
use crate::activations::ActivationKind;
use crate::weights::WeightKind;

/// Formats whose weights take different ways through a kernel: minimums, zero points, a table, FP8 with shared scales, scales
/// for every 16 columns.
pub(super) const WAYS: [&str; 5] = ["q4_k", "int4_g128", "iq4_nl", "fp8_e4m3_block128", "q6_k"];

/// Tiles for many tokens are not chosen for matrices as small as the other groups'.
pub(super) fn configurations(format: Format) -> Vec<Case> {
    let has_powers = format.float_scales.iter().any(|scale| scale.kind == ScaleType::E8M0);
    // Rings are filled more than once, and K ends within a stage.
    let block_scaled = with_block_scales_of(format).enumerate().flat_map(|(i, x)| {
        let case = |m, layout, seed| Case {
            weights: WeightKind::Raw,
            layout,
            seed,
            every_configuration: true,
            ..Case::new(format, m, 290, 1056 + i * 256)
        };
        let gaps = Layout { x_gap: 2, d_gap: 3, ..Layout::default() };
        let dense = Case { d_dtype: DType::F16, ..case(150, Layout::default(), 8) };
        [dense.with_x_format(x), case(37, gaps, 9).with_x_format(x)]
    });
    if !WAYS.contains(&format.name) && !has_powers {
        return block_scaled.collect();
    }
    let case = |x_dtype, m, k, activations, seed| Case {
        x_dtype,
        activations,
        seed,
        every_configuration: true,
        ..Case::new(format, m, 290, k)
    };
    let k = medium_k(format);
    // Some kernels take only activations whose rows are aligned.
    let aligned = k.next_multiple_of(8);
    // Raw weights have zero points of all sizes.
    let raw = Case { weights: WeightKind::Raw, ..case(DType::F32, 70, k, ActivationKind::Normal, 6) };
    let of_e4m3 = [
        raw.with_x_format(XFormat::E4M3Block),
        case(DType::F16, 70, k, ActivationKind::Outliers, 7).with_x_format(XFormat::E4M3Token),
    ];
    if has_powers {
        return of_e4m3.into_iter().chain(block_scaled).collect();
    }
    // An odd number of k-tiles of 64 columns, where a format has such, of which X does not fill the last.
    let odd = if format.ragged_k { k } else { (k + 1).next_multiple_of(format.block_len) };
    let others = [
        case(DType::F16, 41, aligned, ActivationKind::PositiveMean, 1),
        case(DType::BF16, 20, aligned, ActivationKind::Normal, 2),
        case(DType::F16, 20, k, ActivationKind::Normal, 3),
        case(DType::F32, 41, odd, ActivationKind::Normal, 4).with_x_format(XFormat::Q8_1),
        case(DType::F32, 20, odd, ActivationKind::Normal, 5).with_x_format(XFormat::Int8Token),
    ];
    // More row tiles than multiprocessors, so that CTAs of persistent grids have several, and fewer k-tiles than slices of K.
    let of_tokens =
        |m| Case { x_dtype: DType::F16, every_configuration: true, seed: m as u64, ..Case::new(format, m, 2128, 520) };
    let rounds = [1, 9].map(of_tokens).into_iter().filter(|_| format.code_bits() == 8);
    others.into_iter().chain(of_e4m3).chain(rounds).collect()
}
