//! The `gemm` kernels for a few tokens on Ampere and newer: a block is few rows, whose K dimension its warps share.

use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{DType, Encoding, Format};
use qgemm_hal::Variant;

use super::gemm::most_shared;
use super::instance::{Engine, Instance, Shape};

/// Slices of the K dimension: as many warps stream through a block's rows.
const SLICES: u32 = 8;

/// Tokens of a tile, and the shares of the arithmetic and bandwidth that an H200 reaches with it, per mille.
const TILES: [(u32, (u32, u32)); 2] = [(8, (130, 820)), (16, (160, 700))];

/// Tiles of rows of a block and blocks an SM, in the order in which they are tried for room: more rows share the activations
/// that a block reads, and two blocks the time in which one begins and ends.
const BLOCKS: [(u32, u32); 4] = [(4, 2), (4, 1), (2, 1), (1, 1)];

/// Slabs in the rings: most, and fewest.
const STAGES: (u32, u32) = (4, 2);

/// The kernels for these types.
pub(super) fn instances(format: Format, x: DType, variant: Variant, layout: &PackedLayout) -> Vec<Instance> {
    let instance = |tile_m: u32, efficiency: (u32, u32)| {
        let shaped = |(row_tiles, blocks_per_sm): (u32, u32), stages: u32| Instance {
            format,
            x,
            variant,
            engine: Engine::Mma,
            tile_m,
            threads: SLICES * 32,
            blocks_per_sm,
            shape: Shape::SlicedK { row_tiles, warps: 1, stages },
            layout: layout.clone(),
            efficiency,
        };
        // A block's memory counts with the 1 KiB that the system keeps of it.
        let fits = |i: &Instance| (i.shared_bytes() + 1024) * i.blocks_per_sm <= most_shared(variant) + 1024;
        let of_block = |block| (STAGES.1..=STAGES.0).rev().map(|stages| shaped(block, stages)).find(fits);
        BLOCKS.into_iter().filter(|&block| !spills(layout, tile_m, block)).find_map(of_block)
    };
    TILES.into_iter().filter_map(|(tile_m, efficiency)| instance(tile_m, efficiency)).collect()
}

/// Whether the kernel has more values at hand than registers (`kernels.lock` shows no spills of the others).
fn spills(layout: &PackedLayout, tile_m: u32, block: (u32, u32)) -> bool {
    let format = layout.format();
    let has_minimums = format.encoding == Encoding::IntAffine;
    match block {
        // Q2_K has minimums for every 16 columns.
        (row_tiles, _) if has_minimums && format.sub_block == 16 => tile_m == 16 || row_tiles > 2,
        (4, 2) if tile_m == 16 => has_minimums || (format.code_planes == [2] && layout.slab_k == 128),
        _ => false,
    }
}
