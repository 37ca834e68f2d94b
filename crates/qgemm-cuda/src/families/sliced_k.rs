//! The `gemm` kernels for a few tokens on Ampere and newer: a block is few rows, whose K dimension its warps share.

use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{DType, Format};
use qgemm_hal::Variant;

use super::gemm::most_shared;
use super::instance::{Engine, Instance, Shape, has_long_slabs, has_minimums, is_scaled_integers};

/// How a block divides its work.
#[derive(Clone, Copy, PartialEq)]
struct Block {
    /// Tiles of rows of a warp, and warps of a slice.
    row_tiles: u32,
    warps: u32,
    slices: u32,
    blocks_per_sm: u32,
}

const fn block(row_tiles: u32, warps: u32, slices: u32, blocks_per_sm: u32) -> Block {
    Block { row_tiles, warps, slices, blocks_per_sm }
}

/// Blocks of eight warps, in the order in which they are tried for room. Two on an SM hide each other's beginnings and ends;
/// more rows share the activations that a block reads.
const BLOCKS: [Block; 5] =
    [block(4, 1, 8, 2), block(2, 2, 4, 2), block(1, 2, 4, 2), block(4, 1, 8, 1), block(2, 2, 4, 1)];
/// The same for 16 tokens, of which activations are half of what is copied, and half of the arithmetic is done for all rows
/// alike: first a warp alone with more rows, which waits for no other.
const BLOCKS_16: [Block; 6] = [LONE_WARPS, BLOCKS[0], BLOCKS[1], BLOCKS[2], BLOCKS[3], BLOCKS[4]];
const LONE_WARPS: Block = block(4, 1, 4, 2);
/// More rows, for weights that have so many that there are two such blocks for every SM. There are registers for four warps that
/// have 112 rows each, and for six of 64.
const WIDE_BLOCKS: [Block; 2] = [block(7, 1, 4, 2), block(4, 2, 3, 2)];

/// A tile of tokens, and the blocks that may serve it.
struct Tile {
    tile_m: u32,
    blocks: &'static [Block],
    /// Shares of the arithmetic and bandwidth that an H200 reaches, per mille.
    efficiency: (u32, u32),
}

const fn tile(tile_m: u32, blocks: &'static [Block], efficiency: (u32, u32)) -> Tile {
    Tile { tile_m, blocks, efficiency }
}

const TILES: [Tile; 2] = [tile(8, &BLOCKS, (180, 920)), tile(16, &BLOCKS_16, (180, 840))];
/// For weights of up to six bits, of which a block reads no more than of activations: INT4 of 28672 x 8192 took an H200 34.2 µs
/// for 36.3 with 8 tokens, 36.2 for 40.9 with 16. Q8_0 with 16 tokens took 64.5 for 62.4.
const WIDE_TILES: [Tile; 2] = [tile(8, &WIDE_BLOCKS, (160, 950)), tile(16, &WIDE_BLOCKS, (170, 920))];
/// For slabs of 256 columns, whose nested scales take instructions and registers beside their codes: eight warps an SM before
/// sixteen, and four where shared memory has room for no more (100 KiB: Ada, consumer Blackwell). The shares are Q4_K's; others
/// have `long_slab_share` of them.
const LONG_SLAB_TILES: [Tile; 2] = [tile(8, &LONG_BLOCKS, (165, 920)), tile(16, &LONG_BLOCKS_16, (185, 800))];
const LONG_BLOCKS: [Block; 8] =
    [LONE_WARPS, block(2, 1, 4, 2), BLOCKS[0], BLOCKS[1], BLOCKS[2], BLOCKS[3], BLOCKS[4], block(2, 1, 4, 1)];
const LONG_BLOCKS_16: [Block; 4] = [block(2, 2, 3, 2), block(2, 2, 2, 2), block(2, 2, 2, 1), block(1, 4, 2, 1)];
/// For weights that have many more rows (28672 x 8192, Q4_K, on an H200): three blocks an SM for 8 tokens, and for 16 blocks of 128
/// rows, which read half of the activations (43 for 50 µs).
const WIDE_LONG_SLAB_TILES: [Tile; 2] =
    [tile(8, &[block(2, 1, 4, 3)], (183, 950)), tile(16, &[block(4, 2, 2, 2)], (210, 900))];

/// Slabs in the rings: most, and fewest. As many as there is room for, also because a block more on an SM than was meant is
/// slower: the next kernel's blocks, which start early, then crowd on some SMs (measured on an H200: 16.4 for 11.9 µs).
const STAGES: (u32, u32) = (8, 2);

/// The kernels for these types.
pub(super) fn instances(format: Format, x: DType, variant: Variant, layout: &PackedLayout) -> Vec<Instance> {
    let shaped = |tile: &Tile, block: &Block, stages: u32| Instance {
        format,
        x,
        variant,
        engine: Engine::Mma,
        tile_m: tile.tile_m,
        threads: block.warps * block.slices * 32,
        blocks_per_sm: block.blocks_per_sm,
        shape: Shape::SlicedK { row_tiles: block.row_tiles, warps: block.warps, stages },
        layout: layout.clone(),
        efficiency: (tile.efficiency.0 * long_slab_share(layout) / 100, tile.efficiency.1),
    };
    // A block's memory counts with the 1 KiB that the system keeps of it.
    let fits = |i: &Instance| (i.shared_bytes() + 1024) * i.blocks_per_sm <= most_shared(variant) + 1024;
    let is_long = has_long_slabs(layout);
    let of_block = |tile: &Tile, block: &Block| {
        // Operands in f16 take so few instructions that a longer ring gains more than more rows (measured on an H200).
        let needs_long =
            !is_long && [LONE_WARPS, WIDE_BLOCKS[1]].contains(block) || x == DType::F16 && *block == BLOCKS[0];
        let fewest = if needs_long { STAGES.1 + 1 } else { STAGES.1 };
        (fewest..=STAGES.0).rev().map(|stages| shaped(tile, block, stages)).find(fits)
    };
    let instance = |tile: &Tile| {
        let blocks = tile.blocks.iter().filter(|block| !spills(layout, x, variant, tile.tile_m, block));
        blocks.into_iter().find_map(|block| of_block(tile, block))
    };
    let is_narrow = layout.slab_bytes * 8 < 7 * layout.tile_rows * layout.slab_k;
    let (tiles, wide): (&[_], &[_]) = match (is_long, is_narrow) {
        (true, _) => (&LONG_SLAB_TILES, &WIDE_LONG_SLAB_TILES),
        (false, true) => (&TILES, &WIDE_TILES),
        (false, false) => (&TILES, &[]),
    };
    tiles.iter().chain(wide).filter_map(instance).collect()
}

/// What kernels of long slabs reach of Q4_K's arithmetic, per cent: codes of two planes or looked up, and twice the scales, take
/// more instructions (measured on an H200).
fn long_slab_share(layout: &PackedLayout) -> u32 {
    let format = layout.format();
    match () {
        () if !has_long_slabs(layout) => 100,
        () if !format.encoding.is_integer() => 60,
        () if format.code_planes.len() > 1 || format.sub_block == 16 => 85,
        () => 100,
    }
}

/// Whether the kernel has more values at hand than registers (`kernels.lock` shows no spills of the others).
fn spills(layout: &PackedLayout, x: DType, variant: Variant, tile_m: u32, block: &Block) -> bool {
    let format = layout.format();
    // Q2_K has scales and minimums for every 16 columns.
    let has_many_scales = has_minimums(format) && format.sub_block == 16;
    // Eight warps on an SM have all the registers that instructions can name.
    if block.warps * block.slices * block.blocks_per_sm <= 8 {
        let is_long_of_16 = has_long_slabs(layout) && format.sub_block == 16;
        let one_too_many = match (format.code_bits(), variant, x) {
            _ if block.row_tiles == 1 => false,
            (_, Variant::Sm120, _) | (3, Variant::Sm90, DType::BF16) => true,
            (2, Variant::Sm80 | Variant::Sm89, DType::BF16) | (3, Variant::Sm80 | Variant::Sm89, DType::F16) => true,
            _ => block.row_tiles == 4,
        };
        return tile_m == 16 && is_long_of_16 && one_too_many;
    }
    match (block.row_tiles, block.blocks_per_sm) {
        // Sums of X stand beside those of the codes.
        (4, 2) if block.slices > 3 => {
            let has_tight_scales = format.sub_block == 16 || x == DType::BF16 && format.sub_block == 32;
            tile_m == 16 && (is_scaled_integers(format) || has_tight_scales && !layout.scales.is_empty())
        }
        (2, 2) if block.slices == 3 => {
            tile_m == 16
                && (format.sub_block == 16 || x == DType::BF16 && has_minimums(format) && has_long_slabs(layout))
        }
        // For Blackwell the compiler takes a few registers more.
        (2, 2) if format.code_planes.len() > 1 && has_minimums(format) && variant == Variant::Sm120 => {
            tile_m == 16 && x == DType::BF16
        }
        (2, 2) => has_many_scales && (x == DType::BF16 || variant == Variant::Sm80),
        (4, _) => has_many_scales,
        _ => false,
    }
}
