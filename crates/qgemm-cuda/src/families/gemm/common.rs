//! What main loops have in common: mostly bytes of structs in shared memory. Each kernel asserts the sum that its main loop makes
//! of them.

use super::types::Types;

/// Shared memory is a struct of this alignment.
pub(super) const ALIGNMENT: u32 = 16;
/// What a CTA's threads tell one another at the end of a tile.
pub(super) const FLAG: u32 = 4;
/// An `mbarrier`.
pub(super) const BARRIER: u32 = 8;
/// What a warp parks of the scheduler's state: a tile and two lists (`mainloop/parked_state.cuh`).
pub(super) const PARKED: u32 = 32 + 2 * 16;
/// Words of padding between the sums of neighbouring tokens, and of neighbouring sub-blocks (`SUM_PITCH`,
/// `WarpStaging::PITCH`).
pub(super) const SUM_PADDING: u32 = 4;
/// A line of the cache (`LINE_BYTES`).
const LINE: u32 = 128;
/// Two lines of the cache: what a piece of W needs beside its bytes to lie as far behind a line as in memory.
pub(super) const LINES: u32 = 2 * LINE;

/// Bytes from a run of W in shared memory to the next, where each lies as far behind a line of the cache as in memory (`WRuns`): runs of
/// k-tiles that are no whole lines begin anywhere in one, at 16 bytes.
pub(super) fn pitch_in_lines(run: u32, k_tile: u32) -> u32 {
    match k_tile.is_multiple_of(LINE) {
        true => run,
        false => (run + LINE - ALIGNMENT).next_multiple_of(LINE),
    }
}

/// The constant that says it.
pub(super) const RUN_PITCH: &str = "QG_RUN_PITCH";
/// Columns of X in a k-block: what a stage of a ring holds, or several of.
pub(crate) const K_BLOCK: u32 = 64;
/// Columns of a stage of codes, which share a scale of X (`STAGE_K`).
pub(in crate::families) const STAGE_K: u32 = 128;
/// What kernels of experts that take tiles in turn have for warps that look for faults to tell one another (`store_faults`).
pub(in crate::families) const FAULTS: u32 = 32;
/// Tiles of so many tokens that pass through a warp's shared memory together on their way to D, where there is room
/// (`QG_STAGED`).
pub(super) const STAGED: u32 = 2;

/// Warps of a producer warpgroup.
pub(super) const PRODUCER_WARPS: u32 = 4;

/// Bytes between the rows of neighbouring tokens (`XTile::PITCH`).
const X_PADDING: u32 = 16;
/// Tokens of a matrix instruction.
pub(super) const MMA_TOKENS: u32 = 8;

/// A token's row of `chunks` chunks of X (`XTile`).
pub(super) fn x_row(types: &Types, chunks: u32) -> u32 {
    chunks * (types.chunk_k() + types.chunk_padding()) * types.engine.x_bytes() + X_PADDING
}

/// `sizeof(XStage)` of one k-block.
pub(super) fn x_stage(types: &Types, tile_m: u32) -> u32 {
    tile_m * K_BLOCK * types.engine.x_bytes()
}

/// `sizeof(ScaleTableOfWarp)` in `mainloop/scale_table.cuh`, of a warp with `rows` rows.
pub(super) fn scale_table_bytes(types: &Types, rows: u32) -> u32 {
    if types.has_nested_scales() { rows * types.tile_k() / types.format.sub_block as u32 * 4 } else { 0 }
}

/// The sums of a CTA's tile.
pub(super) fn cta_sums(tile_m: u32, tile_n: u32) -> u32 {
    tile_m * (tile_n + SUM_PADDING) * 4
}

/// `sizeof(WarpSums)` in `epilogue/sliced_k.cuh`, of a warp with `rows` rows.
pub(super) fn warp_sums(tile_m: u32, rows: u32) -> u32 {
    let padding = if tile_m < MMA_TOKENS { 0 } else { SUM_PADDING };
    tile_m * (rows + padding) * 4
}

/// `sizeof(RowStatistics)` in `mainloop/normalized_x.cuh`.
pub(super) fn row_statistics(tile_m: u32, warps: u32) -> u32 {
    (3 + warps) * tile_m * 4
}

/// `sizeof(WarpStaging)` of a warp with `rows` rows: the sums of `staged` tiles of tokens, and a factor and a bias of each row.
pub(super) fn warp_staging(rows: u32, staged: u32) -> u32 {
    (staged * MMA_TOKENS * (rows + SUM_PADDING) + 2 * rows) * 4
}
