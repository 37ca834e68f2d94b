//! The main loop of `gemm` on Hopper for weights of four bits and X in E4M3 codes: consumer warpgroups, which decode W to E4M3 in
//! registers, and a producer warpgroup that copies both.

use qgemm_formats::float8::E2M1_DOUBLED;
use qgemm_formats::{DType, Encoding, ScaleType, XFormat};
use qgemm_hal::{Math, Schedule, Variant};

use super::common::{self, BARRIER, PRODUCER_WARPS, STAGE_K, STAGED};
use super::instance::{FitsRegisters, Instance, MainLoop, Parts, XAccess};
use super::types::Types;
use crate::arch::most_shared;

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    family: "gemm",
    name: "sm90_w4a8_wgmma_ws",
    entry: "entry/sm90_gemm_w4a8_wgmma_ws.cu",
    symbol: "qg_sm90_gemm_w4a8_wgmma_ws",
    arch_specific: true,
    schedule: Schedule::StreamK,
    x_access: XAccess::TmaOfPlanes,
    // Codes are exact operands, and scales act on their sums.
    rounds_beyond: None,
    experts_tiles: |_| &[],
    for_experts: None,
    // A persistent grid has one dimension.
    most_m_tiles: usize::MAX,
    most_tile_bytes: usize::MAX,
    instances,
};

/// X in codes with an f32 a token, or for the columns of a stage.
const X_FORMATS: [XFormat; 2] = [XFormat::E4M3Token, XFormat::E4M3Block];

/// Warps of a CTA that multiply, each with a tile of rows.
const WARPS: u32 = 8;
/// Most stages.
const STAGES: u32 = 8;
/// Tokens of an instruction.
const PART_M: u32 = 64;
/// Columns of an instruction, and so the fewest that may share a scale.
const INSTRUCTION_K: usize = 32;

/// Tokens, and shares of the arithmetic and bandwidth, per mille: estimates.
const TILES: [(u32, (u32, u32)); 3] = [(64, (290, 740)), (128, (430, 740)), (256, (480, 740))];
/// Shares of the arithmetic where sums are scaled more often than once a stage, in per cent of the others': with a scale of X a
/// token, and with one for the columns of a stage, which costs a product more for every sum.
const OFTEN_SCALED: [u32; 2] = [75, 60];

fn instances(types: &Types, fits_registers: FitsRegisters<'_>) -> Vec<Instance> {
    if types.variant != Variant::Sm90 || types.x != DType::F16 || !is_decoded(types) {
        return Vec::new();
    }
    let of_format = |x_format| {
        let best = move |&(tile_m, efficiency): &(u32, (u32, u32))| {
            let mut kernels = (1..=STAGES).rev().map(|stages| instance(types, x_format, tile_m, stages, efficiency));
            kernels.find(|i| i.shared_bytes <= most_shared(types.variant))
        };
        TILES.iter().filter_map(best).filter(fits_registers)
    };
    X_FORMATS.into_iter().flat_map(of_format).collect()
}

/// Whether codes are nibbles that become E4M3 exactly, with scales that whole instructions share: integers with a zero point, or
/// E2M1 with powers of two.
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

fn instance(types: &Types, x_format: XFormat, tile_m: u32, stages: u32, efficiency: (u32, u32)) -> Instance {
    let rows = types.tile_rows();
    let has_block_scales = x_format == XFormat::E4M3Block;
    let has_zero_points = types.has_block_offsets();
    let w = WARPS * (STAGE_K / types.tile_k()) * types.k_tile_bytes();
    // Where there is nothing for tokens, four floats stand.
    let of_tokens = |present: bool, tokens: u32| if present { tokens * 4 } else { common::ALIGNMENT };
    let stage = tile_m * STAGE_K + w + of_tokens(has_block_scales, tile_m) + 2 * BARRIER;
    let of_warp = common::warp_staging(rows, STAGED) + of_tokens(has_zero_points, PART_M);
    let share =
        if types.format.sub_block < STAGE_K as usize { OFTEN_SCALED[usize::from(has_block_scales)] } else { 100 };
    Instance {
        consumers: WARPS * 32,
        stages,
        tile_k: STAGE_K,
        x_format,
        math: Math::TensorFp8,
        constants: vec![
            ("QG_ROW_TILES", 1),
            ("QG_WARPS_N", WARPS),
            ("QG_X_STAGES", stages),
            ("QG_STAGED", STAGED),
            ("QG_X_BLOCK_SCALES", has_block_scales.into()),
        ],
        warps_n: WARPS,
        efficiency: (efficiency.0 * share / 100, efficiency.1),
        ..Instance::new(Parts {
            main_loop: &MAIN_LOOP,
            types,
            tile: [tile_m, WARPS * rows],
            threads: (WARPS + PRODUCER_WARPS) * 32,
            shared_bytes: stages * stage + WARPS * of_warp + common::FLAG,
        })
    }
}
