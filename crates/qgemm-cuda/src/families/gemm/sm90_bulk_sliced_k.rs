//! `gemm` main loop for few tokens on Hopper. A persistent grid
//! takes row tiles in turn; the CTA's warps slice K, and
//! each copies long pieces of W with bulk copies.

use qgemm_formats::Encoding;
use qgemm_hal::Variant;

use super::super::prelude::Prelude;
use super::common::{self, BARRIER, K_BLOCK};
use super::instance::{FitsRegisters, Instance, InstanceLists, Parts};
use super::main_loop::{MainLoop, MainLoopKind, XAccess};
use super::types::Types;
use crate::arch::most_shared;

pub(super) static MAIN_LOOP: MainLoop = LOOP;

const LOOP: MainLoop = MainLoop {
    most_m_tiles: 1,
    ..MainLoop::new(
        MainLoopKind::Sm90BulkSlicedK,
        ("entry/sm90_gemm_bulk_sliced_k.cu", "qg_sm90_gemm_bulk_sliced_k"),
        XAccess::AlignedRows,
    )
};

pub(super) static INSTANCES: InstanceLists = InstanceLists::new(&MAIN_LOOP, instances);

/// The main loop for one token: one row of X is
/// broadcast to the eight tokens of a tile.
static ONE_ROW: MainLoop = MainLoop { kind: MainLoopKind::Sm90BulkOneRow, ..LOOP };

/// Token tile, and rows of X in shared memory.
struct Tile {
    tile_m: u32,
    rows: u32,
}

const ONE: Tile = Tile { tile_m: 8, rows: 1 };
const EIGHT: Tile = Tile { tile_m: 8, rows: 8 };
/// Not for codes without a scale along K, where
/// `gemm_sliced_k` is as fast.
const SIXTEEN: Tile = Tile { tile_m: 16, rows: 16 };

/// K slices, one per warp.
const SLICES: u32 = 8;
/// Pieces of W in flight per warp (`PIECES`), and
/// their minimum total bytes.
const PIECES: u32 = 2;
const LEAST_RING_BYTES: u32 = 8192;
/// Maximum bytes of a k-block's X block sums
/// (`XSumTable`): one for every 16 columns.
const MOST_SUMS: u32 = K_BLOCK / 16 * 4;
/// Reached shares of the arithmetic, and of a read-only kernel's
/// bandwidth, per mille (H200).
const EFFICIENCY: (u32, u32) = (180, 1060);

fn instances(types: &Types, _: FitsRegisters<'_>) -> Vec<Instance> {
    if !types.engine.is_mma() || types.variant != Variant::Sm90 || !is_bound_by_memory(types) {
        return Vec::new();
    }
    let is_plain = matches!(types.format.encoding, Encoding::Plain(_));
    let sixteen = (is_plain || !types.format.scale_planes.is_empty()).then_some(&SIXTEEN);
    [&ONE, &EIGHT].into_iter().chain(sixteen).map(|tile| tile.instance(types)).collect()
}

/// Whether the kernel is memory-bound with eight warps: weights of at
/// least eight bits; integer weights only with one scale per k-tile.
fn is_bound_by_memory(types: &Types) -> bool {
    let format = types.format;
    let has_few_scales = format.scale_planes.is_empty() || format.sub_block >= types.layout.k_tile;
    !types.is_narrow() && !types.has_nested_scales() && (has_few_scales || !format.encoding.is_integer())
}

impl Tile {
    /// The kernel that uses all shared memory of an SM.
    fn instance(&self, types: &Types) -> Instance {
        let sums = 2 * SLICES * common::warp_sums(self.tile_m, types.tile_rows());
        let tables = SLICES * (common::scale_table_bytes(types, types.tile_rows()) + PIECES * BARRIER);
        let fixed = (sums + tables).next_multiple_of(128);
        let shared_bytes = most_shared(Variant::Sm90);
        let rings = SLICES * LEAST_RING_BYTES.max(PIECES * (types.k_tile_bytes() + common::LINES));
        let sums_of_x = if types.format.encoding.is_integer() { MOST_SUMS * self.tile_m } else { 0 };
        let x_and_sums = self.rows * K_BLOCK * types.engine.x_bytes() + sums_of_x;
        let k_blocks = (shared_bytes - fixed - rings) / x_and_sums;
        Instance {
            integer_operands: types.has_integer_operands(),
            constants: Prelude { row_tiles: Some(1), warps_n: Some(1), fixed_bytes: Some(fixed), ..Prelude::PRODUCT },
            one_row: self.rows == 1,
            most_k: (k_blocks * K_BLOCK) as usize,
            warps_n: 1,
            k_groups: SLICES,
            efficiency: EFFICIENCY,
            ..Instance::new(Parts {
                main_loop: if self.rows == 1 { &ONE_ROW } else { &MAIN_LOOP },
                types,
                tile: [self.tile_m, types.tile_rows()],
                threads: SLICES * 32,
                shared_bytes,
            })
        }
    }
}
