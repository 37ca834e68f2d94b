//! INT8 main loop on Hopper. As the FP8 main loop, but
//! sums are exact and scaled once.

use qgemm_formats::{Encoding, Format, XCode};
use qgemm_hal::{Math, Variant};

use super::common::PRODUCER_WARPS;
use super::fp8::{Fp8Product, Fp8Tile};
use super::main_loop::{MainLoop, MainLoopKind, XAccess};
use super::shares::Shares;
use super::sm90_fp8_wgmma_ws::{clustered, consumers, mapped, shared_bytes, tile};

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    arch_specific: true,
    ..MainLoop::new(
        MainLoopKind::Sm90S8WgmmaWs,
        ("entry/sm90_gemm_fp8_wgmma_ws.cu", "qg_sm90_gemm_fp8_wgmma_ws"),
        XAccess::TmaOfPlanes,
    )
};

pub(super) static PRODUCT: Fp8Product = Fp8Product {
    main_loop: &MAIN_LOOP,
    variants: &[Variant::Sm90],
    takes,
    takes_ue8m0_scales: |_| false,
    x_code: XCode::Int8,
    math: Math::TensorS8,
    most_k,
    tiles: &TILES,
    shares: Shares::OfChip,
    fits_registers: |_, _| true,
    consumers,
    producers: PRODUCER_WARPS * 32,
    tile_of: |&tile, _| Some(tile),
    shared_bytes,
    experts: None,
    params: mapped,
};

/// Maximum columns: products of a byte below 256 and one of
/// at most 128 in magnitude must not overflow 31 bits. If
/// registers suffice (up to 64 sums per lane, `FLUSHES`), sums are
/// added in f32 before they can overflow.
fn most_k(tile: &Fp8Tile) -> usize {
    if tile.tokens * tile.features / consumers(tile) <= 64 { usize::MAX } else { 1 << 16 }
}

/// Bytes with an offset of 128 and no scales
/// within a row (`W_OFFSET`).
fn takes(format: Format) -> bool {
    let is_byte = format.code_planes == [8] && format.scale_planes.is_empty();
    is_byte && matches!(format.encoding, Encoding::IntOffset { offset: 128 })
}

/// Integer sums need as many registers as the accumulators,
/// and become the accumulators.
const TILES: [Fp8Tile; 5] = [
    tile(64, 128, (64, 1), 8, 500),
    tile(64, 256, (128, 1), 5, 560),
    tile(128, 128, (128, 1), 6, 650),
    tile(128, 256, (128, 2), 4, 660),
    clustered(tile(128, 256, (128, 2), 4, 660), 690),
];
