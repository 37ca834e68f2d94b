//! FP8 main loop on Ada and consumer Blackwell: `mma.sync`, with stages
//! that all threads copy with cp.async.

use qgemm_formats::{Encoding, XCode};
use qgemm_hal::{Math, Variant};

use super::super::launch_params::LaunchParams;
use super::common::{FLAG, STAGE_K};
use super::fp8::{Fp8Division, Fp8Experts, Fp8Product, Fp8Tile, SCALE_ROWS, WARP_STAGING};
use super::main_loop::{MainLoop, MainLoopKind, XAccess};
use super::shares::Shares;

const ENTRY: &str = "entry/sm89_gemm_fp8_cp_async.cu";
const SYMBOL: &str = "qg_sm89_gemm_fp8_cp_async";
/// Shares of the bandwidth that weight copies reach, per mille.
const FROM_MEMORY: u32 = 560;

pub(super) static MAIN_LOOP: MainLoop = MainLoop::new(MainLoopKind::Sm89Fp8CpAsync, (ENTRY, SYMBOL), XAccess::Planes);

pub(super) static PRODUCT: Fp8Product = Fp8Product {
    main_loop: &MAIN_LOOP,
    variants: &[Variant::Sm89, Variant::Sm120],
    takes: |format| matches!(format.encoding, Encoding::E4M3 | Encoding::E5M2),
    // Each sum of 32 columns is scaled separately, and the 128×128
    // tile spills registers then.
    takes_ue8m0_scales: |tile| tile.tokens < 128,
    x_code: XCode::E4M3,
    math: Math::TensorFp8,
    most_k: |_| usize::MAX,
    tiles: &TILES,
    shares: Shares::OfMmaSync,
    // The 128×128 tile spills registers on sm_120.
    fits_registers: |tile, variant| variant != Variant::Sm120 || tile.tokens < 128,
    consumers,
    producers: 0,
    tile_of: |&tile, _| Some(tile),
    shared_bytes,
    experts: Some(Fp8Experts {
        entry: ENTRY,
        symbol: SYMBOL,
        bandwidth: FROM_MEMORY,
        is_eligible: |tile| tile.tokens < 128,
        shared_bytes,
        maps: None,
    }),
    params: |_, params, _| Ok(LaunchParams::of(params)),
};

/// Alignment of a stage.
const ALIGNMENT: u32 = 128;

/// Warps along tokens and along features.
const fn tile(tokens: u32, features: u32, warps: (u32, u32), stages: u32, efficiency: (u32, u32)) -> Fp8Tile {
    let division = Fp8Division::Warps(warps.0, warps.1);
    Fp8Tile { tokens, features, stages, cluster: 1, lines: 0, division, efficiency }
}

/// Warps have 32 tokens. The stages fill 100 KiB.
const TILES: [Fp8Tile; 3] =
    [tile(32, 128, (1, 4), 3, (300, 560)), tile(64, 128, (2, 4), 3, (440, 500)), tile(128, 128, (4, 2), 2, (560, 450))];

fn consumers(tile: &Fp8Tile) -> u32 {
    match tile.division {
        Fp8Division::Warps(m, n) => m * n * 32,
        Fp8Division::Wgmma(..) => 0,
    }
}

fn shared_bytes(tile: &Fp8Tile) -> u32 {
    let Fp8Tile { tokens, features, stages, .. } = *tile;
    let stage = (tokens + features) * STAGE_K + (tokens + features / SCALE_ROWS) * 4;
    let staging = consumers(tile) / 32 * WARP_STAGING;
    (stages * stage.next_multiple_of(ALIGNMENT) + staging + FLAG).next_multiple_of(ALIGNMENT)
}
