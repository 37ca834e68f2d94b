//! The main loop of `gemm` for a few tokens on Hopper: a persistent grid takes row tiles in turn, whose K dimension warps share, each of
//! which copies long pieces of W for itself.

use qgemm_formats::Encoding;
use qgemm_hal::{Schedule, Variant};

use super::common::{self, BARRIER, K_BLOCK};
use super::instance::{FitsRegisters, Instance, MainLoop, Parts, XAccess};
use super::types::Types;
use crate::arch::most_shared;

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    family: "gemm",
    name: "sm90_bulk_sliced_k",
    entry: "entry/sm90_gemm_bulk_sliced_k.cu",
    symbol: "qg_sm90_gemm_bulk_sliced_k",
    arch_specific: false,
    schedule: Schedule::StreamK,
    x_access: XAccess::AlignedRows,
    rounds_beyond: None,
    experts_tiles: |_| &[],
    for_experts: None,
    most_m_tiles: 1,
    most_tile_bytes: usize::MAX,
    instances,
};

/// The same with one row of X, of which those of a tile of eight tokens are copies: for one token.
static ONE_ROW: MainLoop = MainLoop { name: "sm90_bulk_one_row", ..MAIN_LOOP };

/// Tokens of a tile, of which X has so many rows in shared memory.
struct Tile {
    tile_m: u32,
    rows: u32,
}

const ONE: Tile = Tile { tile_m: 8, rows: 1 };
const EIGHT: Tile = Tile { tile_m: 8, rows: 8 };
/// Not for codes without a scale along K, of which `gemm_sliced_k` takes an H200 as long (16 tokens of FP8, 14336 x 4096: 16.1 for 17.1 µs,
/// 4096 x 4096 8.0 for 7.0; with scales of 128 columns 18.8 for 16.8, 8.8 for 6.7).
const SIXTEEN: Tile = Tile { tile_m: 16, rows: 16 };

/// Slices of K, one a warp.
const SLICES: u32 = 8;
/// Pieces of W that a warp has room for (`PIECES`), and the fewest bytes of both.
const PIECES: u32 = 2;
const LEAST_RING_BYTES: u32 = 8192;
/// Most bytes of the sums of X of a k-block (`XSumTable`): of every 16 columns.
const MOST_SUMS: u32 = K_BLOCK / 16 * 4;
/// Shares of the arithmetic, and of the bandwidth that a kernel which only reads has, that an H200 reaches, per mille.
const EFFICIENCY: (u32, u32) = (180, 1060);

fn instances(types: &Types, _: FitsRegisters<'_>) -> Vec<Instance> {
    if !types.engine.is_mma() || types.variant != Variant::Sm90 || !is_bound_by_memory(types) {
        return Vec::new();
    }
    let is_plain = matches!(types.format.encoding, Encoding::Plain(_));
    let sixteen = (is_plain || !types.format.scale_planes.is_empty()).then_some(&SIXTEEN);
    [&ONE, &EIGHT].into_iter().chain(sixteen).map(|tile| tile.instance(types)).collect()
}

/// Whether memory takes longer than arithmetic with eight warps: of weights of eight bits and more, where integers have one scale a k-tile
/// (Q8_0, one token of 14336 x 4096, took an H200 15.8 for 15.0 µs).
fn is_bound_by_memory(types: &Types) -> bool {
    let format = types.format;
    let has_few_scales = format.scale_planes.is_empty() || format.sub_block >= types.layout.k_tile;
    !types.is_narrow() && !types.has_nested_scales() && (has_few_scales || !format.encoding.is_integer())
}

impl Tile {
    /// With all of a multiprocessor's shared memory.
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
            constants: vec![("QG_ROW_TILES", 1), ("QG_WARPS_N", 1), ("QG_FIXED_BYTES", fixed)],
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
