//! `gemm` main loop on Ampere and Ada beyond few tokens:
//! all threads copy W and X with cp.async into rings
//! shared by the CTA's warps.

use qgemm_hal::Variant;

use super::super::prelude::Prelude;
use super::common::{self, BARRIER, K_BLOCK, STAGED};
use super::instance::{FitsRegisters, Instance, InstanceLists, MOST_EXACT, Parts};
use super::main_loop::{MainLoop, MainLoopKind, SegmentTile, XAccess};
use super::shares::Shares;
use super::types::Types;
use crate::arch::most_shared;

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    rounds_beyond: Some(MOST_EXACT),
    // Threads use 32-bit offsets between row tiles.
    most_tile_bytes: u32::MAX as usize,
    segments: &[
        SegmentTile { variants: &Variant::ALL, tokens: 64, serves: 17..=usize::MAX },
        SegmentTile { variants: &Variant::ALL, tokens: 128, serves: 65..=usize::MAX },
    ],
    ..MainLoop::new(
        MainLoopKind::Sm80CpAsync,
        ("entry/sm80_gemm_cp_async.cu", "qg_sm80_gemm_cp_async"),
        XAccess::AlignedRows,
    )
};

pub(super) static INSTANCES: InstanceLists =
    InstanceLists { experts_tiles: |_| &[64, 128], ..InstanceLists::new(&MAIN_LOOP, instances) };

struct Tile {
    tile_m: u32,
    /// Warps along N. All of them compute all
    /// tokens of the CTA.
    warps: u32,
    /// Stages of X k-blocks.
    x_stages: u32,
    /// Tiles of eight tokens that are staged together in a warp's
    /// shared memory on the way to D (`QG_STAGED`).
    staged: u32,
    /// Whether scheduler state is parked; candidates in order.
    state_in_shared: &'static [bool],
    /// Shares of the `mma.sync` rate and of the
    /// bandwidth, per mille (H200).
    efficiency: (u32, u32),
}

const fn tile(tile_m: u32, warps: u32, x_stages: u32, efficiency: (u32, u32)) -> Tile {
    let state_in_shared: &[bool] = if tile_m < 128 { &[false] } else { &[false, true] };
    Tile { tile_m, warps, x_stages, staged: STAGED, state_in_shared, efficiency }
}

const fn low_smem_tile(tile_m: u32, warps: u32, efficiency: (u32, u32)) -> Tile {
    let state_in_shared: &[bool] = if tile_m < 128 { &[false] } else { &[true] };
    Tile { tile_m, warps, x_stages: 3, staged: 1, state_in_shared, efficiency }
}

/// Row tiles of a warp.
const ROW_TILES: u32 = 2;

/// Eight warps with 32 rows each, so that every copied byte
/// of X is used for 256 rows. Work beside `mma` costs
/// a fixed number of instructions per warp, so tiles have as
/// many tokens as registers hold sums for.
static TILES: [Tile; 3] = [tile(32, 8, 6, (345, 560)), tile(64, 8, 4, (545, 500)), tile(128, 8, 4, (685, 450))];
/// Large tiles with minimal rings and staging, for formats whose regular
/// tiles exceed 100 KiB (RTX 3090, RTX 4090) or the registers.
static LOW_SMEM_TILES: [Tile; 2] = [low_smem_tile(64, 8, (440, 450)), low_smem_tile(128, 8, (670, 420))];
/// For formats whose larger tiles exceed 100 KiB, and on Ada, whose many SMs
/// leave few features to each.
static SMALL_TILES: [Tile; 1] = [tile(64, 4, 3, (330, 400))];

fn instances(types: &Types, fits_registers: FitsRegisters<'_>) -> Vec<Instance> {
    if !types.engine.is_mma() || !matches!(types.variant, Variant::Sm80 | Variant::Sm89) {
        return Vec::new();
    }
    let kernels = |tile: &'static Tile| {
        let has_room = |i: &Instance| i.shared_bytes <= most_shared(types.variant);
        tile.state_in_shared.iter().map(|&parks| tile.instance(types, parks)).filter(has_room)
    };
    let best = |tile: &'static Tile| kernels(tile).find(fits_registers);
    let large: Vec<_> = TILES.iter().map(best).collect();
    // An A100 has shared memory for the large tiles; other
    // chips of the variant do not.
    let fits_all = |instance: &Instance| instance.shared_bytes <= most_shared(Variant::Sm89);
    let low_smem = LOW_SMEM_TILES.iter().filter_map(|tile| {
        let at = TILES.iter().position(|large| large.tile_m == tile.tile_m)?;
        let is_wanted = |low: &Instance| large[at].as_ref().is_none_or(|large| !fits_all(large) && fits_all(low));
        kernels(tile).find(|low| is_wanted(low) && fits_registers(low))
    });
    let low_smem: Vec<_> = low_smem.collect();
    let mut all: Vec<_> = large.into_iter().flatten().chain(low_smem).collect();
    let is_wanted = |tile: &Tile| {
        let mut larger = all.iter().filter(|i| i.tile_m == tile.tile_m && fits_all(i));
        types.variant == Variant::Sm89 || larger.next().is_none()
    };
    let small: Vec<_> = SMALL_TILES.iter().filter(|tile| is_wanted(tile)).filter_map(best).collect();
    all.extend(small);
    all
}

impl Tile {
    fn instance(&self, types: &Types, state_in_shared: bool) -> Instance {
        let Tile { tile_m, warps, x_stages, staged, efficiency, .. } = *self;
        let rows = ROW_TILES * types.tile_rows();
        // The k-tile in use, plus the k-tiles of all k-blocks in
        // flight. Copying threads leave one stage to the slowest of them.
        let w_stages = 1 + (x_stages - 2).div_ceil(types.tile_k() / K_BLOCK);
        let x = x_stages * common::x_stage(types, tile_m);
        let w = w_stages * warps * ROW_TILES * types.k_tile_bytes();
        let parked = if state_in_shared { warps * common::SCHEDULER_STATE } else { 0 };
        let staging = warps * common::warp_staging(rows, staged);
        Instance {
            stages: x_stages,
            state_in_shared,
            constants: Prelude {
                row_tiles: Some(ROW_TILES),
                warps_n: Some(warps),
                x_stages: Some(x_stages),
                w_stages: Some(w_stages),
                staged: Some(staged),
                ..Prelude::PRODUCT
            },
            warps_n: warps,
            efficiency,
            shares: Shares::OfMmaSync,
            ..Instance::new(Parts {
                main_loop: &MAIN_LOOP,
                types,
                tile: [tile_m, warps * rows],
                threads: warps * 32,
                shared_bytes: x + w + x_stages * 2 * BARRIER + staging + parked + common::FLAG,
            })
        }
    }
}
