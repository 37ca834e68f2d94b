//! `gemv` main loop for few tokens. Memory-bound: a CTA has one
//! row tile, and its warps split K.

use qgemm_formats::{DType, Encoding};
use qgemm_hal::{Schedule, Variant};

use super::super::prelude::Prelude;
use super::common;
use super::instance::{FitsRegisters, Instance, InstanceLists, MOST_GRID_Y, Parts};
use super::main_loop::{MainLoop, MainLoopKind, XAccess};
use super::types::{Engine, Types};

pub(super) static MAIN_LOOP: MainLoop = MainLoop {
    schedule: Schedule::Grid,
    most_m_tiles: MOST_GRID_Y,
    normalizes_x: true,
    ..MainLoop::new(MainLoopKind::Gemv, ("entry/gemv.cu", "qg_gemv"), XAccess::Any)
};

pub(super) static INSTANCES: InstanceLists =
    InstanceLists { for_projections, ..InstanceLists::new(&MAIN_LOOP, instances) };

const THREADS: u32 = 128;
/// Bytes of codes that a lane loads before it computes. With
/// 32 resident warps, an SM then has 32 KiB in flight,
/// which covers the latency of HBM3e. Twice as many would cost
/// registers and thus resident CTAs, which are worth more.
const BYTES_IN_FLIGHT: usize = 32;
const MAX_UNROLL: usize = 2;
/// Bytes of activations that a CTA keeps in shared memory.
const X_BYTES: u32 = 16 * 1024;

/// Supported token tiles. Matrix instructions take eight tokens for the
/// price of one; FMA is compute-bound beyond two.
fn token_tiles(types: &Types) -> &'static [u32] {
    match (types.engine, types.x) {
        // From two tokens on, the sliced-K kernels of `gemm` are faster.
        (Engine::Mma(_), _) if types.variant >= Variant::Sm80 => &[1],
        (Engine::Mma(_), _) => &[1, 8],
        (Engine::Fma, DType::F16) => &[1, 2],
        // Few products are that exact. Two tokens take two tiles.
        (Engine::Fma, _) => &[1],
    }
}

fn instances(types: &Types, _: FitsRegisters<'_>) -> Vec<Instance> {
    // Volta always uses FMA. Beyond two tokens it is slower than
    // `gemm`, whose smallest tile also slices K.
    let engine = if types.variant == Variant::Sm70 { Engine::Fma } else { types.engine };
    let types = Types { engine, ..types.clone() };
    token_tiles(&types).iter().map(|&tile_m| instance(&types, tile_m)).collect()
}

/// MoE kernel: the widest tile that costs a row
/// no more than a narrow one.
///
/// `None` when other main loops serve X. From Ampere
/// on, unaligned and permuted rows are converted first.
/// For nested scales, other main loops lack shared
/// memory on GeForce chips of Ampere.
pub(in crate::families) fn for_experts(types: &Types) -> Option<Instance> {
    let is_needed = match types.x {
        DType::F32 => true,
        DType::F16 if types.variant < Variant::Sm80 => true,
        _ => types.variant == Variant::Sm80 && types.has_nested_scales(),
    };
    is_needed.then(|| of_experts(types))
}

fn of_experts(types: &Types) -> Instance {
    let engine = if types.variant == Variant::Sm70 { Engine::Fma } else { types.engine };
    let types = Types { engine, ..types.clone() };
    let kernel = instance(&types, if engine.is_mma() { 8 } else { 2 });
    // Narrowing the problem to one expert takes registers (`kernels.lock`).
    let most = match (engine, types.variant) {
        (Engine::Mma(_), _) => 2,
        (Engine::Fma, Variant::Sm70) => 3,
        (Engine::Fma, _) => 4,
    };
    Instance { ctas_per_sm: kernel.ctas_per_sm.min(most), ..kernel }
}

/// Kernels with a fused norm and output segments, for
/// f16. From Ampere on, another main loop serves one
/// 16-bit token. Other types are normalized by a
/// separate launch.
fn for_projections(types: &Types, fits: FitsRegisters<'_>) -> Vec<Instance> {
    if types.variant >= Variant::Sm80 || types.x != DType::F16 {
        return Vec::new();
    }
    let engine = if types.variant == Variant::Sm70 { Engine::Fma } else { types.engine };
    let types = Types { engine, ..types.clone() };
    let with_own = |&tile_m: &u32| {
        let kernel = instance(&types, tile_m).with_own_bytes(common::row_statistics(tile_m, THREADS / 32));
        // Normalizing takes registers (`kernels.lock`).
        let most = if types.variant == Variant::Sm70 { 3 } else { kernel.ctas_per_sm };
        Instance { ctas_per_sm: kernel.ctas_per_sm.min(most), ..kernel }
    };
    token_tiles(&types).iter().map(with_own).filter(fits).collect()
}

fn instance(types: &Types, tile_m: u32) -> Instance {
    let Types { engine, layout, .. } = types;
    let tile_k = types.tile_k();
    let lane_bytes: usize = layout.codes.iter().map(|p| p.word_bytes * p.words).sum();
    // Staging eight tokens costs as much as streaming a row tile:
    // share it among more rows, if registers hold two k-tiles.
    let row_tiles: u32 = if tile_m >= 8 && tile_k <= 128 { 2 } else { 1 };
    let unroll = (BYTES_IN_FLIGHT / lane_bytes / row_tiles as usize).clamp(1, MAX_UNROLL) as u32;
    // Eight tokens get twice the room, so that a warp still
    // processes a few k-tiles between barriers.
    let room = if tile_m >= 8 { 2 * X_BYTES } else { X_BYTES };
    let x_k_tiles = (room / (tile_m * engine.x_bytes() * tile_k)).max(8);
    let tile_n = row_tiles * types.tile_rows();
    let x = tile_m * common::x_row(types, x_k_tiles * tile_k / types.chunk_k());
    let sums = THREADS / 32 * common::warp_sums(tile_m, tile_n);
    Instance {
        ctas_per_sm: ctas_per_sm(types, tile_m),
        stages: x_k_tiles,
        efficiency: match engine {
            Engine::Mma(_) => {
                let (arithmetic, bandwidth) = mma_efficiency(types);
                // A tile of several tokens takes as long as one
                // token. From Ampere on, eight tokens cost four times
                // as much when compute-bound.
                let at_once = if types.variant < Variant::Sm80 { tile_m } else { tile_m.min(2) };
                (arithmetic * at_once, bandwidth)
            }
            Engine::Fma => (300, 700),
        },
        warps_n: 1,
        k_groups: THREADS / 32,
        constants: Prelude {
            row_tiles: Some(row_tiles),
            warps_n: Some(1),
            x_k_tiles: Some(x_k_tiles),
            unroll: Some(unroll),
            ..Prelude::PRODUCT
        },
        ..Instance::new(Parts {
            main_loop: &MAIN_LOOP,
            types,
            tile: [tile_m, tile_n],
            threads: THREADS,
            shared_bytes: x.next_multiple_of(common::ALIGNMENT) + sums + common::FLAG,
        })
    }
}

/// Shares of the arithmetic (per token of a tile) and of
/// the bandwidth with matrix instructions, per mille (H200). FP8
/// conversions and nested scales cost instructions.
///
/// With an aligned X, `gemm` is faster for one token of
/// most formats, above all with few rows.
fn mma_efficiency(types: &Types) -> (u32, u32) {
    match types.format.encoding {
        Encoding::E4M3 | Encoding::E5M2 => (40, 740),
        _ if types.has_nested_scales() => (10, 650),
        // Codebook lookups are slower.
        Encoding::Codebook(_) => (40, 380),
        _ => (40, 660),
    }
}

/// Resident CTAs per SM: the fastest count without spills
/// (`kernels.lock`, H200). The compiler's schedule jumps with the limit,
/// so fewer can be faster or slower.
fn ctas_per_sm(types: &Types, tile_m: u32) -> u32 {
    let Types { format, variant, engine, .. } = types;
    // Minimums, zero points and scales per 16 columns take extra registers.
    let heavy = types.has_block_offsets() || format.sub_block == 16;
    match (engine, types.tile_k(), tile_m) {
        (Engine::Fma, ..) if format.code_planes == [32] => 2,
        (Engine::Fma, ..=64, _) => 4,
        (Engine::Fma, ..=128, _) => 3,
        (Engine::Fma, ..) => 2,
        (Engine::Mma(_), ..=128, 8..) => 3,
        (Engine::Mma(_), ..=64, 1) if heavy && format.code_planes == [4] && *variant == Variant::Sm120 => 4,
        (Engine::Mma(_), ..=64, _) if heavy => 5,
        (Engine::Mma(_), ..=64, _) => 7,
        (Engine::Mma(_), ..=128, _) if format.code_planes == [4] => 7,
        (Engine::Mma(_), ..=128, _) => 5,
        // The compiler needs a few more registers on Turing and Blackwell,
        // and on Ampere and Ada with scales per 16 columns.
        (Engine::Mma(_), _, 1) if matches!(variant, Variant::Sm80 | Variant::Sm89) && format.sub_block == 16 => 3,
        (Engine::Mma(_), _, 2..) if types.has_block_offsets() && format.sub_block == 16 => 2,
        (Engine::Mma(_), _, 1) if *variant >= Variant::Sm80 && *variant < Variant::Sm120 => 4,
        (Engine::Mma(_), ..) => 3,
    }
}
