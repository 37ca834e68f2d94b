//! MoE main loop for few rows per expert on Hopper: each
//! warp copies long pieces of W with bulk copies.

use qgemm_formats::Encoding;
use qgemm_hal::Variant;

use super::super::prelude::Prelude;
use super::common::{self, BARRIER, K_BLOCK};
use super::instance::{Instance, InstanceLists, Parts};
use super::main_loop::{EarlyPrefetch, ExpertCtas, MainLoop, MainLoopKind, XAccess};
use super::types::Types;
use crate::arch::most_shared;

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    expert_ctas: ExpertCtas::RowTiles,
    expert_prefetch: EarlyPrefetch::WithLists,
    ..MainLoop::new(
        MainLoopKind::Sm90BulkStream,
        ("entry/sm90_experts_bulk_stream.cu", "qg_sm90_experts_bulk_stream"),
        XAccess::AlignedRows,
    )
};

pub(super) static INSTANCES: InstanceLists =
    InstanceLists { for_experts, ..InstanceLists::new(&MAIN_LOOP, |_, _| Vec::new()) };

/// Token tile, and warps.
const TILE_M: u32 = 8;
const WARPS: u32 = 12;
/// Pieces of W in flight per warp (`PIECES`), and the minimum
/// bytes of a piece beside one tile of X.
const PIECES: u32 = 2;
const LEAST_PIECE_BYTES: u32 = 2048;
/// Maximum experts (`ExpertWords`).
const MOST_EXPERTS: u32 = 1024;
/// Maximum X tiles in shared memory at a time.
const MOST_X_TILES: u32 = 4;
/// Maximum bytes of a k-block's X block sums
/// (`XSumTable`): one for every 16 columns.
const MOST_SUM_BYTES: u32 = K_BLOCK / 16 * TILE_M * 4;
/// Reached shares of arithmetic and bandwidth, per mille (H200).
const EFFICIENCY: (u32, u32) = (135, 930);

/// Whether CTAs can count `places` row tiles of X, with
/// `row_tiles` tiles of W each.
pub(in crate::families) fn counts_row_tiles(experts: usize, places: usize, row_tiles: usize) -> bool {
    experts <= MOST_EXPERTS as usize && places.checked_mul(row_tiles).is_some_and(|all| all <= i32::MAX as usize)
}

/// Kernels for weights that are memory-bound: few bits, one
/// scale per sub-block, no codebook.
fn for_experts(types: &Types) -> Vec<Instance> {
    let is_codebook = matches!(types.format.encoding, Encoding::Codebook(_));
    let serves = types.engine.is_mma() && types.variant == Variant::Sm90 && !is_codebook;
    if serves && !types.has_nested_scales() && types.is_narrow() { vec![instance(types)] } else { Vec::new() }
}

/// The kernel that uses all shared memory of an SM.
fn instance(types: &Types) -> Instance {
    let tables = WARPS * common::scale_table_bytes(types, types.tile_rows());
    let words = MOST_EXPERTS + 1 + MOST_X_TILES * TILE_M + WARPS * 2;
    let fixed = (tables + WARPS * PIECES * BARRIER + words * 4).next_multiple_of(128);
    let shared_bytes = most_shared(Variant::Sm90);
    let pieces = WARPS * PIECES * (types.k_tile_bytes() + common::LINES).max(LEAST_PIECE_BYTES);
    let x_and_sums = common::x_stage(types, TILE_M) + MOST_SUM_BYTES;
    let k_blocks = (shared_bytes - fixed - pieces) / x_and_sums;
    Instance {
        integer_operands: types.has_integer_operands(),
        constants: Prelude { row_tiles: Some(1), fixed_bytes: Some(fixed), ..Prelude::PRODUCT },
        most_k: (k_blocks * K_BLOCK) as usize,
        warps_n: 1,
        efficiency: EFFICIENCY,
        ..Instance::new(Parts {
            main_loop: &MAIN_LOOP,
            types,
            tile: [TILE_M, types.tile_rows()],
            threads: WARPS * 32,
            shared_bytes,
        })
    }
}
