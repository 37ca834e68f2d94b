//! `gemm` main loop on Hopper for 4-bit weights and E4M3 X:
//! consumer warpgroups decode W to E4M3 in registers, and a producer
//! warpgroup copies both operands.

use qgemm_formats::float8::E2M1_DOUBLED;
use qgemm_formats::{DType, Encoding, ScaleType, XFormat};
use qgemm_hal::{Math, Variant};

use super::super::prelude::Prelude;
use super::common::{self, BARRIER, PRODUCER_WARPS, STAGE_K, STAGED};
use super::instance::{FitsRegisters, Instance, InstanceLists, Parts};
use super::main_loop::{MainLoop, MainLoopKind, XAccess};
use super::types::Types;
use crate::arch::most_shared;

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    arch_specific: true,
    ..MainLoop::new(
        MainLoopKind::Sm90W4A8WgmmaWs,
        ("entry/sm90_gemm_w4a8_wgmma_ws.cu", "qg_sm90_gemm_w4a8_wgmma_ws"),
        XAccess::TmaOfPlanes,
    )
};

pub(super) static INSTANCES: InstanceLists = InstanceLists::new(&MAIN_LOOP, instances);

/// Formats of X: E4M3 with an f32 scale per token,
/// or per stage of columns.
const X_FORMATS: [XFormat; 2] = [XFormat::E4M3Token, XFormat::E4M3Block];

/// Consumer warps of a CTA, each with a row tile.
const WARPS: u32 = 8;
/// Maximum stages.
const STAGES: u32 = 8;
/// Maximum tokens of a `wgmma`, and of a tile whose scales
/// end within a stage; registers do not suffice for more.
const PART_M: u32 = 128;
/// Columns of a `wgmma`: the minimum that may share a scale.
const INSTRUCTION_K: usize = 32;

/// Tokens, and shares of arithmetic and bandwidth, per mille (H200):
/// integers with one scale per stage, and X with token scales.
const TILES: [(u32, (u32, u32)); 3] = [(64, (290, 740)), (128, (390, 740)), (256, (500, 740))];
/// Percentages of that arithmetic: X scales per stage, which cost one
/// more product per sum and leave no gain over f16; scales
/// folded into operands; scales that end within a stage.
const BLOCK_SCALES: u32 = 69;
const TAKES_SCALES: u32 = 84;
const RUNS: u32 = 60;

fn instances(types: &Types, fits_registers: FitsRegisters<'_>) -> Vec<Instance> {
    if types.variant != Variant::Sm90 || types.x != DType::F16 || !is_decoded(types) {
        return Vec::new();
    }
    let of_format = |x_format| {
        let tiles = TILES.iter().filter(|(tile_m, _)| *tile_m <= PART_M || !has_runs(types));
        let best = move |&(tile_m, efficiency): &(u32, (u32, u32))| {
            let codes = Codes { main_loop: &MAIN_LOOP, x_format, math: Math::TensorFp8, sums_of_x: false };
            with_most_stages(types, codes, tile_m, share(types, x_format, efficiency))
        };
        tiles.filter_map(best).filter(fits_registers)
    };
    X_FORMATS.into_iter().flat_map(of_format).collect()
}

/// Reached share of the arithmetic that a tile declares.
fn share(types: &Types, x_format: XFormat, (arithmetic, bandwidth): (u32, u32)) -> (u32, u32) {
    let shares = [
        (x_format == XFormat::E4M3Block, BLOCK_SCALES),
        (!types.has_block_offsets(), TAKES_SCALES),
        (has_runs(types), RUNS),
    ];
    let of_all = |whole, (_, share): &(bool, u32)| whole * share / 100;
    (shares.iter().filter(|(is, _)| *is).fold(arithmetic, of_all), bandwidth)
}

/// Whether codes are 4-bit and exact in E4M3, with
/// scales for whole instructions: integers with a zero
/// point, or E2M1 with UE8M0 scales.
fn is_decoded(types: &Types) -> bool {
    let format = types.format;
    let scales: Vec<_> = format.float_scales.iter().map(|scale| scale.kind).collect();
    let is_known = match format.encoding {
        Encoding::IntZero => scales == [ScaleType::F16],
        Encoding::Codebook(table) => *table == E2M1_DOUBLED && scales == [ScaleType::E8M0],
        _ => false,
    };
    let stage_k = STAGE_K as usize;
    let spans = format.sub_block.is_multiple_of(INSTRUCTION_K) && stage_k.is_multiple_of(format.sub_block);
    is_known && spans && format.code_planes == [4] && stage_k.is_multiple_of(types.layout.k_tile)
}

/// Whether scales of W end within a stage. UE8M0 scales
/// can be folded into operands.
fn has_runs(types: &Types) -> bool {
    types.has_block_offsets() && types.format.sub_block < STAGE_K as usize
}

/// Codes that a kernel multiplies.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    pub main_loop: &'static MainLoop,
    pub x_format: XFormat,
    pub math: Math,
    /// Whether a producer sums the codes of X for zero points
    /// (`QG_SUMS_OF_X`). Otherwise each consumer warp does.
    pub sums_of_x: bool,
}

/// The kernel with as many stages as shared memory allows.
pub(super) fn with_most_stages(types: &Types, codes: Codes, tile_m: u32, efficiency: (u32, u32)) -> Option<Instance> {
    let mut kernels = (1..=STAGES).rev().map(|stages| instance(types, codes, tile_m, stages, efficiency));
    kernels.find(|i| i.shared_bytes <= most_shared(types.variant))
}

fn instance(types: &Types, codes: Codes, tile_m: u32, stages: u32, efficiency: (u32, u32)) -> Instance {
    let Codes { main_loop, x_format, math, sums_of_x } = codes;
    let rows = types.tile_rows();
    let has_block_scales = x_format == XFormat::E4M3Block;
    let has_zero_points = types.has_block_offsets();
    let w = WARPS * (STAGE_K / types.tile_k()) * types.k_tile_bytes();
    // Unused per-token arrays still take four words.
    let of_tokens = |present: bool, tokens: u32| if present { tokens * 4 } else { common::ALIGNMENT };
    let stage = tile_m * STAGE_K + w + of_tokens(has_block_scales || sums_of_x, tile_m) + 2 * BARRIER;
    let added = if sums_of_x { stages * BARRIER } else { BARRIER };
    let pipeline = (stages * stage + added).next_multiple_of(common::ALIGNMENT);
    let own_sums = if sums_of_x { common::ALIGNMENT } else { of_tokens(has_zero_points, PART_M.min(tile_m)) };
    // Operands of 64 columns of a row tile, which wait for
    // the other half of a stage (`IN_HALVES`).
    let in_halves = tile_m > PART_M && !has_block_scales;
    let half = if in_halves { rows * STAGE_K / 2 } else { common::ALIGNMENT };
    let of_warp = common::warp_staging(rows, STAGED) + half + own_sums;
    Instance {
        consumers: WARPS * 32,
        stages,
        tile_k: STAGE_K,
        x_format,
        math,
        constants: Prelude {
            row_tiles: Some(1),
            warps_n: Some(WARPS),
            stages: Some(stages),
            staged: Some(STAGED),
            x_block_scales: Some(has_block_scales.into()),
            ..Prelude::PRODUCT
        },
        warps_n: WARPS,
        efficiency,
        ..Instance::new(Parts {
            main_loop,
            types,
            tile: [tile_m, WARPS * rows],
            threads: (WARPS + PRODUCER_WARPS) * 32,
            shared_bytes: pipeline + WARPS * of_warp + common::FLAG,
        })
    }
}
