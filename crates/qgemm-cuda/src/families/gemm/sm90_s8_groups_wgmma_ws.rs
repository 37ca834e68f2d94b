//! `gemm` main loop on Hopper for grouped integer
//! weights and INT8 X with token scales. As the W4A8
//! main loop, but with exact integer sums that are added
//! in f32 at the end of each group.

use qgemm_formats::{DType, Encoding, ScaleType, XFormat};
use qgemm_hal::{Math, Variant};

use super::common::STAGE_K;
use super::instance::{FitsRegisters, Instance, InstanceLists};
use super::main_loop::{MainLoop, MainLoopKind, XAccess};
use super::sm90_w4a8_wgmma_ws::{Codes, with_most_stages};
use super::types::Types;

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    arch_specific: true,
    ..MainLoop::new(
        MainLoopKind::Sm90S8GroupsWgmmaWs,
        ("entry/sm90_gemm_s8_groups_wgmma_ws.cu", "qg_sm90_gemm_s8_groups_wgmma_ws"),
        XAccess::TmaOfPlanes,
    )
};

pub(super) static INSTANCES: InstanceLists = InstanceLists::new(&MAIN_LOOP, instances);

const CODES: Codes =
    Codes { main_loop: &MAIN_LOOP, x_format: XFormat::Int8Token, math: Math::TensorS8, sums_of_x: true };

/// Tokens, and shares of arithmetic and bandwidth, per mille (H200). The
/// largest tile reaches more, but is derated because f16 is faster
/// for many tokens once quantization is included.
const TILES: [(u32, (u32, u32)); 3] = [(64, (270, 740)), (128, (350, 740)), (256, (390, 740))];
/// Percentage of that arithmetic when zero points other than 128 apply
/// to sums of X: codes that fill a byte.
const WIDE_CODES: (u32, u32) = (8, 50);

fn instances(types: &Types, fits_registers: FitsRegisters<'_>) -> Vec<Instance> {
    if types.variant != Variant::Sm90 || types.x != DType::F16 || !is_decoded(types) {
        return Vec::new();
    }
    let (bits, slower) = WIDE_CODES;
    let share = if types.format.code_bits() == bits { slower } else { 100 };
    let kernel = |&(tile_m, (math, bandwidth)): &(u32, (u32, u32))| {
        with_most_stages(types, CODES, tile_m, (math * share / 100, bandwidth))
    };
    TILES.iter().filter_map(kernel).filter(fits_registers).collect()
}

/// Whether codes are integers with zero points, with
/// scales for whole stages.
fn is_decoded(types: &Types) -> bool {
    let format = types.format;
    let scales: Vec<_> = format.float_scales.iter().map(|scale| scale.kind).collect();
    let stage_k = STAGE_K as usize;
    let spans = format.sub_block.is_multiple_of(stage_k) && stage_k.is_multiple_of(types.layout.k_tile);
    format.encoding == Encoding::IntZero && scales == [ScaleType::F16] && spans
}
