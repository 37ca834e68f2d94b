//! `gemm_matrix`: any number of tokens with cooperative matrices. W
//! is decoded to f16, and X is f16.

use std::sync::LazyLock;

use qgemm_formats::{DType, Encoding, XFormat};
use qgemm_hal::{
    CheckedGemm, Dense, Device, DeviceInfo, Family, Feature, HalError, LaunchPlan, LaunchSequence, Math, Name,
    TileConfig, Unsupported, XPrologue,
};

use super::CONFIG;
use crate::adapter::CooperativeMatrices;
use crate::shader::{Codes, FourRows, Part, table_bytes};

/// Family name.
const NAME: &str = "gemm_matrix";
const QUADS: &str = include_str!("../../../shaders/quads.wgsl");
const MAIN_LOOP: &str = include_str!("../../../shaders/gemm_matrix.wgsl");
const EXTENSIONS: &str = "enable f16;\nenable wgpu_cooperative_matrix;\n";

const SIDE_16: &str = "alias Left = coop_mat16x16<f16, A>;\nalias Right = coop_mat16x16<f16, B>;\nalias Accumulators = coop_mat16x16<f32, C>;";
const SIDE_8: &str =
    "alias Left = coop_mat8x8<f16, A>;\nalias Right = coop_mat8x8<f16, B>;\nalias Accumulators = coop_mat8x8<f32, C>;";

static SOURCE_HASH: LazyLock<u64> = LazyLock::new(|| {
    let own = [EXTENSIONS, QUADS, SIDE_16, SIDE_8, MAIN_LOOP];
    super::source_hash(&[&own, &crate::shader::CONVERT_TEXTS[..]].concat())
});

/// Rows and tokens whose accumulators a subgroup stores at once.
const BLOCK: u32 = 16;
/// Workgroup memory for that, in bytes.
const BLOCK_BYTES: u32 = BLOCK * BLOCK * 4;

/// From many tokens to few. Efficiencies and workgroups
/// per unit are measured (H200).
pub(crate) static CONFIGS: &[TileConfig] = &[
    config((128, 128, 32), (64, 64), 1, 2, 335),
    config((128, 128, 32), (64, 32), 2, 1, 305),
    config((64, 64, 64), (32, 32), 1, 1, 270),
    config((64, 32, 64), (32, 16), 1, 2, 160),
    config((64, 16, 64), (16, 16), 1, 3, 120),
];

/// A subgroup computes `part` of the tile:
/// rows of W and tokens.
const fn config(
    (tile_n, tile_m, tile_k): (u32, u32, u32),
    part: (u32, u32),
    stages: u32,
    ctas_per_unit: u32,
    efficiency: u32,
) -> TileConfig {
    let warps_n = tile_n / part.0;
    let subgroups = warps_n * (tile_m / part.1);
    TileConfig {
        family: NAME,
        main_loop: Name::new(NAME),
        math: Math::TensorF16,
        tile_n,
        tile_m,
        tile_k,
        threads: subgroups * CooperativeMatrices::MAX_LANES,
        ctas_per_unit,
        cluster: 1,
        warps_n,
        stages,
        // Each column of W and each token of X is
        // padded by eight f16.
        shared_bytes: stages * 2 * (tile_k * (tile_n + 8) + tile_m * (tile_k + 8)) + subgroups * BLOCK_BYTES,
        x_format: XFormat::Plain(DType::F16),
        rounded_weights: Some(DType::F16),
        efficiency: (efficiency, 500),
        ..CONFIG
    }
}

/// Sources and constants of a config on a device with these
/// matrices. Smaller subgroups mean fewer invocations.
pub(crate) fn part(config: &TileConfig, matrices: CooperativeMatrices) -> Part {
    let CooperativeMatrices { side, lanes } = matrices;
    let subgroups = config.threads / CooperativeMatrices::MAX_LANES;
    let threads = subgroups * lanes;
    let (ns, ms) = (config.tile_n / config.warps_n / side, config.tile_m / (subgroups / config.warps_n) / side);
    // Scales are read once for this many columns of four rows:
    // as many as leave work for every invocation.
    let piece_quads = if config.tile_n * config.tile_k >= 32 * config.threads { 2 } else { 1 };
    let constants = vec![
        ("TILE_N", config.tile_n),
        ("TILE_M", config.tile_m),
        ("TILE_K", config.tile_k),
        ("BUFFERS", config.stages),
        ("SUBGROUPS", subgroups),
        ("SIDE", side),
        ("BLOCK", BLOCK / side),
        ("NS", ns),
        ("MS", ms),
        ("NS_MOVES", ns - 1),
        ("MS_MOVES", ms - 1),
        ("PIECE_QUADS", piece_quads),
        ("W_PIECES", config.tile_n / 4 * (config.tile_k / (4 * piece_quads)) / threads),
        ("X_PIECES", config.tile_m * (config.tile_k / 8) / threads),
    ];
    let matrices = if side == 16 { SIDE_16 } else { SIDE_8 };
    Part {
        extensions: EXTENSIONS,
        rows: FourRows::Beside,
        codes: Codes::Numbers,
        sources: vec![QUADS, matrices, MAIN_LOOP],
        threads,
        constants,
    }
}

/// Configs that fit into the adapter's workgroup memory,
/// for X as plans convert it.
fn fitting(op: &CheckedGemm, x: Dense, info: &DeviceInfo) -> impl Iterator<Item = TileConfig> + use<> {
    let available = info.shared_bytes.saturating_sub(table_bytes(op.format));
    let (stored_k, k_order) = (op.stored_k, op.k_order);
    let with_x = move |config| TileConfig { x_prologue: x_prologue(x, stored_k, k_order, &config), ..config };
    CONFIGS.iter().copied().filter(move |config| config.shared_bytes <= available).map(with_x)
}

/// The X prologue of `config`, if X has another type,
/// or its rows are not whole steps of contiguous
/// columns in the order of W's.
fn x_prologue(x: Dense, stored_k: usize, k_order: bool, config: &TileConfig) -> Option<XPrologue> {
    let row_factors = x.dtype != DType::F16;
    let whole_steps = stored_k.is_multiple_of(config.tile_k as usize);
    let in_place = !row_factors && !k_order && x.col_stride == 1 && x.aligned16 && whole_steps;
    (!in_place).then_some(XPrologue::Convert { row_factors })
}

/// Checks that X may be rounded to f16.
fn check_precision(op: &CheckedGemm, x: Dense) -> Result<(), Unsupported> {
    if x.dtype != DType::F16 && op.x_precision.half(x.dtype) != Some(DType::F16) {
        let why = format!("multiplies activations in f16, to which {} may not be rounded", x.dtype);
        return Err(Unsupported::new(why));
    }
    Ok(())
}

/// The kernel family.
#[derive(Debug)]
pub(crate) struct GemmMatrix;

impl Family<CheckedGemm> for GemmMatrix {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
        if !info.features.contains(&Feature::CooperativeMatrices) {
            return Err(Unsupported::new("needs cooperative matrices in f16 with sums in f32, of 16x16x16 or 8x8x8"));
        }
        if op.format.encoding == Encoding::Plain(DType::F32) || !op.weight_fits_f16 {
            return Err(Unsupported::new("multiplies weights in f16, which cannot hold these"));
        }
        let x = op.plain_x()?;
        check_precision(op, x)?;
        super::served(op, info, fitting(op, x, info))
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<LaunchSequence, HalError> {
        super::prepare(device, op, plan, |_, shared| Some(part(&plan.config, shared.matrices?)))
    }

    fn source_hash(&self, _: &CheckedGemm, _: &TileConfig) -> u64 {
        *SOURCE_HASH
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invocations_share_tiles_without_rest() {
        for config in CONFIGS {
            let TileConfig { tile_n, tile_m, tile_k, threads, shared_bytes, .. } = *config;
            let part = part(config, CooperativeMatrices { side: 16, lanes: CooperativeMatrices::MAX_LANES });
            let of = |name| part.constants.iter().find(|(n, _)| *n == name).expect("a constant").1;
            // Otherwise part of a tile would not be written.
            assert_eq!(of("W_PIECES") * threads * 4 * of("PIECE_QUADS") * 4, tile_n * tile_k, "{config:?}");
            assert_eq!(of("X_PIECES") * threads * 8, tile_m * tile_k, "{config:?}");
            assert_eq!(of("NS") * of("MS") * 256 * of("SUBGROUPS"), tile_n * tile_m, "{config:?}");
            // A packed k-tile is whole steps for the kernels.
            assert_eq!(64 % tile_k, 0);
            assert!(shared_bytes <= 48 << 10);
        }
    }

    #[test]
    fn x_is_converted_where_kernels_cannot_read_it_in_place() {
        let x = Dense::rows_of(DType::F16, 128);
        let of = |x, k, order| x_prologue(x, k, order, &CONFIGS[2]);
        let plain = Some(XPrologue::Convert { row_factors: false });
        assert_eq!(of(x, 128, false), None);
        assert_eq!(of(x, 128, true), plain);
        assert_eq!(of(Dense { aligned16: false, ..x }, 128, false), plain);
        assert_eq!(of(Dense { col_stride: 2, ..x }, 128, false), plain);
        assert_eq!(of(x, 96, false), plain);
        assert_eq!(of(Dense::rows_of(DType::BF16, 128), 128, false), Some(XPrologue::Convert { row_factors: true }));
    }
}
