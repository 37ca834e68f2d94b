//! `gemm` main loop with `mma` but without cp.async (Volta,
//! Turing): X passes through registers into one of two stages
//! while the other is multiplied.

use qgemm_hal::Variant;

use super::super::prelude::Prelude;
use super::common::{self, SUM_PADDING};
use super::instance::{FitsRegisters, Instance, InstanceLists, MOST_GRID_Y, Parts};
use super::main_loop::{MainLoop, MainLoopKind, SegmentTile, XAccess};
use super::types::Types;

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    most_m_tiles: MOST_GRID_Y,
    segments: &[SegmentTile { variants: &Variant::ALL, tokens: 32, serves: 3..=usize::MAX }],
    ..MainLoop::new(
        MainLoopKind::Sm70TwoStage,
        ("entry/sm70_gemm_two_stage.cu", "qg_sm70_gemm_two_stage"),
        XAccess::Any,
    )
};

pub(super) static INSTANCES: InstanceLists = InstanceLists {
    // Narrowing the problem to one expert leaves too few
    // registers for 32 tokens.
    experts_tiles: |_| &[16],
    ..InstanceLists::new(&MAIN_LOOP, instances)
};

const THREADS: u32 = 128;
/// Columns of X in a stage (`STAGE_K`).
const STAGE_K: u32 = 64;

/// Tokens, row tiles of a warp, and resident CTAs per SM,
/// limited by registers (`kernels.lock` shows no spills).
struct Tile {
    tokens: u32,
    row_tiles: u32,
    ctas_per_sm: u32,
    /// Estimated share of the tensor rate, per mille: the share of
    /// `mma` in the main loop's issue slots (docs/results/performance.md).
    arithmetic: u32,
}

/// Volta issues four instructions for a product that
/// occupies its tensor core for eight cycles. Loads of X
/// reach half of the shared-memory bandwidth, so from 32
/// tokens on two row tiles share a load.
const VOLTA: [Tile; 3] = [
    Tile { tokens: 8, row_tiles: 1, ctas_per_sm: 4, arithmetic: 400 },
    Tile { tokens: 16, row_tiles: 1, ctas_per_sm: 3, arithmetic: 600 },
    Tile { tokens: 32, row_tiles: 2, ctas_per_sm: 2, arithmetic: 850 },
];

/// Turing issues one instruction, and `ldmatrix` uses the full bandwidth.
const TURING: [Tile; 3] = [
    Tile { tokens: 8, row_tiles: 2, ctas_per_sm: 4, arithmetic: 400 },
    Tile { tokens: 16, row_tiles: 2, ctas_per_sm: 3, arithmetic: 600 },
    Tile { tokens: 32, row_tiles: 2, ctas_per_sm: 2, arithmetic: 850 },
];

fn instances(types: &Types, _: FitsRegisters<'_>) -> Vec<Instance> {
    let tiles: &[Tile] = match types.variant {
        Variant::Sm70 if types.engine.is_mma() => &VOLTA,
        Variant::Sm75 if types.engine.is_mma() => &TURING,
        _ => &[],
    };
    tiles.iter().map(|tile| tile.instance(types)).collect()
}

impl Tile {
    fn instance(&self, types: &Types) -> Instance {
        let Tile { tokens, row_tiles, ctas_per_sm, arithmetic } = *self;
        let tile_n = THREADS / 32 * row_tiles * types.tile_rows();
        let stages = 2 * self.stage_bytes(types);
        let bytes = stages.max(common::cta_sums(tokens, tile_n)).next_multiple_of(common::ALIGNMENT) + common::FLAG;
        Instance {
            ctas_per_sm,
            stages: 2,
            constants: Prelude { row_tiles: Some(row_tiles), ..Prelude::PRODUCT },
            efficiency: (arithmetic, 700),
            ..Instance::new(Parts {
                main_loop: &MAIN_LOOP,
                types,
                tile: [tokens, tile_n],
                threads: THREADS,
                shared_bytes: bytes,
            })
        }
    }

    /// `sizeof(Stage)`: X with its sums, and scales and
    /// minimums of the CTA's rows.
    fn stage_bytes(&self, types: &Types) -> u32 {
        let subs = (STAGE_K / types.format.sub_block as u32).max(1);
        let floats = |present: bool, pitch: u32| if present { subs * pitch } else { 2 };
        let x = self.tokens * STAGE_K * 2 + 4 * floats(types.has_minimums(), self.tokens + SUM_PADDING);
        let rows = self.row_tiles * types.tile_rows();
        let of_warp = floats(!types.layout.scales.is_empty(), rows) + floats(types.has_minimums(), rows);
        let scales = THREADS / 32 * 4 * of_warp;
        (x.next_multiple_of(common::ALIGNMENT) + scales).next_multiple_of(common::ALIGNMENT)
    }
}
