//! `gemm_matrix`: any number of tokens, with cooperative matrices. W is decoded to f16 and multiplied with f16.

use std::sync::Arc;

use qgemm_formats::{DType, Encoding};
use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, HalError, Kernel, KernelFamily, LaunchPlan, Math, Schedule, TileConfig,
    Unsupported,
};

use super::staging;
use crate::adapter::{COOPERATIVE_MATRICES, CooperativeMatrices};
use crate::shader::{Codes, FourRows, Part, table_bytes};

/// Name of the family.
const NAME: &str = "gemm_matrix";
const QUADS: &str = include_str!("../../shaders/quads.wgsl");
const MAIN_LOOP: &str = include_str!("../../shaders/gemm_matrix.wgsl");
const EXTENSIONS: &str = "enable f16;\nenable wgpu_cooperative_matrix;\n";

const SIDE_16: &str =
    "alias Left = coop_mat16x16<f16, A>;\nalias Right = coop_mat16x16<f16, B>;\nalias Sums = coop_mat16x16<f32, C>;";
const SIDE_8: &str =
    "alias Left = coop_mat8x8<f16, A>;\nalias Right = coop_mat8x8<f16, B>;\nalias Sums = coop_mat8x8<f32, C>;";

/// Rows and tokens whose sums a subgroup finishes at once.
const BLOCK: u32 = 16;
/// Bytes of workgroup memory that this takes.
const SUMS_BYTES: u32 = BLOCK * BLOCK * 4;

/// A configuration, and what a subgroup has of it.
pub(crate) struct Tile {
    pub config: TileConfig,
    /// Rows of W and tokens of a subgroup.
    part: (u32, u32),
}

/// From many tokens to few. Efficiencies, and how many workgroups a unit has at once, as 16 to 2048 tokens of Q4_0,
/// 14336x4096, took on an H200.
pub(crate) static TILES: &[Tile] = &[
    tile((128, 128, 32), (64, 64), 1, 2, 335),
    tile((128, 128, 32), (64, 32), 2, 1, 305),
    tile((64, 64, 64), (32, 32), 1, 1, 270),
    tile((64, 32, 64), (32, 16), 1, 2, 160),
    tile((64, 16, 64), (16, 16), 1, 3, 120),
];

const fn tile(
    (tile_n, tile_m, tile_k): (u32, u32, u32),
    part: (u32, u32),
    stages: u32,
    blocks_per_unit: u32,
    efficiency: u32,
) -> Tile {
    let subgroups = tile_n / part.0 * (tile_m / part.1);
    let config = TileConfig {
        family: NAME,
        math: Math::TensorF16,
        tile_n,
        tile_m,
        tile_k,
        threads: subgroups * CooperativeMatrices::MAX_LANES,
        blocks_per_unit,
        schedule: Schedule::Grid,
        max_splits: 1,
        stages,
        // Each column of W, and each token of X, is padded by eight halves.
        shared_bytes: stages * 2 * (tile_k * (tile_n + 8) + tile_m * (tile_k + 8)) + subgroups * SUMS_BYTES,
        staged_x: None,
        rounded_weights: Some(DType::F16),
        efficiency: (efficiency, 500),
    };
    Tile { config, part }
}

/// The sources and constants of a tile on a device with such matrices. Smaller subgroups make for fewer invocations.
pub(crate) fn part(tile: &Tile, matrices: CooperativeMatrices) -> Part {
    let Tile { config, part } = tile;
    let CooperativeMatrices { side, lanes } = matrices;
    let subgroups = config.threads / CooperativeMatrices::MAX_LANES;
    let threads = subgroups * lanes;
    let (ns, ms) = (part.0 / side, part.1 / side);
    // Scales are read once for so many columns of four rows: as many as leave something to do for every invocation.
    let piece_quads = if config.tile_n * config.tile_k >= 32 * config.threads { 2 } else { 1 };
    let constants = vec![
        ("TILE_N", config.tile_n),
        ("TILE_M", config.tile_m),
        ("TILE_K", config.tile_k),
        ("BUFFERS", config.stages),
        ("THREADS", threads),
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
        constants,
    }
}

/// The tiles that an adapter's workgroup memory allows.
fn fitting<'a>(op: &'a CheckedGemm, info: &DeviceInfo) -> impl Iterator<Item = TileConfig> + use<'a> {
    let available = info.shared_bytes.saturating_sub(table_bytes(op.format));
    let fits = move |config: &TileConfig| config.shared_bytes <= available;
    let with_x = move |config| TileConfig { staged_x: staging::staged_x(op, &config), ..config };
    TILES.iter().map(|tile| tile.config).filter(fits).map(with_x)
}

/// The family.
#[derive(Debug)]
pub(crate) struct GemmMatrix;

impl KernelFamily for GemmMatrix {
    fn name(&self) -> &'static str {
        NAME
    }

    fn supports(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<(), Unsupported> {
        if !info.features.contains(COOPERATIVE_MATRICES) {
            return Err(Unsupported::new("needs cooperative matrices in f16 with sums in f32, of 16x16x16 or 8x8x8"));
        }
        if op.format.encoding == Encoding::Plain(DType::F32) || !op.weight_fits_f16 {
            return Err(Unsupported::new("multiplies weights in f16, which cannot hold these"));
        }
        staging::check(op, info)?;
        super::check(op, info, fitting(op, info).last())
    }

    fn candidates(&self, op: &CheckedGemm, info: &DeviceInfo) -> Vec<TileConfig> {
        fitting(op, info).collect()
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<Arc<dyn Kernel>, HalError> {
        let same = |tile: &&Tile| TileConfig { staged_x: plan.config.staged_x, ..tile.config } == plan.config;
        let tile = TILES.iter().find(same);
        super::prepare(device, op, plan, |_, shared| Some(part(tile?, shared.matrices?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families::staging::PADDING;

    #[test]
    fn invocations_share_tiles_without_rest() {
        for tile in TILES {
            let TileConfig { tile_n, tile_m, tile_k, threads, shared_bytes, .. } = tile.config;
            let part = part(tile, CooperativeMatrices { side: 16, lanes: CooperativeMatrices::MAX_LANES });
            let of = |name| part.constants.iter().find(|(n, _)| *n == name).expect("a constant").1;
            // Else part of a tile would stay as it is.
            assert_eq!(of("W_PIECES") * threads * 4 * of("PIECE_QUADS") * 4, tile_n * tile_k, "{:?}", tile.config);
            assert_eq!(of("X_PIECES") * threads * 8, tile_m * tile_k, "{:?}", tile.config);
            // What kernels see of a slab are whole steps, and of a copy of X, too.
            assert_eq!((64 % tile_k, PADDING.0 % tile_m as usize, PADDING.1 % tile_k as usize), (0, 0, 0));
            assert!(shared_bytes <= 48 << 10);
        }
    }
}
