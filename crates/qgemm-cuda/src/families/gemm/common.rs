//! Shared-memory sizes that main loops have in common.
//! Each kernel asserts the total.

use super::types::Types;

/// Alignment of the shared-memory struct.
pub(super) const ALIGNMENT: u32 = 16;
/// End-of-tile flag shared by a CTA's threads.
pub(super) const FLAG: u32 = 4;
/// An `mbarrier`.
pub(super) const BARRIER: u32 = 8;
/// Scheduler state that a warp parks in shared memory: a tile
/// and two lists (`mainloop/scheduler_state.cuh`).
pub(super) const SCHEDULER_STATE: u32 = 32 + 2 * 16;
/// Padding words between the sums of consecutive tokens and sub-blocks
/// (`SUM_PITCH`, `WarpStaging::PITCH`).
pub(super) const SUM_PADDING: u32 = 4;
/// Cache line (`LINE_BYTES`).
const LINE: u32 = 128;
/// Two cache lines: padding of a W piece that keeps its
/// alignment within a line.
pub(super) const LINES: u32 = 2 * LINE;

/// Pitch of W segments in shared memory (`WRuns`). A segment keeps
/// its offset within a cache line. If k-tiles are not whole
/// lines, a segment may start at any multiple of 16 bytes.
pub(super) fn pitch_in_lines(run: u32, k_tile: u32) -> u32 {
    match k_tile.is_multiple_of(LINE) {
        true => run,
        false => (run + LINE - ALIGNMENT).next_multiple_of(LINE),
    }
}

/// Columns of X in a k-block. A stage holds
/// one or more k-blocks.
pub(crate) const K_BLOCK: u32 = 64;
/// Columns of a stage of 8-bit operands, which share a
/// scale of X (`STAGE_K`).
pub(in crate::families) const STAGE_K: u32 = 128;
/// Bytes for warps that check for index faults, in MoE kernels
/// whose CTAs take tiles in turn (`store_faults`).
pub(in crate::families) const FAULTS: u32 = 32;
/// Token tiles that are staged together in a warp's shared memory
/// on the way to D, if there is room (`QG_STAGED`).
pub(super) const STAGED: u32 = 2;

/// Warps of a producer warpgroup.
pub(super) const PRODUCER_WARPS: u32 = 4;

/// Padding bytes between the rows of consecutive tokens (`XTile::PITCH`).
const X_PADDING: u32 = 16;
/// Tokens of an `mma`.
pub(super) const MMA_TOKENS: u32 = 8;

/// Bytes of a token's row of `chunks` chunks of X (`XTile`).
pub(super) fn x_row(types: &Types, chunks: u32) -> u32 {
    chunks * (types.chunk_k() + types.chunk_padding()) * types.engine.x_bytes() + X_PADDING
}

/// `sizeof(XStage)` of one k-block.
pub(super) fn x_stage(types: &Types, tile_m: u32) -> u32 {
    tile_m * K_BLOCK * types.engine.x_bytes()
}

/// `sizeof(ScaleTableOfWarp)` in `mainloop/scale_table.cuh`,
/// of a warp with `rows` rows.
pub(super) fn scale_table_bytes(types: &Types, rows: u32) -> u32 {
    let has_table = types.has_nested_scales() && types.format.sub_block < types.format.block_len;
    if has_table { rows * types.tile_k() / types.format.sub_block as u32 * 4 } else { 0 }
}

/// `sizeof(OperandTable)` in `dequant/operand_table.cuh`.
pub(super) fn operand_table_bytes(types: &Types) -> u32 {
    let bits: u32 = types.format.code_planes.iter().map(|&bits| bits as u32).sum();
    (1 << (2 * bits)) * 32 * 4
}

/// Bytes of the sums of a CTA's tile.
pub(super) fn cta_sums(tile_m: u32, tile_n: u32) -> u32 {
    tile_m * (tile_n + SUM_PADDING) * 4
}

/// `sizeof(WarpSums)` in `epilogue/sliced_k.cuh`, of
/// a warp with `rows` rows.
pub(super) fn warp_sums(tile_m: u32, rows: u32) -> u32 {
    let padding = if tile_m < MMA_TOKENS { 0 } else { SUM_PADDING };
    tile_m * (rows + padding) * 4
}

/// `sizeof(RowStatistics)` in `mainloop/normalized_x.cuh`.
pub(super) fn row_statistics(tile_m: u32, warps: u32) -> u32 {
    (3 + warps) * tile_m * 4
}

/// `sizeof(WarpStaging)` of a warp with `rows` rows: sums of `staged` token
/// tiles, and a factor and a bias for each row.
pub(super) fn warp_staging(rows: u32, staged: u32) -> u32 {
    (staged * MMA_TOKENS * (rows + SUM_PADDING) + 2 * rows) * 4
}
