//! The `gemm` kernels of Hopper for more than a few tokens: warpgroups of four warps, whose matrix instructions run by
//! themselves, and one more that feeds them.

use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{DType, Encoding, Format};
use qgemm_hal::Variant;

use super::gemm::most_shared;
use super::instance::{Engine, Instance, Shape, Warpgroups, has_long_slabs};

/// A tile: its tokens, how warps share its 128 rows and its K, and the shares of the arithmetic and bandwidth that an H200
/// reaches with it, per mille.
struct Tile {
    tile_m: u32,
    division: Division,
    efficiency: (u32, u32),
}

/// How the warps of a block divide a tile.
#[derive(Clone, Copy)]
struct Division {
    /// Tiles of rows of a warp, and warps of a group.
    row_tiles: u32,
    warps: u32,
    k_groups: u32,
    stage_chunks: u32,
}

const fn division(row_tiles: u32, warps: u32, k_groups: u32, stage_chunks: u32) -> Division {
    Division { row_tiles, warps, k_groups, stage_chunks }
}

/// Two groups serve 32 tokens faster (14.1 us for 15.0). Two chunks a stage cost fewer waits than one; for 256 tokens there is no
/// room for three such stages. Times here are an H200's, of INT4 14336x4096 where nothing else is said.
const TILES: [Tile; 4] = [
    Tile { tile_m: 32, division: division(1, 8, 2, 2), efficiency: (350, 765) },
    Tile { tile_m: 64, division: division(1, 8, 1, 2), efficiency: (535, 740) },
    Tile { tile_m: 128, division: division(1, 8, 1, 2), efficiency: (690, 740) },
    Tile { tile_m: 256, division: division(1, 8, 1, 1), efficiency: (750, 740) },
];

/// How a tile is divided for `layout`, with no more values at hand than registers (`kernels.lock` shows no spills).
fn best_division(tile: &Tile, x: DType, layout: &PackedLayout) -> Division {
    let format = layout.format();
    let bits = format.code_planes.first();
    let takes_few_instructions = bits == Some(&4) && is_plain_integer(format);
    match (tile.tile_m, layout.slab_k) {
        // Fewer waits (44.8 us for 48.2, INT4 28672x8192). Weights in bf16 pass through f32, which takes the registers.
        (32, 128) if takes_few_instructions && x == DType::F16 => Division { stage_chunks: 4, ..tile.division },
        // The scales of every 16 columns take a second group's registers.
        (32, _) if format.sub_block == 16 && bits == Some(&2) => Division { k_groups: 1, ..tile.division },
        // Half as many warps do once what two tiles of rows have in common (57.3 us for 62.6, INT4 28672x8192); weights of Q8_0,
        // Q4_K and Q6_K take them longer.
        (64, ..=128) if takes_few_instructions => division(2, 4, 2, 2),
        _ => tile.division,
    }
}

/// Whether codes are integers of one plane whose scale, and no more, changes from block to block or is joined by a zero point.
fn is_plain_integer(format: Format) -> bool {
    format.code_planes.len() == 1 && matches!(format.encoding, Encoding::IntOffset { .. } | Encoding::IntZero)
}

/// Share of the arithmetic of tiles of up to so many tokens with slabs of 256 columns, whose nested scales take as many
/// instructions as their codes, in per cent of the others'.
const LONG_SLABS: (u32, u32) = (64, 80);

/// Stages: most, and fewest.
const STAGES: (u32, u32) = (8, 3);

/// The kernels for these types.
pub(super) fn instances(format: Format, x: DType, layout: &PackedLayout) -> Vec<Instance> {
    let shaped = |tile: &Tile, stages: u32| {
        let Division { row_tiles, warps, k_groups, stage_chunks } = best_division(tile, x, layout);
        let shape = Warpgroups { row_tiles, warps, k_groups, stage_chunks, stages };
        let share = if has_long_slabs(layout) && tile.tile_m <= LONG_SLABS.0 { LONG_SLABS.1 } else { 100 };
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
