//! The `gemm` kernels of Hopper for more than a few tokens: warpgroups of four warps, whose matrix instructions run by
//! themselves, and a warp that feeds them.

use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{DType, Format};
use qgemm_hal::Variant;

use super::gemm::most_shared;
use super::instance::{Engine, Instance, Ring, Shape};

/// A tile: its tokens, tiles of rows a warp, blocks that share an SM, and the shares of the arithmetic and bandwidth that
/// an H200 reaches with it, per mille.
struct Tile {
    tile_m: u32,
    row_tiles: u32,
    blocks_per_sm: u32,
    efficiency: (u32, u32),
}

const fn tile(tile_m: u32, row_tiles: u32, blocks_per_sm: u32, efficiency: (u32, u32)) -> Tile {
    Tile { tile_m, row_tiles, blocks_per_sm, efficiency }
}

const TILES: [Tile; 8] = [
    tile(32, 1, 2, (500, 700)),
    tile(32, 2, 1, (500, 700)),
    tile(64, 1, 2, (600, 700)),
    tile(64, 1, 1, (600, 700)),
    tile(64, 2, 1, (600, 700)),
    tile(128, 1, 1, (700, 700)),
    tile(128, 2, 1, (700, 700)),
    tile(256, 1, 1, (800, 700)),
];

/// Warps that multiply: two warpgroups.
const WARPS: u32 = 8;

/// Stages of X: most, and fewest.
const STAGES: (u32, u32) = (12, 3);

/// The kernels for these types.
pub(super) fn instances(format: Format, x: DType, layout: &PackedLayout) -> Vec<Instance> {
    let shaped = |tile: &Tile, x_stages: u32| Instance {
        format,
        x,
        variant: Variant::Sm90,
        engine: Engine::Mma,
        tile_m: tile.tile_m,
        threads: WARPS * 32 + 128,
        blocks_per_sm: tile.blocks_per_sm,
        shape: Shape::Warpgroup(Ring {
            row_tiles: tile.row_tiles,
            warps: WARPS,
            x_stages,
            ahead: x_stages - 1,
            exact: false,
        }),
        layout: layout.clone(),
        efficiency: tile.efficiency,
    };
    // A block's memory counts with the 1 KiB that the system keeps of it.
    let fits = |i: &Instance| (i.shared_bytes() + 1024) * i.blocks_per_sm <= most_shared(Variant::Sm90) + 1024;
    TILES.iter().filter_map(|tile| (STAGES.1..=STAGES.0).rev().map(|stages| shaped(tile, stages)).find(fits)).collect()
}
