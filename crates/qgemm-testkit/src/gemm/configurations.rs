//! Cases that run every tile that could be chosen, with whole and
//! split K.

use qgemm_formats::{DType, Format, ScaleType, XFormat};

use super::case::{Case, Layout};
use super::groups::{medium_k, with_block_scales_of};
use crate::activations::ActivationKind;
use crate::weights::WeightKind;

/// Formats with different code in kernels: minimums, zero points,
/// a table, FP8 with shared scales, and scales per 16 columns.
pub(super) const REPRESENTATIVES: [&str; 5] = ["q4_k", "int4_g128", "iq4_nl", "fp8_e4m3_block128", "q6_k"];

/// Cases for tiles of many tokens, which are not chosen for the
/// other groups' small matrices.
pub(super) fn configurations(format: Format) -> Vec<Case> {
    let has_ue8m0_scales = format.float_scales.iter().any(|scale| scale.kind == ScaleType::E8M0);
    // Rings wrap around, and K ends within a stage.
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
    if !REPRESENTATIVES.contains(&format.name) && !has_ue8m0_scales {
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
    // Some kernels require aligned rows of activations.
    let aligned = k.next_multiple_of(8);
    // Raw weights have zero points of all sizes.
    let raw = Case { weights: WeightKind::Raw, ..case(DType::F32, 70, k, ActivationKind::Normal, 6) };
    let of_e4m3 = [
        raw.with_x_format(XFormat::E4M3Block),
        case(DType::F16, 70, k, ActivationKind::Outliers, 7).with_x_format(XFormat::E4M3Token),
    ];
    if has_ue8m0_scales {
        return of_e4m3.into_iter().chain(block_scaled).collect();
    }
    // An odd number of 64-column k-tiles, where formats have such. X
    // does not fill the last one.
    let odd = if format.ragged_k { k } else { (k + 1).next_multiple_of(format.block_len) };
    let others = [
        case(DType::F16, 41, aligned, ActivationKind::PositiveMean, 1),
        case(DType::BF16, 20, aligned, ActivationKind::Normal, 2),
        case(DType::F16, 20, k, ActivationKind::Normal, 3),
        case(DType::F32, 41, odd, ActivationKind::Normal, 4).with_x_format(XFormat::Q8_1),
        case(DType::F32, 20, odd, ActivationKind::Normal, 5).with_x_format(XFormat::Int8Token),
    ];
    // More row tiles than SMs: CTAs of persistent grids compute
    // several.
    // Fewer k-tiles than splits of K.
    let of_tokens =
        |m| Case { x_dtype: DType::F16, every_configuration: true, seed: m as u64, ..Case::new(format, m, 2128, 520) };
    let rounds = [1, 9].map(of_tokens).into_iter().filter(|_| format.code_bits() == 8);
    others.into_iter().chain(of_e4m3).chain(rounds).collect()
}
