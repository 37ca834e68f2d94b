//! The main loop of `gemm` for X in signed bytes, on the integer matrix instructions of Ampere and newer: W is copied asynchronously
//! into a ring of each warp, X passes through registers into one that all warps share.

use qgemm_formats::{DType, XFormat};
use qgemm_hal::{Math, Schedule, Variant};

use super::common::{self, BARRIER, K_BLOCK, STAGED};
use super::instance::{FitsRegisters, Instance, MainLoop, Parts, XAccess};
use super::types::Types;
use crate::arch::most_shared;
use crate::chip::HOPPER_MMA_SYNC;

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
    /// Warps along N; all of them compute the CTA's tokens.
    warps: u32,
    /// Tiles of rows of a warp.
    row_tiles: u32,
    /// Stages of a k-block of X.
    x_stages: u32,
    /// Tiles of eight tokens that pass through a warp's shared memory together on their way to D (`QG_STAGED`).
    staged: u32,
    /// Shares of what `mma.sync` reaches, where every 32 columns have scales of X, and of bandwidth, per mille.
    efficiency: (u32, u32),
}

const fn tile(tile_m: u32, warps: u32, row_tiles: u32, x_stages: u32, efficiency: (u32, u32)) -> Tile {
    Tile { tile_m, warps, row_tiles, x_stages, staged: STAGED, efficiency }
}

/// By how much nearer to the rate of instructions a kernel comes whose sums are scaled once in 64 columns: on Hopper no nearer (INT4 g128, 512
/// tokens of 14336 x 4096 on an H200: 218 us, Q4_0 283 us).
const RARE_SCALES: u32 = 2;

/// Sums of codes and their scales take registers beside the accumulators, so that warps with many tokens have a tile of rows alone.
static TILES: [Tile; 4] = [
    tile(32, 8, 2, 6, (180, 560)),
    tile(64, 8, 2, 4, (230, 500)),
    tile(64, 8, 1, 4, (210, 450)),
    tile(128, 8, 1, 4, (260, 450)),
];

/// Columns of X of which a sum is kept.
const CHUNK: u32 = 16;
/// Columns of X that share a scale, in the two ways that there are kernels for.
pub(super) const X_FORMATS: [XFormat; 2] = [XFormat::Q8 { block: 32 }, XFormat::Int8Token];

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
    /// Whether its accumulators leave room for what the format's minimums take: sums of X and factors of each row. On Hopper, where such
    /// products are slower than those in f16, few tiles serve an X that is given for codes of a table, which the bundle has room for.
    fn suits(&self, types: &Types) -> bool {
        let has_room = !has_sums(types) || self.tile_m * self.row_tiles <= 64;
        let is_wanted = types.variant != Variant::Sm90 || types.format.encoding.is_integer() || self.row_tiles == 2;
        has_room && is_wanted
    }

    fn instance(&self, types: &Types, x_format: XFormat) -> Instance {
        let Tile { tile_m, warps, row_tiles, x_stages, staged, efficiency } = *self;
        let rows = row_tiles * types.tile_rows();
        let has_block_scales = x_format != XFormat::Int8Token;
        // The k-tile in use, and those of all k-blocks in flight. Threads that copy leave a stage to the slowest of them.
        let w_stages = 1 + (x_stages - 2).div_ceil(types.tile_k() / K_BLOCK);
        let scales = if has_block_scales { tile_m * 2 * 4 } else { common::ALIGNMENT };
        let sums = if has_sums(types) { tile_m * K_BLOCK / CHUNK * 4 } else { common::ALIGNMENT };
        let x = x_stages * (tile_m * K_BLOCK + scales + sums);
        let w = w_stages * warps * row_tiles * types.k_tile_bytes();
        let staging = warps * common::warp_staging(rows, staged);
        let rarely = !has_block_scales && (types.format.sub_block >= 64 || types.format.scale_planes.is_empty());
        let gains = rarely && types.variant != Variant::Sm90;
        let math = if gains { efficiency.0 * RARE_SCALES } else { efficiency.0 };
        // Hopper's rate is that of `wgmma`.
        let of_rate = if types.variant == Variant::Sm90 { HOPPER_MMA_SYNC } else { 1.0 };
        let math = (f64::from(math) * of_rate) as u32;
        Instance {
            stages: x_stages,
            x_format,
            math: Math::TensorS8,
            parks_state: true,
            constants: vec![
                ("QG_ROW_TILES", row_tiles),
                ("QG_WARPS_N", warps),
                ("QG_X_STAGES", x_stages),
                ("QG_W_STAGES", w_stages),
                ("QG_STAGED", staged),
                ("QG_X_BLOCK_SCALES", has_block_scales.into()),
            ],
            warps_n: warps,
            efficiency: (math, efficiency.1),
            ..Instance::new(Parts {
                main_loop: &MAIN_LOOP,
                types,
                tile: [tile_m, warps * rows],
                threads: warps * 32,
                shared_bytes: x + w + x_stages * 2 * BARRIER + staging + warps * common::PARKED + common::FLAG,
            })
        }
    }
}
