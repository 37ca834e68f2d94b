//! Kernels of `gemm` for matrix instructions of chips without asynchronous copies (Volta, Turing): entry/gemm_sync_copy.cu.

use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{DType, Format};
use qgemm_hal::Variant;

use super::instance::{Engine, Instance, Shape, class};

const THREADS: u32 = 128;

/// Tokens, row tiles of a warp, and blocks of an SM, which are as many as there are registers for
/// (`kernels.lock`: none of these kernels spills).
struct Tile {
    tokens: u32,
    row_tiles: u32,
    blocks_per_sm: u32,
    /// Share of the tensor cores' rate, per mille: that of matrix instructions in the main loop's issue slots
    /// (docs/performance.md), not measured on a chip.
    arithmetic: u32,
}

/// Volta issues four instructions for a product that keeps its tensor core busy for eight cycles. An access of X brings
/// half of what shared memory could deliver, so that from 32 tokens on two tiles of rows share it.
const VOLTA: [Tile; 3] = [
    Tile { tokens: 8, row_tiles: 1, blocks_per_sm: 4, arithmetic: 400 },
    Tile { tokens: 16, row_tiles: 1, blocks_per_sm: 3, arithmetic: 600 },
    Tile { tokens: 32, row_tiles: 2, blocks_per_sm: 2, arithmetic: 850 },
];

/// Turing issues one, and `ldmatrix` wastes nothing.
const TURING: [Tile; 3] = [
    Tile { tokens: 8, row_tiles: 2, blocks_per_sm: 4, arithmetic: 400 },
    Tile { tokens: 16, row_tiles: 2, blocks_per_sm: 3, arithmetic: 600 },
    Tile { tokens: 32, row_tiles: 2, blocks_per_sm: 2, arithmetic: 850 },
];

/// Every such kernel for these types; none where another main loop serves them.
pub(super) fn instances(format: Format, x: DType, variant: Variant) -> Vec<Instance> {
    let engine = Engine::of(format, x, variant);
    let tiles = match (engine, variant) {
        (Engine::Mma, Variant::Sm70) => &VOLTA,
        (Engine::Mma, Variant::Sm75) => &TURING,
        _ => return Vec::new(),
    };
    let Some(layout) = PackedLayout::new(format, class(variant)) else { return Vec::new() };
    tiles
        .iter()
        .map(|tile| Instance {
            format,
            x,
            variant,
            engine,
            tile_m: tile.tokens,
            threads: THREADS,
            blocks_per_sm: tile.blocks_per_sm,
            shape: Shape::GemmSyncCopy { row_tiles: tile.row_tiles },
            layout: layout.clone(),
            efficiency: (tile.arithmetic, 700),
        })
        .collect()
}
