//! `gemm` main loop on consumer Blackwell beyond few tokens: a
//! producer warpgroup copies W and X into rings by TMA, and
//! consumer warps multiply. One tile is also offered on
//! Hopper, where it can be tested.

use qgemm_hal::Variant;

use super::super::prelude::Prelude;
use super::common::{self, BARRIER, K_BLOCK, PRODUCER_WARPS, STAGED};
use super::instance::{FitsRegisters, Instance, InstanceLists, MOST_EXACT, Parts};
use super::main_loop::{ExpertCtas, MainLoop, MainLoopKind, SegmentTile, XAccess};
use super::types::{Engine, Operand, Types};
use crate::arch::most_shared;

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    arch_specific: true,
    rounds_beyond: Some(MOST_EXACT),
    expert_ctas: ExpertCtas::Tiles,
    segments: &[
        SegmentTile { variants: &[Variant::Sm120], tokens: 64, serves: 17..=usize::MAX },
        SegmentTile { variants: &[Variant::Sm120], tokens: 128, serves: 65..=usize::MAX },
    ],
    ..MainLoop::new(MainLoopKind::Sm120TmaWs, ("entry/sm120_gemm_tma_ws.cu", "qg_sm120_gemm_tma_ws"), XAccess::Tma)
};

pub(super) static INSTANCES: InstanceLists =
    InstanceLists { experts_tiles: |_| &[64, 128], ..InstanceLists::new(&MAIN_LOOP, instances) };

struct Tile {
    tile_m: u32,
    /// Consumer warps along N. All of them compute
    /// all tokens of the CTA.
    warps: u32,
    /// Shares of the tensor rate (on Hopper, of the `mma.sync` rate)
    /// and of the bandwidth, per mille.
    efficiency: (u32, u32),
}

const fn tile(tile_m: u32, warps: u32, efficiency: (u32, u32)) -> Tile {
    Tile { tile_m, warps, efficiency }
}

/// Row tiles of a warp.
const ROW_TILES: u32 = 2;
/// Candidates for stages of X k-blocks, and for tiles of eight
/// tokens that are staged together in a warp's shared memory
/// (`QG_STAGED`). The first that fits is used.
const RINGS: [(u32, u32); 5] = [(6, STAGED), (5, STAGED), (4, STAGED), (3, STAGED), (3, 1)];

/// Tiles for Blackwell's 100 KiB: for each token count, the first
/// that fits. `gemm_sliced_k` serves up to 16 tokens.
const TILES: [Tile; 4] =
    [tile(64, 8, (640, 500)), tile(64, 4, (510, 450)), tile(128, 8, (760, 450)), tile(128, 4, (620, 450))];
/// On Hopper `wgmma` is faster. This tile exists for
/// testing, and f16 suffices for that.
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
        // The k-tile in use, plus the k-tiles of all
        // k-blocks in flight.
        let w_stages = 1 + (x_stages - 1).div_ceil(types.tile_k() / K_BLOCK);
        let x = x_stages * common::x_stage(types, tile_m);
        let w = w_stages * warps * ROW_TILES * types.k_tile_bytes();
        let staging = warps * common::warp_staging(rows, staged);
        Instance {
            consumers: warps * 32,
            stages: x_stages,
            // Consumers cannot take over the producers' registers.
            state_in_shared: true,
            constants: Prelude {
                row_tiles: Some(ROW_TILES),
                warps_n: Some(warps),
                x_stages: Some(x_stages),
                w_stages: Some(w_stages),
                staged: Some(staged),
                stage_k_blocks: Some(1),
                run_pitch: Some(types.k_tile_bytes()),
                ..Prelude::PRODUCT
            },
            warps_n: warps,
            efficiency,
            ..Instance::new(Parts {
                main_loop: &MAIN_LOOP,
                types,
                tile: [tile_m, warps * rows],
                threads: (warps + PRODUCER_WARPS) * 32,
                shared_bytes: x + w + x_stages * 2 * BARRIER + staging + warps * common::SCHEDULER_STATE + common::FLAG,
            })
        }
    }
}
