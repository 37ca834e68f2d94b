//! `gemm` main loop for INT8 X with integer `mma` on Ampere
//! and newer: cp.async copies W into a ring per warp; X
//! passes through registers into a ring shared by the CTA.

use qgemm_formats::{DType, XFormat};
use qgemm_hal::{Math, Variant};

use super::super::prelude::Prelude;
use super::common::{self, BARRIER, K_BLOCK, STAGED};
use super::instance::{FitsRegisters, Instance, InstanceLists, Parts};
use super::main_loop::{MainLoop, MainLoopKind, XAccess};
use super::shares::Shares;
use super::types::Types;
use crate::arch::most_shared;

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    // Threads use 32-bit offsets between row tiles.
    most_tile_bytes: u32::MAX as usize,
    ..MainLoop::new(
        MainLoopKind::Sm80S8CpAsync,
        ("entry/sm80_gemm_s8_cp_async.cu", "qg_sm80_gemm_s8_cp_async"),
        XAccess::Planes,
    )
};

pub(super) static INSTANCES: InstanceLists = InstanceLists::new(&MAIN_LOOP, instances);

struct Tile {
    tile_m: u32,
    /// Row tiles of a warp.
    row_tiles: u32,
    /// K-blocks of an X stage.
    stage_k_blocks: u32,
    x_stages: u32,
    /// Shares of the `mma.sync` rate (with X scales for every 32
    /// columns) and of the bandwidth, per mille.
    efficiency: (u32, u32),
}

const fn tile(tile_m: u32, row_tiles: u32, stage_k_blocks: u32, x_stages: u32, efficiency: (u32, u32)) -> Tile {
    Tile { tile_m, row_tiles, stage_k_blocks, x_stages, efficiency }
}

/// Efficiency factor when sums are scaled only once in 64
/// columns; on Hopper there is no gain.
const RARE_SCALES: u32 = 2;

/// Measured with 512 tokens of Q4_0 on an H200. Stages of
/// two k-blocks leave less work beside the products.
static TILES: [Tile; 4] = [
    tile(32, 2, 1, 6, (157, 560)),
    tile(64, 2, 1, 4, (220, 500)),
    tile(64, 2, 2, 4, (240, 500)),
    tile(64, 1, 1, 4, (170, 450)),
];

/// Warps of a CTA, along N. All of them compute
/// all tokens of the CTA.
const WARPS: u32 = 8;
/// Columns of X in a block sum.
const CHUNK: u32 = 16;
/// Supported formats of X: block scales and token scales.
pub(super) const X_FORMATS: [XFormat; 2] = [XFormat::Q8_0, XFormat::Int8Token];

fn instances(types: &Types, fits_registers: FitsRegisters<'_>) -> Vec<Instance> {
    let is_served = types.has_signed_bytes() && types.x == DType::F16 && types.variant >= Variant::Sm80;
    if !is_served {
        return Vec::new();
    }
    let of_format = |x_format: XFormat| {
        let has_room = |i: &Instance| i.shared_bytes <= most_shared(types.variant);
        TILES
            .iter()
            .filter(|tile| tile.is_eligible(types))
            .map(move |tile| tile.instance(types, x_format))
            .filter(has_room)
            .filter(fits_registers)
    };
    X_FORMATS.into_iter().flat_map(of_format).collect()
}

/// Whether minimums, or offsets that do not fit in a byte,
/// apply to X block sums (`SignedBytes::HAS_MIN`).
pub(super) fn has_sums(types: &Types) -> bool {
    types.has_minimums() || (types.has_block_offsets() && types.format.code_bits() == 8)
}

impl Tile {
    /// Whether the tile suits the types. Two k-blocks per stage
    /// are for short k-tiles: with super-blocks registers are
    /// scarce and the gain is small.
    ///
    /// On Hopper f16 products are faster, so few tiles are
    /// kept for a given INT8 X, and fewer for codebook
    /// formats, to keep the bundle small.
    fn is_eligible(&self, types: &Types) -> bool {
        let has_short_k_tiles = types.tile_k() <= 2 * K_BLOCK;
        let is_best = self.tile_m != 64 || self.row_tiles == 1 || (self.stage_k_blocks == 2) == has_short_k_tiles;
        let is_wanted = types.format.encoding.is_integer() || self.row_tiles == 2;
        let is_kept = types.variant != Variant::Sm90 || (is_best && is_wanted);
        is_kept && (self.stage_k_blocks == 1 || has_short_k_tiles)
    }

    fn instance(&self, types: &Types, x_format: XFormat) -> Instance {
        let Tile { tile_m, row_tiles, stage_k_blocks, x_stages, efficiency } = *self;
        let rows = row_tiles * types.tile_rows();
        let has_block_scales = x_format != XFormat::Int8Token;
        let k_tile_blocks = types.tile_k() / K_BLOCK;
        let run_k_tiles = (stage_k_blocks / k_tile_blocks).max(1);
        // The W segment in use, plus the segments of all
        // stages in flight. Copying threads leave one stage
        // to the slowest of them.
        let w_stages = 1 + (x_stages - 2).div_ceil(run_k_tiles * k_tile_blocks / stage_k_blocks);
        let scales = if has_block_scales { tile_m * 2 * 4 } else { common::ALIGNMENT };
        // Four words for each token, or eight when every chunk
        // has a sum (`SUM_PASSES`).
        let passes = if types.format.sub_block as u32 == CHUNK { 2 } else { 1 };
        let sums = if has_sums(types) { passes * tile_m * K_BLOCK / CHUNK * 4 } else { common::ALIGNMENT };
        let x = x_stages * stage_k_blocks * (tile_m * K_BLOCK + scales + sums);
        let w = w_stages * WARPS * row_tiles * run_k_tiles * types.k_tile_bytes();
        let staging = WARPS * common::warp_staging(rows, STAGED);
        let rarely = !has_block_scales && (types.format.sub_block >= 64 || types.format.scale_planes.is_empty());
        let gains = rarely && types.variant != Variant::Sm90;
        let math = if gains { efficiency.0 * RARE_SCALES } else { efficiency.0 };
        Instance {
            stages: x_stages * stage_k_blocks,
            x_format,
            math: Math::TensorS8,
            state_in_shared: true,
            constants: Prelude {
                row_tiles: Some(row_tiles),
                warps_n: Some(WARPS),
                stage_k_blocks: Some(stage_k_blocks),
                x_stages: Some(x_stages),
                w_stages: Some(w_stages),
                staged: Some(STAGED),
                x_block_scales: Some(has_block_scales.into()),
                ..Prelude::PRODUCT
            },
            warps_n: WARPS,
            efficiency: (math, efficiency.1),
            shares: Shares::OfMmaSync,
            ..Instance::new(Parts {
                main_loop: &MAIN_LOOP,
                types,
                tile: [tile_m, WARPS * rows],
                threads: WARPS * 32,
                shared_bytes: x + w + x_stages * 2 * BARRIER + staging + WARPS * common::SCHEDULER_STATE + common::FLAG,
            })
        }
    }
}
