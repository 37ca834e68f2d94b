//! `gemm` main loop without matrix instructions: f32 FMA, for
//! types that they do not support.

use qgemm_hal::Schedule;

use super::super::prelude::Prelude;
use super::common;
use super::instance::{FitsRegisters, Instance, InstanceLists, MOST_GRID_Y, Parts};
use super::main_loop::{MainLoop, MainLoopKind, XAccess};
use super::types::{Engine, Types};

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    schedule: Schedule::Grid,
    most_m_tiles: MOST_GRID_Y,
    ..MainLoop::new(MainLoopKind::GemmSimt, ("entry/gemm_simt.cu", "qg_gemm_simt"), XAccess::Any)
};

pub(super) static INSTANCES: InstanceLists =
    InstanceLists { experts_tiles: |_| &[8, 16], ..InstanceLists::new(&MAIN_LOOP, instances) };

const THREADS: u32 = 128;
/// Row tiles of a warp.
const ROW_TILES: u32 = 1;

fn instances(types: &Types, _: FitsRegisters<'_>) -> Vec<Instance> {
    if types.engine != Engine::Fma {
        return Vec::new();
    }
    // Largest token tile whose sums stay in registers (`kernels.lock` shows no
    // spills). All columns of a k-tile are unrolled for all tokens,
    // so larger tiles also compile slowly.
    let tile_m = if types.has_nested_scales() { 8 } else { 16 };
    let tile_n = THREADS / 32 * ROW_TILES * types.tile_rows();
    // Two chunks of activations; later the sums reuse this memory.
    let x = 2 * tile_m * common::x_row(types, 1);
    vec![Instance {
        ctas_per_sm: 2,
        stages: 2,
        constants: Prelude { row_tiles: Some(ROW_TILES), ..Prelude::PRODUCT },
        efficiency: (350, 450),
        ..Instance::new(Parts {
            main_loop: &MAIN_LOOP,
            types,
            tile: [tile_m, tile_n],
            threads: THREADS,
            shared_bytes: x.max(common::cta_sums(tile_m, tile_n)).next_multiple_of(common::ALIGNMENT) + common::FLAG,
        })
    }]
}
