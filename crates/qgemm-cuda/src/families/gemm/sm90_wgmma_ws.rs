//! `gemm` main loop on Hopper beyond few tokens: consumer
//! warpgroups with asynchronous `wgmma`, and a producer warpgroup
//! that copies W and X into rings by TMA.

use qgemm_formats::{DType, Encoding};
use qgemm_hal::Variant;

use super::super::prelude::Prelude;
use super::common::{self, BARRIER, K_BLOCK, MMA_TOKENS, PRODUCER_WARPS, STAGED};
use super::instance::{FitsRegisters, Instance, InstanceLists, MOST_GRID_Y, Parts};
use super::main_loop::{EarlyPrefetch, ExpertCtas, MainLoop, MainLoopKind, SegmentTile, XAccess};
use super::types::Types;
use crate::arch::most_shared;

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    arch_specific: true,
    // For some formats, 32 tokens with `wgmma` are faster than
    // two tokens with other kernels.
    rounds_beyond: Some(1),
    most_m_tiles: MOST_GRID_Y,
    expert_ctas: ExpertCtas::Tiles,
    expert_prefetch: EarlyPrefetch::WithLists,
    segments: &[
        SegmentTile { variants: &Variant::ALL, tokens: 64, serves: 17..=usize::MAX },
        SegmentTile { variants: &Variant::ALL, tokens: 128, serves: 65..=usize::MAX },
        SegmentTile { variants: &Variant::ALL, tokens: 256, serves: 129..=usize::MAX },
    ],
    ..MainLoop::new(MainLoopKind::Sm90WgmmaWs, ("entry/sm90_gemm_wgmma_ws.cu", "qg_sm90_gemm_wgmma_ws"), XAccess::Tma)
};

pub(super) static INSTANCES: InstanceLists =
    InstanceLists { experts_tiles: |_| &[64, 128], for_experts, ..InstanceLists::new(&MAIN_LOOP, instances) };

/// A tile: tokens, split over the warps, and reached shares of
/// arithmetic and bandwidth, per mille (H200).
struct Tile {
    tile_m: u32,
    division: Division,
    efficiency: (u32, u32),
}

/// Split of a tile over the consumer warps of a CTA.
#[derive(Clone, Copy)]
struct Division {
    /// Row tiles of a warp, and warps of
    /// a group along N.
    row_tiles: u32,
    warps: u32,
    /// Warp groups that slice the K of the CTA's rows.
    k_groups: u32,
    /// K-blocks of an X stage.
    stage_k_blocks: u32,
}

const fn division(row_tiles: u32, warps: u32, k_groups: u32, stage_k_blocks: u32) -> Division {
    Division { row_tiles, warps, k_groups, stage_k_blocks }
}

/// With 32 tokens two K-sliced groups are faster. Two
/// k-blocks per stage need fewer waits than one; for 256
/// tokens three such stages do not fit.
const TILES: [Tile; 4] = [
    Tile { tile_m: 32, division: division(1, 8, 2, 2), efficiency: (350, 765) },
    Tile { tile_m: 64, division: division(1, 8, 1, 2), efficiency: (535, 740) },
    Tile { tile_m: 128, division: division(1, 8, 1, 2), efficiency: (690, 740) },
    Tile { tile_m: 256, division: division(1, 8, 1, 1), efficiency: (750, 740) },
];

/// For experts, which have few rows of X each: twice the
/// rows of W share them, and the tile's prologue and epilogue.
const OF_EXPERTS: [Tile; 2] = [
    Tile { tile_m: 64, division: division(2, 8, 1, 2), efficiency: (590, 740) },
    Tile { tile_m: 128, division: division(2, 8, 1, 2), efficiency: (720, 740) },
];

/// Further MoE tiles for 4-bit weights. When all experts have
/// about 32, 64 or 128 rows and a few more, these
/// tiles leave fewer padded rows.
const OF_EXPERTS_OF_FOUR_BITS: [Tile; 3] = [
    Tile { tile_m: 48, division: division(2, 8, 1, 2), efficiency: (460, 740) },
    Tile { tile_m: 96, division: division(2, 8, 1, 2), efficiency: (640, 740) },
    Tile { tile_m: 144, division: division(2, 8, 1, 2), efficiency: (710, 740) },
];

/// Maximum tokens of tiles that are slower for formats with
/// more decoding instructions.
const FEW_TOKENS: u32 = 64;

/// Maximum tokens of a tile that keeps separate sums of a
/// k-tile and adds them scaled, which takes fewer instructions than
/// scaling weights (`mainloop/sm90/code_sums_product.cuh`); and its
/// percentage of the arithmetic. bf16 gains most, because scaling bf16
/// weights takes the most instructions.
const MOST_SUMMED: u32 = 64;
const MOST_SUMMED_BF16: u32 = 96;
const SUMMED: u32 = 105;

/// Maximum and minimum stages.
const STAGES: (u32, u32) = (8, 3);

fn instances(types: &Types, _: FitsRegisters<'_>) -> Vec<Instance> {
    if !serves(types) {
        return Vec::new();
    }
    // With fewer bits, arithmetic takes longer than copies, so
    // line alignment does not pay.
    let pitch_of = if types.is_narrow() { |run, _| run } else { common::pitch_in_lines };
    TILES.iter().filter_map(|tile| tile.best_instance(types, &tile.best_division(types), pitch_of, |_| 0)).collect()
}

fn for_experts(types: &Types) -> Vec<Instance> {
    if !serves(types) {
        return Vec::new();
    }
    let of_four_bits: &[Tile] = if types.format.code_planes == [4] { &OF_EXPERTS_OF_FOUR_BITS } else { &[] };
    let tiles = OF_EXPERTS.iter().chain(of_four_bits);
    let own_bytes = |i: &Instance| i.tile_info_bytes + common::FAULTS;
    let most_summed = if types.x == DType::BF16 { MOST_SUMMED_BF16 } else { MOST_SUMMED };
    let with_sums = |i: Instance| {
        let sums_codes = i.tile_m <= most_summed && has_scale_a_k_tile(types);
        let arithmetic = if sums_codes { i.efficiency.0 * SUMMED / 100 } else { i.efficiency.0 };
        Instance { sums_codes, efficiency: (arithmetic, i.efficiency.1), ..i }
    };
    tiles.filter_map(|tile| tile.best_instance(types, &tile.division, |run, _| run, own_bytes)).map(with_sums).collect()
}

/// Whether 4-bit codes have one scale and zero
/// point for a row of a k-tile.
fn has_scale_a_k_tile(types: &Types) -> bool {
    let format = types.format;
    let is_exact = format.code_planes == [4] && format.encoding == Encoding::IntZero;
    // Two k-blocks are one stage.
    is_exact && types.tile_k() == 2 * K_BLOCK && format.sub_block as u32 >= types.tile_k()
}

fn serves(types: &Types) -> bool {
    types.engine.is_mma() && types.variant == Variant::Sm90
}

impl Tile {
    /// The instance with as many stages as fit beside `own_bytes`.
    /// `pitch_of(segment, k_tile)` is the pitch of W segments in bytes.
    fn best_instance(
        &self,
        types: &Types,
        division: &Division,
        pitch_of: fn(u32, u32) -> u32,
        own_bytes: fn(&Instance) -> u32,
    ) -> Option<Instance> {
        let mut kernels = (STAGES.1..=STAGES.0).rev().map(|stages| self.instance(types, division, pitch_of, stages));
        kernels.find(|i| i.shared_bytes + own_bytes(i) <= most_shared(Variant::Sm90))
    }

    /// Split of the tile that does not exceed the registers
    /// (`kernels.lock` shows no spills).
    fn best_division(&self, types: &Types) -> Division {
        let format = types.format;
        let bits = format.code_planes.first();
        // Single-plane integers with a scale per block,
        // and at most a zero point.
        let is_plain_integer = matches!(format.encoding, Encoding::IntOffset { .. } | Encoding::IntZero);
        let takes_few_instructions = format.code_planes == [4] && is_plain_integer;
        match (self.tile_m, types.tile_k()) {
            // Fewer waits. bf16 weights are converted through
            // f32, which takes registers.
            (32, 128) if takes_few_instructions && types.x == DType::F16 => {
                Division { stage_k_blocks: 4, ..self.division }
            }
            // Scales of every 16 columns take the
            // registers of a second group.
            (32, _) if format.sub_block == 16 && bits == Some(&2) => Division { k_groups: 1, ..self.division },
            // Half the warps, each with two row tiles; slower for Q8_0,
            // Q4_K, Q6_K.
            (64, ..=128) if takes_few_instructions => division(2, 4, 2, 2),
            _ => self.division,
        }
    }

    fn instance(&self, types: &Types, division: &Division, pitch_of: fn(u32, u32) -> u32, stages: u32) -> Instance {
        let Division { row_tiles, warps, k_groups, stage_k_blocks } = *division;
        let tile_m = self.tile_m;
        let rows = row_tiles * types.tile_rows();
        let k_blocks = types.tile_k() / K_BLOCK;
        // Segments of k-tiles that are copied together (`RUN_SLABS`).
        let w_stages = 1 + (stages - 1).div_ceil((k_blocks / stage_k_blocks).max(1));
        let pitch = pitch_of((stage_k_blocks / k_blocks).max(1) * types.k_tile_bytes(), types.k_tile_bytes());
        let x = stages * stage_k_blocks * common::x_stage(types, tile_m);
        let w = w_stages * warps * row_tiles * pitch;
        // Many epilogue rounds must be a multiple of four (`ROUNDS_AT_ONCE`).
        let rounds = tile_m / (STAGED * MMA_TOKENS);
        let staged = if rounds < 8 || rounds.is_multiple_of(4) { STAGED } else { STAGED + 1 };
        let staging = warps * common::warp_staging(rows, staged);
        let exchange = (k_groups - 1) * tile_m * warps * rows * 4;
        Instance {
            consumers: warps * 32,
            stages,
            constants: Prelude {
                row_tiles: Some(row_tiles),
                warps_n: Some(warps),
                k_groups: Some(k_groups),
                stage_k_blocks: Some(stage_k_blocks),
                x_stages: Some(stages),
                w_stages: Some(w_stages),
                staged: Some(staged),
                run_pitch: Some(pitch),
                ..Prelude::PRODUCT
            },
            warps_n: warps,
            k_groups,
            // Tile info has one row number per token plus
            // four words (`INFOS`).
            tile_info_bytes: (stages + 2) * (tile_m + 4) * 4,
            efficiency: (self.efficiency.0 * arithmetic_share(types, tile_m) / 100, self.efficiency.1),
            ..Instance::new(Parts {
                main_loop: &MAIN_LOOP,
                types,
                tile: [tile_m, warps * rows],
                threads: (warps * k_groups + PRODUCER_WARPS) * 32,
                shared_bytes: x + w + stages * 2 * BARRIER + staging + exchange + common::FLAG,
            })
        }
    }
}

/// Percentage of INT4's arithmetic that small token tiles reach: nested
/// scales take as many instructions as their codes, two-plane formats more,
/// and codebooks need lookups (fitted on an H200).
fn arithmetic_share(types: &Types, tile_m: u32) -> u32 {
    let format = types.format;
    match () {
        () if tile_m > FEW_TOKENS => 100,
        () if types.has_nested_scales() && format.code_planes.len() > 1 => 72,
        () if types.has_nested_scales() => 80,
        () if matches!(format.encoding, Encoding::Codebook(_)) => 70,
        () => 100,
    }
}
