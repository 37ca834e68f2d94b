//! The `gemm` kernels of Hopper for more than a few tokens: warpgroups of four warps, whose matrix instructions run by
//! themselves, and one more that feeds them.

use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{DType, Format};
use qgemm_hal::Variant;

use super::gemm::most_shared;
use super::instance::{Engine, Instance, Shape, Warpgroups};

/// A tile: its tokens, groups of warps that share K, chunks of a stage, and the shares of the arithmetic and bandwidth
/// that an H200 reaches with it, per mille.
struct Tile {
    tile_m: u32,
    k_groups: u32,
    stage_chunks: u32,
    efficiency: (u32, u32),
}

const fn tile(tile_m: u32, k_groups: u32, stage_chunks: u32, efficiency: (u32, u32)) -> Tile {
    Tile { tile_m, k_groups, stage_chunks, efficiency }
}

/// A second group serves 32 tokens faster (14.1 us for 15.0 on an H200); 64 tokens' sums beside the operands of two chunks leave it
/// too few registers. Two chunks a stage cost fewer waits; for 256 tokens there is no room for three such stages.
const TILES: [Tile; 4] =
    [tile(32, 2, 2, (350, 765)), tile(64, 1, 2, (535, 740)), tile(128, 1, 2, (690, 740)), tile(256, 1, 1, (750, 740))];

/// Share of the arithmetic of tiles of up to so many tokens with slabs of 256 columns, whose nested scales take as many
/// instructions as their codes, in per cent of the others'.
const LONG_SLABS: (u32, u32) = (64, 80);

/// Whether the scales of every 16 columns leave a second group too few registers (`kernels.lock` shows no spills of the others).
fn spills(format: Format) -> bool {
    format.sub_block == 16 && format.code_planes.first() == Some(&2)
}

/// Stages: most, and fewest.
const STAGES: (u32, u32) = (8, 3);

/// The kernels for these types.
pub(super) fn instances(format: Format, x: DType, layout: &PackedLayout) -> Vec<Instance> {
    let shaped = |tile: &Tile, stages: u32| {
        let k_groups = if spills(format) { 1 } else { tile.k_groups };
        let shape = Warpgroups { k_groups, stage_chunks: tile.stage_chunks, stages };
        let share = if layout.slab_k > 128 && tile.tile_m <= LONG_SLABS.0 { LONG_SLABS.1 } else { 100 };
        Instance {
            format,
            x,
            variant: Variant::Sm90,
            engine: Engine::Mma,
            tile_m: tile.tile_m,
            threads: shape.threads(),
            blocks_per_sm: 1,
            shape: Shape::Warpgroup(shape),
            layout: layout.clone(),
            efficiency: (tile.efficiency.0 * share / 100, tile.efficiency.1),
        }
    };
    let fits = |i: &Instance| i.shared_bytes() <= most_shared(Variant::Sm90);
    TILES.iter().filter_map(|tile| (STAGES.1..=STAGES.0).rev().map(|stages| shaped(tile, stages)).find(fits)).collect()
}
