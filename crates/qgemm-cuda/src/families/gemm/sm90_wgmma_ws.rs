//! The main loop of `gemm` on Hopper for more than a few tokens: consumer warpgroups, whose matrix instructions run by themselves,
//! and a producer warpgroup that copies W and X into rings by TMA.

use qgemm_formats::{DType, Encoding};
use qgemm_hal::{Schedule, Variant};

use super::common::{self, BARRIER, K_BLOCK, MMA_TOKENS, PRODUCER_WARPS, STAGED};
use super::instance::{FitsRegisters, Instance, MOST_GRID_Y, MainLoop, Parts, STAGE_K_BLOCKS, XAccess};
use super::types::Types;
use crate::arch::most_shared;

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    family: "gemm",
    name: "sm90_wgmma_ws",
    entry: "entry/sm90_gemm_wgmma_ws.cu",
    symbol: "qg_sm90_gemm_wgmma_ws",
    arch_specific: true,
    schedule: Schedule::StreamK,
    x_access: XAccess::Tma,
    // Warpgroups take 32 tokens of some formats in less time than others take two.
    rounds_beyond: Some(1),
    experts_tiles: |_| &[64, 128],
    for_experts: Some(for_experts),
    most_m_tiles: MOST_GRID_Y,
    most_tile_bytes: usize::MAX,
    instances,
};

/// Whether a kernel with experts reads lists, and asks for weights by them, before the work before it is done, where they are settled, and
/// lets the next launch begin after that work (`mainloop/expert_producer.cuh`).
pub(in crate::families) fn settles_lists(instance: &Instance) -> bool {
    instance.main_loop.name == MAIN_LOOP.name
}

/// A tile: its tokens, how warps share its rows and its K, and the shares of the arithmetic and bandwidth that an H200
/// reaches with it, per mille.
struct Tile {
    tile_m: u32,
    division: Division,
    efficiency: (u32, u32),
}

/// How the consumer warps of a CTA divide a tile.
#[derive(Clone, Copy)]
struct Division {
    /// Tiles of rows of a warp, and warps of a group, along N.
    row_tiles: u32,
    warps: u32,
    /// Groups of warps that share the K dimension of the CTA's rows.
    k_groups: u32,
    /// K-blocks of X in a stage.
    stage_k_blocks: u32,
}

const fn division(row_tiles: u32, warps: u32, k_groups: u32, stage_k_blocks: u32) -> Division {
    Division { row_tiles, warps, k_groups, stage_k_blocks }
}

/// Two groups serve 32 tokens faster (14.1 us for 15.0). Two k-blocks a stage cost fewer waits than one; for 256 tokens there is
/// no room for three such stages. Times here are an H200's, of INT4 14336x4096 where nothing else is said.
const TILES: [Tile; 4] = [
    Tile { tile_m: 32, division: division(1, 8, 2, 2), efficiency: (350, 765) },
    Tile { tile_m: 64, division: division(1, 8, 1, 2), efficiency: (535, 740) },
    Tile { tile_m: 128, division: division(1, 8, 1, 2), efficiency: (690, 740) },
    Tile { tile_m: 256, division: division(1, 8, 1, 1), efficiency: (750, 740) },
];

/// For experts, whose products have few rows of X each: twice the rows of W share them, and what begins and ends a tile (INT4, 128 experts
/// of 1536x2048, 512 and 4096 tokens to eight experts each: 97 for 116 us, 433 for 475).
const OF_EXPERTS: [Tile; 2] = [
    Tile { tile_m: 64, division: division(2, 8, 1, 2), efficiency: (590, 740) },
    Tile { tile_m: 128, division: division(2, 8, 1, 2), efficiency: (720, 740) },
];

/// For weights of four bits, too, as most models with many experts have them: where every expert has about as many rows, 32 and a few more or
/// 64, 128, 256, most have a tile less of rows that are not there (the same with 512, 1024, 2048 and 4096 tokens: 90 for 95 us, 130 for
/// 148, 207 for 230, 346 for 382).
const OF_EXPERTS_OF_FOUR_BITS: [Tile; 3] = [
    Tile { tile_m: 48, division: division(2, 8, 1, 2), efficiency: (460, 740) },
    Tile { tile_m: 96, division: division(2, 8, 1, 2), efficiency: (640, 740) },
    Tile { tile_m: 144, division: division(2, 8, 1, 2), efficiency: (710, 740) },
];

/// Most tokens of the tiles that take longer where codes take more instructions.
const FEW_TOKENS: u32 = 64;

/// Most tokens of a tile whose sums of a k-tile have registers of their own and are added up times their scales, for fewer instructions than
/// scaled weights take (`mainloop/sm90/code_sums_product.cuh`), and the share of the arithmetic then, in per cent of the others'. In bf16,
/// where scaled weights take most, more tokens gain by it (161 for 175 us, 1024 tokens to eight of 128 experts of 1536x2048; in f16 129 for 127).
const MOST_SUMMED: u32 = 64;
const MOST_SUMMED_BF16: u32 = 96;
const SUMMED: u32 = 105;

/// Stages: most, and fewest.
const STAGES: (u32, u32) = (8, 3);

fn instances(types: &Types, _: FitsRegisters<'_>) -> Vec<Instance> {
    if !serves(types) {
        return Vec::new();
    }
    // Of fewer bits arithmetic takes longer than copies.
    let pitch_of = if types.is_narrow() { |run, _| run } else { common::pitch_in_lines };
    TILES.iter().filter_map(|tile| tile.best_instance(types, &tile.best_division(types), pitch_of, |_| 0)).collect()
}

fn for_experts(types: &Types) -> Vec<Instance> {
    if !serves(types) {
        return Vec::new();
    }
    let of_four_bits: &[Tile] = if types.format.code_planes == [4] { &OF_EXPERTS_OF_FOUR_BITS } else { &[] };
    let tiles = OF_EXPERTS.iter().chain(of_four_bits);
    let own_bytes = |i: &Instance| i.note_bytes + common::FAULTS;
    let most_summed = if types.x == DType::BF16 { MOST_SUMMED_BF16 } else { MOST_SUMMED };
    let with_sums = |i: Instance| {
        let sums_codes = i.tile_m <= most_summed && has_scale_a_k_tile(types);
        let arithmetic = if sums_codes { i.efficiency.0 * SUMMED / 100 } else { i.efficiency.0 };
        Instance { sums_codes, efficiency: (arithmetic, i.efficiency.1), ..i }
    };
    tiles.filter_map(|tile| tile.best_instance(types, &tile.division, |run, _| run, own_bytes)).map(with_sums).collect()
}

/// Whether a row's columns of a k-tile have one scale and zero point, and codes of four bits.
fn has_scale_a_k_tile(types: &Types) -> bool {
    let format = types.format;
    let is_exact = format.code_planes == [4] && format.encoding == Encoding::IntZero;
    // Two k-blocks, which are a stage.
    is_exact && types.tile_k() == 2 * K_BLOCK && format.sub_block as u32 >= types.tile_k()
}

fn serves(types: &Types) -> bool {
    types.engine.is_mma() && types.variant == Variant::Sm90
}

impl Tile {
    /// With as many stages as there is room for beside `own_bytes`. `pitch_of` a run and a k-tile are the bytes from a run of W to the next.
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

    /// How the tile is divided, with no more values at hand than registers (`kernels.lock` shows no spills).
    fn best_division(&self, types: &Types) -> Division {
        let format = types.format;
        let bits = format.code_planes.first();
        // Integers of one plane whose scale, and no more, changes from block to block or is joined by a zero point.
        let is_plain_integer = matches!(format.encoding, Encoding::IntOffset { .. } | Encoding::IntZero);
        let takes_few_instructions = format.code_planes == [4] && is_plain_integer;
        match (self.tile_m, types.tile_k()) {
            // Fewer waits (44.8 us for 48.2, INT4 28672x8192). Weights in bf16 pass through f32, which takes the registers.
            (32, 128) if takes_few_instructions && types.x == DType::F16 => {
                Division { stage_k_blocks: 4, ..self.division }
            }
            // The scales of every 16 columns take a second group's registers.
            (32, _) if format.sub_block == 16 && bits == Some(&2) => Division { k_groups: 1, ..self.division },
            // Half as many warps do once what two tiles of rows have in common (57.3 us for 62.6, INT4 28672x8192); weights of
            // Q8_0, Q4_K and Q6_K take them longer.
            (64, ..=128) if takes_few_instructions => division(2, 4, 2, 2),
            _ => self.division,
        }
    }

    fn instance(&self, types: &Types, division: &Division, pitch_of: fn(u32, u32) -> u32, stages: u32) -> Instance {
        let Division { row_tiles, warps, k_groups, stage_k_blocks } = *division;
        let tile_m = self.tile_m;
        let rows = row_tiles * types.tile_rows();
        let k_blocks = types.tile_k() / K_BLOCK;
        // Runs of k-tiles, of those that arrive together (`RUN_SLABS`).
        let w_stages = 1 + (stages - 1).div_ceil((k_blocks / stage_k_blocks).max(1));
        let pitch = pitch_of((stage_k_blocks / k_blocks).max(1) * types.k_tile_bytes(), types.k_tile_bytes());
        let x = stages * stage_k_blocks * common::x_stage(types, tile_m);
        let w = w_stages * warps * row_tiles * pitch;
        // Many rounds of a tile are whole quarters (`ROUNDS_AT_ONCE`).
        let rounds = tile_m / (STAGED * MMA_TOKENS);
        let staged = if rounds < 8 || rounds.is_multiple_of(4) { STAGED } else { STAGED + 1 };
        let staging = warps * common::warp_staging(rows, staged);
        let exchange = (k_groups - 1) * tile_m * warps * rows * 4;
        Instance {
            consumers: warps * 32,
            stages,
            constants: vec![
                ("QG_ROW_TILES", row_tiles),
                ("QG_WARPS_N", warps),
                ("QG_K_GROUPS", k_groups),
                (STAGE_K_BLOCKS, stage_k_blocks),
                ("QG_X_STAGES", stages),
                ("QG_W_STAGES", w_stages),
                ("QG_STAGED", staged),
                (common::RUN_PITCH, pitch),
            ],
            warps_n: warps,
            k_groups,
            // A note has a row for each token, and four words more; `NOTES`.
            note_bytes: (stages + 2) * (tile_m + 4) * 4,
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

/// What tiles of a few tokens reach of INT4's arithmetic, per cent: nested scales take as many instructions as their codes, those of two
/// planes more, and codes are looked up (MXFP4 on an H200: with all of it plans were up to 54 % behind the best way, of nine with this two
/// were more than 1 %, 21 and 25 %).
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
