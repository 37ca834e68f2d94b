//! The main loop of `gemm` on consumer Blackwell for more than a few tokens: a producer warpgroup copies W and X into rings by TMA,
//! consumer warps multiply. One tile of it is offered on Hopper, too, a chip that can be had to measure and test it.

use qgemm_hal::{Schedule, Variant};

use super::common::{self, BARRIER, K_BLOCK, PRODUCER_WARPS, STAGED};
use super::instance::{FitsRegisters, Instance, MOST_EXACT, MainLoop, Parts, STAGE_K_BLOCKS, XAccess};
use super::types::{Engine, Operand, Types};
use crate::arch::most_shared;

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    family: "gemm",
    name: "sm120_tma_ws",
    entry: "entry/sm120_gemm_tma_ws.cu",
    symbol: "qg_sm120_gemm_tma_ws",
    arch_specific: true,
    schedule: Schedule::StreamK,
    x_access: XAccess::Tma,
    rounds_beyond: Some(MOST_EXACT),
    experts_tiles: |_| &[64],
    for_experts: None,
    // A persistent grid has one dimension.
    most_m_tiles: usize::MAX,
    most_tile_bytes: usize::MAX,
    instances,
};

struct Tile {
    tile_m: u32,
    /// Consumer warps along N; all of them compute the CTA's tokens.
    warps: u32,
    /// Shares of the tensor rate (on Hopper, of what `mma.sync` reaches), and of bandwidth, per mille.
    efficiency: (u32, u32),
}

const fn tile(tile_m: u32, warps: u32, efficiency: (u32, u32)) -> Tile {
    Tile { tile_m, warps, efficiency }
}

/// Tiles of rows of a warp.
const ROW_TILES: u32 = 2;
/// Stages of a k-block of X, and tiles of eight tokens that pass through a warp's shared memory together (`QG_STAGED`): the
/// first of which there is room for.
const RINGS: [(u32, u32); 5] = [(6, STAGED), (5, STAGED), (4, STAGED), (3, STAGED), (3, 1)];

/// Blackwell has 100 KiB: of as many tokens the first that fits. Up to 16 tokens are `gemm_sliced_k`'s.
const TILES: [Tile; 5] = [
    tile(32, 8, (460, 560)),
    tile(64, 8, (640, 500)),
    tile(64, 4, (510, 450)),
    tile(128, 8, (760, 450)),
    tile(128, 4, (620, 450)),
];
/// Warpgroups are faster there. It is to be seen on a chip at hand what this main loop computes, for which f16 is enough.
const HOPPER_TILES: [Tile; 1] = [tile(128, 8, (490, 450))];

fn instances(types: &Types, fits_registers: FitsRegisters<'_>) -> Vec<Instance> {
    let tiles: &[Tile] = match types.variant {
        Variant::Sm90 if types.engine == Engine::Mma(Operand::F16) => &HOPPER_TILES,
        Variant::Sm120 if types.engine.is_mma() => &TILES,
        _ => &[],
    };
    let best = |tile: &Tile| {
        let mut kernels = RINGS.iter().map(|&(x_stages, staged)| tile.instance(types, x_stages, staged));
        kernels.find(|i| i.shared_bytes <= most_shared(types.variant))
    };
    let mut all: Vec<Instance> = Vec::new();
    for tile in tiles {
        if all.last().is_none_or(|larger| larger.tile_m != tile.tile_m) {
            all.extend(best(tile).filter(fits_registers));
        }
    }
    all
}

impl Tile {
    fn instance(&self, types: &Types, x_stages: u32, staged: u32) -> Instance {
        let Tile { tile_m, warps, efficiency } = *self;
        let rows = ROW_TILES * types.tile_rows();
        // The k-tile in use, and those of all k-blocks in flight.
        let w_stages = 1 + (x_stages - 1).div_ceil(types.tile_k() / K_BLOCK);
        let x = x_stages * common::x_stage(types, tile_m);
        let w = w_stages * warps * ROW_TILES * types.k_tile_bytes();
        let staging = warps * common::warp_staging(rows, staged);
        Instance {
            consumers: warps * 32,
            stages: x_stages,
            // The producers' registers are not the consumers'.
            parks_state: true,
            constants: vec![
                ("QG_ROW_TILES", ROW_TILES),
                ("QG_WARPS_N", warps),
                ("QG_X_STAGES", x_stages),
                ("QG_W_STAGES", w_stages),
                ("QG_STAGED", staged),
                (STAGE_K_BLOCKS, 1),
                (common::RUN_PITCH, types.k_tile_bytes()),
            ],
            warps_n: warps,
            efficiency,
            ..Instance::new(Parts {
                main_loop: &MAIN_LOOP,
                types,
                tile: [tile_m, warps * rows],
                threads: (warps + PRODUCER_WARPS) * 32,
                shared_bytes: x + w + x_stages * 2 * BARRIER + staging + warps * common::PARKED + common::FLAG,
            })
        }
    }
}
