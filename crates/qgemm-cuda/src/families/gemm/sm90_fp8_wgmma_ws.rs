//! FP8 main loop on Hopper: consumer warpgroups with tokens as `wgmma`
//! rows, and producers that copy both operands by TMA.

use bytemuck::{Pod, Zeroable};
use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{Encoding, XCode};
use qgemm_hal::{HalError, Math, Variant};

use super::super::kernel_launch::Addresses;
use super::super::launch_params::LaunchParams;
use super::common::{ALIGNMENT, BARRIER, FLAG, PRODUCER_WARPS, STAGE_K};
use super::fp8::{
    ExpertTileMaps, Fp8Division, Fp8Experts, Fp8Launch, Fp8Matrix, Fp8Params, Fp8Product, Fp8Tile, SCALE_ROWS,
    WARP_STAGING,
};
use super::main_loop::{MainLoop, MainLoopKind, XAccess};
use super::params::GemmParams;
use super::shares::Shares;
use crate::arch::most_shared;
use crate::tensor_map::{EncodedMap, MapElement, MapSwizzle, TileMap};

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    arch_specific: true,
    ..MainLoop::new(
        MainLoopKind::Sm90Fp8WgmmaWs,
        ("entry/sm90_gemm_fp8_wgmma_ws.cu", "qg_sm90_gemm_fp8_wgmma_ws"),
        XAccess::TmaOfPlanes,
    )
};

pub(super) static PRODUCT: Fp8Product = Fp8Product {
    main_loop: &MAIN_LOOP,
    variants: &[Variant::Sm90],
    takes: |format| matches!(format.encoding, Encoding::E4M3 | Encoding::E5M2),
    // UE8M0 scales would restart the sums every 32 columns, with a
    // factor per lane and column of D (docs/ops/quantized-x.md).
    takes_ue8m0_scales: |_| false,
    x_code: XCode::E4M3,
    math: Math::TensorFp8,
    most_k: |_| usize::MAX,
    tiles: &TILES,
    shares: Shares::OfChip,
    fits_registers: |_, _| true,
    consumers,
    producers: PRODUCER_WARPS * 32,
    tile_of,
    shared_bytes,
    experts: Some(Fp8Experts {
        entry: "entry/sm90_experts_fp8_wgmma_ws.cu",
        symbol: "qg_sm90_experts_fp8_wgmma_ws",
        bandwidth: OF_EXPERTS,
        is_eligible: |tile| {
            (tile.tokens == GROUP_TOKENS && tile.features.is_power_of_two()) || tile.tokens * tile.features == LARGEST
        },
        shared_bytes: experts_shared_bytes,
        maps: Some(|layout, tile, x, rows, address| ExpertTileMaps {
            x: x_map(x, if tile.tokens == GROUP_TOKENS { EXPERTS_BOX } else { tile.tokens }),
            w: w_map(layout, tile, rows, address),
            w_last: (tile.lines > 0).then(|| last_lines_map(layout, tile, rows, address)),
        }),
    }),
    params: mapped,
};

/// Columns of a packed k-block, and rows of a packed tile.
const K_BLOCK: u32 = 64;
const TILE_ROWS: u32 = 16;
/// Tokens of a `wgmma`.
const GROUP_TOKENS: u32 = 64;

/// Outputs of the largest tile, used for experts with
/// many rows (`IS_LARGEST`).
const LARGEST: u32 = 128 * 256;
/// Tokens of an X box in that tile with experts (`X_BOX`).
const EXPERTS_BOX: u32 = 32;
/// Shared memory of the warps that check for
/// index faults, in bytes.
const FAULTS_BYTES: u32 = 32;
/// Tile info that a producer passes on, `sizeof(WorkTile)`; with
/// experts it includes their rows.
const TILE_INFO: u32 = 32;
const EXPERTS_TILE_INFO: u32 = TILE_INFO + 16;
/// Bytes of a cache line, and of a warp's
/// 16 rows of one line.
const LINE: u32 = 128;
const WARP_LINES: u32 = 16 * LINE;
/// Unit of TMA descriptors and addresses, in bytes.
const UNIT: u32 = 16;
/// Period of the TMA swizzle, in bytes.
const SWIZZLE: u32 = 1024;

/// Shares of the bandwidth that weight copies reach, per mille.
const FROM_MEMORY: u32 = 740;
const FROM_CACHE: u32 = 1500;
/// Share of the bandwidth with experts (H200).
const OF_EXPERTS: u32 = 850;

/// CTAs of the cluster that shares the largest tile.
const CLUSTER: u32 = 2;

/// Features of a `wgmma`, and `wgmma`s side by
/// side in a warpgroup.
pub(super) const fn tile(tokens: u32, features: u32, parts: (u32, u32), stages: u32, arithmetic: u32) -> Fp8Tile {
    let division = Fp8Division::Wgmma(parts.0, parts.1);
    // W that is re-read for other tokens comes from L2. With
    // the largest tile most of it is re-read.
    let bandwidth = if tokens * features == LARGEST { FROM_CACHE } else { FROM_MEMORY };
    Fp8Tile { tokens, features, stages, cluster: 1, lines: 0, division, efficiency: (arithmetic, bandwidth) }
}

/// The tile in a cluster, whose CTAs multicast W to each
/// other. Otherwise L2 bandwidth limits the largest tile.
pub(super) const fn clustered(tile: Fp8Tile, arithmetic: u32) -> Fp8Tile {
    Fp8Tile { cluster: CLUSTER, efficiency: (arithmetic, tile.efficiency.1), ..tile }
}

/// The tile with a measured share of the
/// bandwidth (H200, 64 tokens).
const fn measured(tile: Fp8Tile, bandwidth: u32) -> Fp8Tile {
    Fp8Tile { efficiency: (tile.efficiency.0, bandwidth), ..tile }
}

/// Sums of 128 columns need registers beside the total sums, so
/// a warpgroup has at most 64 tokens by 256 features.
///
/// Tiles of 224 and 112 features are for W copied in
/// cache lines: 28672 and 14336 features then make 128 tiles.
const TILES: [Fp8Tile; 7] = [
    measured(tile(64, 128, (64, 1), 8, 350), 850),
    measured(tile(64, 256, (128, 1), 5, 480), 870),
    measured(tile(64, 112, (112, 1), 9, 380), 860),
    measured(tile(64, 224, (112, 1), 5, 410), 920),
    measured(tile(128, 128, (128, 1), 6, 450), 800),
    tile(128, 256, (128, 2), 4, 520),
    clustered(tile(128, 256, (128, 2), 4, 520), 600),
];

/// Memory-bound tiles copy W in whole cache lines when its k-tiles,
/// with scales after the codes, are not whole lines.
fn tile_of(tile: &Fp8Tile, layout: &PackedLayout) -> Option<Fp8Tile> {
    let k_tile_bytes = layout.k_tile_bytes as u32;
    let in_lines = tile.tokens * tile.features < LARGEST && !layout.scales.is_empty();
    match in_lines && !k_tile_bytes.is_multiple_of(LINE) {
        true => Some(fitting(Fp8Tile { lines: (k_tile_bytes + LINE - UNIT).next_multiple_of(LINE), ..*tile })),
        false => tile.features.is_power_of_two().then_some(*tile),
    }
}

/// The tile with as many of its stages as fit.
fn fitting(tile: Fp8Tile) -> Fp8Tile {
    let mut tiles = (1..=tile.stages).rev().map(|stages| Fp8Tile { stages, ..tile });
    let fits = |tile: &Fp8Tile| shared_bytes(tile).max(experts_shared_bytes(tile)) <= most_shared(Variant::Sm90);
    tiles.find(fits).unwrap_or(tile)
}

pub(super) fn consumers(tile: &Fp8Tile) -> u32 {
    match tile.division {
        Fp8Division::Wgmma(part, parts) => tile.tokens / GROUP_TOKENS * (tile.features / (part * parts)) * 128,
        Fp8Division::Warps(..) => 0,
    }
}

pub(super) fn shared_bytes(tile: &Fp8Tile) -> u32 {
    (pipeline_bytes(tile) + staging_bytes(tile) + tile_infos(tile) * TILE_INFO + FLAG).next_multiple_of(ALIGNMENT)
}

fn experts_shared_bytes(tile: &Fp8Tile) -> u32 {
    pipeline_bytes(tile) + staging_bytes(tile) + tile_infos(tile) * EXPERTS_TILE_INFO + FAULTS_BYTES
}

/// Staging memory of a warp's outputs: accumulators, or row lines; the
/// largest tile has two lines per row.
fn staging_bytes(tile: &Fp8Tile) -> u32 {
    let lines = if tile.tokens * tile.features == LARGEST { 2 } else { 1 };
    consumers(tile) / 32 * WARP_STAGING.max(lines * WARP_LINES)
}

/// `WorkTileInfoRing::COUNT`.
fn tile_infos(tile: &Fp8Tile) -> u32 {
    tile.stages + 1
}

/// `sizeof(Pipeline)`.
fn pipeline_bytes(tile: &Fp8Tile) -> u32 {
    let Fp8Tile { tokens, features, stages, .. } = *tile;
    let w = match tile.lines {
        0 => features * STAGE_K,
        lines => (features / TILE_ROWS * lines).next_multiple_of(SWIZZLE),
    };
    let stage = tokens * STAGE_K + w + (tokens + features / SCALE_ROWS) * 4 + 2 * BARRIER;
    (stages * stage).next_multiple_of(ALIGNMENT)
}

/// Padding up to the tensor maps, which are
/// aligned to 64 bytes.
const PADDING: usize = size_of::<Fp8Params>().next_multiple_of(64) - size_of::<Fp8Params>();

/// `TmaFp8GemmParams` in `mainloop/sm90/fp8_pipeline.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct MappedParams {
    fp8: Fp8Params,
    padding: [u64; PADDING / 8],
    maps: [EncodedMap; 4],
}

pub(super) fn mapped(launch: &Fp8Launch, fp8: &Fp8Params, places: &Addresses<'_>) -> Result<LaunchParams, HalError> {
    let GemmParams { shape, at, .. } = &fp8.gemm;
    let tokens = launch.tile.tokens;
    let x = Fp8Matrix { address: at.x, rows: shape.m.into(), columns: shape.k.into(), row_bytes: at.x_row };
    let tail = match shape.m % tokens {
        0 => EncodedMap::default(),
        rest => (places.encode)(&x_map(&x, rest))?,
    };
    let rows = [launch.stored_rows, launch.stored_k];
    let w = w_map(&launch.layout, &launch.tile, rows, at.w);
    let last = match launch.tile.lines {
        0 => EncodedMap::default(),
        _ => (places.encode)(&last_lines_map(&launch.layout, &launch.tile, rows, at.w))?,
    };
    let maps = [(places.encode)(&x_map(&x, tokens))?, tail, (places.encode)(&w)?, last];
    Ok(LaunchParams::of(&MappedParams { fp8: *fp8, maps, ..MappedParams::zeroed() }))
}

/// TMA map of X, `tokens` rows at a time.
fn x_map(x: &Fp8Matrix, tokens: u32) -> TileMap {
    TileMap::matrix(x.address, MapElement::Byte, [x.columns, x.rows], x.row_bytes, [STAGE_K, tokens])
}

/// TMA map of W: packed k-blocks of 16 rows of 64
/// bytes. A box row covers two of these rows, so TMA
/// has half as many rows to copy.
fn w_map(layout: &PackedLayout, tile: &Fp8Tile, [stored_rows, stored_k]: [usize; 2], address: u64) -> TileMap {
    if tile.lines > 0 {
        let lines = row_tile_bytes(layout, stored_k) / u64::from(LINE);
        return lines_map(layout, tile, [stored_rows, stored_k], address, lines);
    }
    let (k_tiles, k_tile_bytes) = (layout.k_tiles(stored_k) as u64, layout.k_tile_bytes as u64);
    let (pair_bytes, block_bytes) = (u64::from(2 * K_BLOCK), u64::from(K_BLOCK * TILE_ROWS));
    let pairs = TILE_ROWS / 2;
    let k_blocks = (layout.k_tile as u32 / K_BLOCK).max(1);
    let row_tiles = layout.n_tiles(stored_rows) as u64;
    TileMap {
        address,
        element: MapElement::Byte,
        dimensions: 5,
        size: [pair_bytes, pairs.into(), row_tiles, k_blocks.into(), k_tiles],
        strides: [pair_bytes, k_tiles * k_tile_bytes, block_bytes, k_tile_bytes],
        tile: [2 * K_BLOCK, pairs, tile.features / tile.cluster / TILE_ROWS, k_blocks, STAGE_K / (k_blocks * K_BLOCK)],
        swizzle: MapSwizzle::Bytes128,
    }
}

/// Bytes between row tiles of W.
fn row_tile_bytes(layout: &PackedLayout, stored_k: usize) -> u64 {
    (layout.k_tiles(stored_k) * layout.k_tile_bytes) as u64
}

/// TMA map of W as cache lines from `address` on, in
/// boxes of the lines of a k-tile.
fn lines_map(
    layout: &PackedLayout,
    tile: &Fp8Tile,
    [stored_rows, stored_k]: [usize; 2],
    address: u64,
    lines: u64,
) -> TileMap {
    let row_tile = row_tile_bytes(layout, stored_k);
    TileMap {
        address,
        element: MapElement::Byte,
        dimensions: 5,
        size: [LINE.into(), lines, layout.n_tiles(stored_rows) as u64, 1, 1],
        strides: [LINE.into(), row_tile, row_tile, row_tile],
        tile: [LINE, tile.lines / LINE, tile.features / TILE_ROWS, 1, 1],
        swizzle: MapSwizzle::Bytes128,
    }
}

/// TMA map of the last lines of each row tile. Row
/// tiles may not be whole lines, and nothing may be
/// read after the last one.
fn last_lines_map(layout: &PackedLayout, tile: &Fp8Tile, rows: [usize; 2], address: u64) -> TileMap {
    let before = row_tile_bytes(layout, rows[1]) - u64::from(tile.lines);
    lines_map(layout, tile, rows, address + before, (tile.lines / LINE).into())
}
