//! `gemm` main loop for INT8 X without cp.async:
//! integer `mma` on Turing, `dp4a` on Volta. W and X
//! are staged as in `sm70_two_stage`.

use qgemm_formats::{DType, XFormat};
use qgemm_hal::{Math, Variant};

use super::super::prelude::Prelude;
use super::common;
use super::instance::{FitsRegisters, Instance, InstanceLists, MOST_GRID_Y, Parts};
use super::main_loop::{MainLoop, MainLoopKind, XAccess};
use super::sm80_s8_cp_async::{X_FORMATS, has_sums};
use super::types::Types;

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    most_m_tiles: MOST_GRID_Y,
    ..MainLoop::new(
        MainLoopKind::Sm70S8TwoStage,
        ("entry/sm70_gemm_s8_two_stage.cu", "qg_sm70_gemm_s8_two_stage"),
        XAccess::Planes,
    )
};

pub(super) static INSTANCES: InstanceLists = InstanceLists::new(&MAIN_LOOP, instances);

const THREADS: u32 = 128;
/// Columns of X in a stage (`STAGE_K`), columns of an X
/// block sum, and columns of a scale.
const STAGE_K: u32 = 64;
const CHUNK: u32 = 16;
const SCALE_COLUMNS: u32 = 32;

/// Tokens, row tiles of a warp (`kernels.lock` shows no spills),
/// and estimated share of the instruction rate, per mille: the
/// issue slots that scaling leaves.
struct Tile {
    tokens: u32,
    row_tiles: u32,
    arithmetic: u32,
}

/// A sum of 32 products takes eight instructions, plus three for
/// its scales. One load of X serves all row tiles.
const VOLTA: [Tile; 2] =
    [Tile { tokens: 8, row_tiles: 1, arithmetic: 400 }, Tile { tokens: 32, row_tiles: 2, arithmetic: 550 }];

/// Four instructions for four sums of 32 products per lane,
/// plus twelve for their scales.
const TURING: [Tile; 2] =
    [Tile { tokens: 16, row_tiles: 2, arithmetic: 250 }, Tile { tokens: 32, row_tiles: 2, arithmetic: 320 }];

fn instances(types: &Types, _: FitsRegisters<'_>) -> Vec<Instance> {
    let tiles: &[Tile] = match types.variant {
        _ if !types.has_signed_bytes() || types.x != DType::F16 => &[],
        Variant::Sm70 => &VOLTA,
        Variant::Sm75 => &TURING,
        _ => &[],
    };
    let of_format = |x| tiles.iter().map(move |tile| tile.instance(types, x));
    X_FORMATS.into_iter().flat_map(of_format).collect()
}

impl Tile {
    fn instance(&self, types: &Types, x_format: XFormat) -> Instance {
        let Tile { tokens, row_tiles, arithmetic } = *self;
        let tile_n = THREADS / 32 * row_tiles * types.tile_rows();
        let has_block_scales = x_format != XFormat::Int8Token;
        let stages = 2 * self.stage_bytes(types, has_block_scales);
        let bytes = stages.max(common::cta_sums(tokens, tile_n)).next_multiple_of(common::ALIGNMENT) + common::FLAG;
        Instance {
            ctas_per_sm: 2,
            stages: 2,
            x_format,
            math: if types.variant == Variant::Sm70 { Math::DotI8 } else { Math::TensorS8 },
            constants: Prelude {
                row_tiles: Some(row_tiles),
                x_block_scales: Some(has_block_scales.into()),
                ..Prelude::PRODUCT
            },
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

    /// `sizeof(Stage)`: codes of X with scales and sums, and scales
    /// and minimums of the CTA's rows.
    fn stage_bytes(&self, types: &Types, has_block_scales: bool) -> u32 {
        let of_tokens = |present: bool, each: u32| if present { self.tokens * each * 4 } else { common::ALIGNMENT };
        let has_minimums = has_sums(types);
        let x = self.tokens * STAGE_K
            + of_tokens(has_block_scales, STAGE_K / SCALE_COLUMNS)
            + of_tokens(has_minimums, STAGE_K / CHUNK);
        let subs = (STAGE_K / types.format.sub_block as u32).max(1);
        let rows = self.row_tiles * types.tile_rows();
        let floats = |present: bool| if present { subs * rows } else { 2 };
        let of_warp = floats(!types.layout.scales.is_empty()) + floats(has_minimums);
        (x + THREADS / 32 * 4 * of_warp).next_multiple_of(common::ALIGNMENT)
    }
}
