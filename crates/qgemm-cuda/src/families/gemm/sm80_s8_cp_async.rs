//! The main loop of `gemm` for X in signed bytes, on the integer matrix instructions of Ampere and newer: W is copied asynchronously
//! into a ring of each warp, X passes through registers into one that all warps share.

use qgemm_formats::{DType, XFormat};
use qgemm_hal::{Math, Schedule, Variant};

use super::common::{self, BARRIER, K_BLOCK, STAGED};
use super::instance::{FitsRegisters, Instance, MainLoop, Parts, XAccess};
use super::shares::Shares;
use super::types::Types;
use crate::arch::most_shared;

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    family: "gemm",
    name: "sm80_s8_cp_async",
    entry: "entry/sm80_gemm_s8_cp_async.cu",
    symbol: "qg_sm80_gemm_s8_cp_async",
    arch_specific: false,
    schedule: Schedule::StreamK,
    x_access: XAccess::Planes,
    // Codes are exact operands, and scales act on their sums.
    rounds_beyond: None,
    experts_tiles: |_| &[],
    for_experts: None,
    // A persistent grid has one dimension.
    most_m_tiles: usize::MAX,
    // Threads reckon in 32 bits from a tile of rows to the next.
    most_tile_bytes: u32::MAX as usize,
    instances,
};

struct Tile {
    tile_m: u32,
    /// Tiles of rows of a warp.
    row_tiles: u32,
    /// K-blocks of a stage of X.
    stage_k_blocks: u32,
    x_stages: u32,
    /// Shares of what `mma.sync` reaches, where every 32 columns have scales of X, and of bandwidth, per mille.
    efficiency: (u32, u32),
}

const fn tile(tile_m: u32, row_tiles: u32, stage_k_blocks: u32, x_stages: u32, efficiency: (u32, u32)) -> Tile {
    Tile { tile_m, row_tiles, stage_k_blocks, x_stages, efficiency }
}

/// By how much nearer to the rate of instructions a kernel comes whose sums are scaled once in 64 columns: on Hopper no nearer (INT4 g128, 512
/// tokens of 14336 x 4096 on an H200: 171 us, Q4_0 211 us).
const RARE_SCALES: u32 = 2;

/// Shares are of 512 tokens of Q4_0, 14336 x 4096, on an H200. Stages of two k-blocks leave less to do beside products: 203 us instead of 222.
static TILES: [Tile; 4] = [
    tile(32, 2, 1, 6, (157, 560)),
    tile(64, 2, 1, 4, (220, 500)),
    tile(64, 2, 2, 4, (240, 500)),
    tile(64, 1, 1, 4, (170, 450)),
];

/// Warps of a CTA, along N; all of them compute its tokens.
const WARPS: u32 = 8;
/// Columns of X of which a sum is kept.
const CHUNK: u32 = 16;
/// Columns of X that share a scale, in the two ways that there are kernels for.
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
            .filter(|tile| tile.suits(types))
            .map(move |tile| tile.instance(types, x_format))
            .filter(has_room)
            .filter(fits_registers)
    };
    X_FORMATS.into_iter().flat_map(of_format).collect()
}

/// Whether minimums, or offsets that bytes do not hold, act on sums of X's codes (`SignedBytes::HAS_MIN`).
pub(super) fn has_sums(types: &Types) -> bool {
    types.has_minimums() || (types.has_block_offsets() && types.format.code_bits() == 8)
}

impl Tile {
    /// Two k-blocks a stage are for short k-tiles: of super-blocks, stages of one bring little but X, and registers are scarce (Q2_K, 512
    /// tokens of 14336 x 4096 on an H200: 535 us, and 502 with one). On Hopper, where such products are slower than those in f16, few tiles
    /// serve an X that is given, and fewer yet for codes of a table, which the bundle has room for.
    fn suits(&self, types: &Types) -> bool {
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
        // The run in use, and those of all stages in flight. Threads that copy leave a stage to the slowest of them.
        let w_stages = 1 + (x_stages - 2).div_ceil(run_k_tiles * k_tile_blocks / stage_k_blocks);
        let scales = if has_block_scales { tile_m * 2 * 4 } else { common::ALIGNMENT };
        // Four words for a token, eight where every chunk has a sum (`SUM_PASSES`).
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
            parks_state: true,
            constants: vec![
                ("QG_ROW_TILES", row_tiles),
                ("QG_WARPS_N", WARPS),
                ("QG_STAGE_K_BLOCKS", stage_k_blocks),
                ("QG_X_STAGES", x_stages),
                ("QG_W_STAGES", w_stages),
                ("QG_STAGED", STAGED),
                ("QG_X_BLOCK_SCALES", has_block_scales.into()),
            ],
            warps_n: WARPS,
            efficiency: (math, efficiency.1),
            shares: Shares::OfMmaSync,
            ..Instance::new(Parts {
                main_loop: &MAIN_LOOP,
                types,
                tile: [tile_m, WARPS * rows],
                threads: WARPS * 32,
                shared_bytes: x + w + x_stages * 2 * BARRIER + staging + WARPS * common::PARKED + common::FLAG,
            })
        }
    }
}
