//! `gemv`: a few tokens. Bound by memory, so a block is one tile of rows whose K dimension its warps share.

use std::sync::Arc;

use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{DType, Encoding, Format};
use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, HalError, Kernel, KernelFamily, LaunchPlan, TileConfig, Unsupported, Variant,
};

use super::instance::{Engine, Instance, Shape, class, has_block_offsets};
use super::kernel;

/// The family.
#[derive(Debug)]
pub(super) struct Gemv;

const THREADS: u32 = 128;
/// Bytes of codes that a lane loads before it computes: with 32 resident warps an SM, 32 KiB, which covers the latency
/// of HBM3e (4.5 TB/s over 132 SMs at about 0.8 µs is 27 KiB). Measured on an H200: 64 bytes cost registers, and with
/// them resident blocks, that are worth more.
const BYTES_IN_FLIGHT: usize = 32;
const MAX_UNROLL: usize = 2;
/// Bytes of activations that a block keeps in shared memory.
const X_BYTES: usize = 16 * 1024;

/// Tokens that a tile may have: matrix instructions take eight for the price of one; FMA is bound by arithmetic
/// beyond two.
fn token_tiles(engine: Engine, variant: Variant) -> &'static [u32] {
    match engine {
        // From two tokens on, `gemm`'s kernels whose warps share K are faster (measured on an H200).
        Engine::Mma if variant >= Variant::Sm80 => &[1],
        Engine::Mma => &[1, 2, 8],
        Engine::Fma => &[1, 2],
    }
}

/// For Volta always FMA: tokens beyond two, where it is slower, are `gemm`'s, whose smallest tile splits K as well.
fn engine(format: Format, x: DType, variant: Variant) -> Engine {
    if variant == Variant::Sm70 { Engine::Fma } else { Engine::of(format, x, variant) }
}

/// Every kernel of the family for these types.
pub(super) fn instances(format: Format, x: DType, variant: Variant) -> Vec<Instance> {
    let engine = engine(format, x, variant);
    token_tiles(engine, variant).iter().filter_map(|&tile_m| instance(format, x, variant, engine, tile_m)).collect()
}

/// Shares of the arithmetic, per token of a tile, and bandwidth that an H200 reaches with matrix instructions, per mille:
/// conversions from FP8 and nested scales take instructions. Where X lies well, `gemm` serves one token of most formats faster,
/// above all of few rows (INT4 of 6144 x 4096: 6.9 for 9.3 µs).
fn mma_efficiency(format: Format, slab_k: usize) -> (u32, u32) {
    match format.encoding {
        Encoding::E4M3 | Encoding::E5M2 => (40, 740),
        _ if slab_k > 128 => (10, 650),
        Encoding::Codebook(_) => (40, 940),
        _ => (40, 660),
    }
}

fn instance(format: Format, x: DType, variant: Variant, engine: Engine, tile_m: u32) -> Option<Instance> {
    let layout = PackedLayout::new(format, class(variant))?;
    let lane_bytes: usize = layout.codes.iter().map(|p| p.word_bytes * p.words).sum();
    // Staging eight tokens costs as much as streaming a tile of rows: share it among more rows, where registers hold
    // two slabs.
    let row_tiles = if tile_m >= 8 && layout.slab_k <= 128 { 2 } else { 1 };
    let unroll = (BYTES_IN_FLIGHT / lane_bytes / row_tiles).clamp(1, MAX_UNROLL) as u32;
    // Eight tokens get twice the room, so that a warp still works on a few slabs between barriers.
    let room = if tile_m >= 8 { 2 * X_BYTES } else { X_BYTES };
    let x_slabs = (room / (tile_m as usize * engine.x_bytes() as usize * layout.slab_k)).max(8) as u32;
    let slab_k = layout.slab_k;
    Some(Instance {
        format,
        x,
        variant,
        engine,
        tile_m,
        threads: THREADS,
        blocks_per_sm: blocks_per_sm(format, engine, variant, slab_k, tile_m),
        shape: Shape::Gemv { row_tiles: row_tiles as u32, x_slabs, unroll },
        layout,
        efficiency: match engine {
            Engine::Mma => {
                let (arithmetic, bandwidth) = mma_efficiency(format, slab_k);
                // A tile of eight tokens costs the same as one: the rate is per token.
                (arithmetic * tile_m, bandwidth)
            }
            Engine::Fma => (300, 700),
        },
    })
}

/// Blocks that the kernel's registers allow an SM at once: as many as there are without spills (`kernels.lock`), and of
/// those the fastest on an H200. The compiler's schedule jumps with the limit, so that fewer can be faster or slower.
fn blocks_per_sm(format: Format, engine: Engine, variant: Variant, slab_k: usize, tile_m: u32) -> u32 {
    // Minimums, zero points and scales per 16 columns take registers of their own.
    let heavy = has_block_offsets(format) || format.sub_block == 16;
    match (engine, slab_k, tile_m) {
        (Engine::Fma, ..) if format.code_planes == [32] => 2,
        (Engine::Fma, ..=64, _) => 4,
        (Engine::Fma, ..=128, _) => 3,
        (Engine::Fma, ..) => 2,
        (Engine::Mma, ..=128, 8..) => 3,
        (Engine::Mma, ..=64, 1) if heavy && format.code_planes == [4] && variant == Variant::Sm120 => 4,
        (Engine::Mma, ..=64, _) if heavy => 5,
        (Engine::Mma, ..=64, _) => 7,
        (Engine::Mma, ..=128, _) if format.code_planes == [4] => 7,
        (Engine::Mma, ..=128, _) => 5,
        // For Turing and Blackwell the compiler takes a few registers more, for Ampere and Ada with scales per 16 columns.
        (Engine::Mma, _, 1) if matches!(variant, Variant::Sm80 | Variant::Sm89) && format.sub_block == 16 => 3,
        (Engine::Mma, _, 2..) if has_block_offsets(format) && format.sub_block == 16 => 2,
        (Engine::Mma, _, 1) if variant >= Variant::Sm80 && variant < Variant::Sm120 => 4,
        (Engine::Mma, ..) => 3,
    }
}

/// The kernel for `op`: the smallest tile that takes all its tokens.
fn serving(op: &CheckedGemm, info: &DeviceInfo) -> Result<Instance, Unsupported> {
    let variant = kernel::variant(info)?;
    kernel::check_class(op, variant)?;
    let mut all = instances(op.format, op.x.dtype, variant);
    let most = all.last().map_or(0, |i| i.tile_m);
    all.retain(|i| i.tile_m as usize >= op.m);
    all.into_iter().next().ok_or_else(|| Unsupported::new(format!("serves at most {most} tokens, not {}", op.m)))
}

impl KernelFamily for Gemv {
    fn name(&self) -> &'static str {
        "gemv"
    }

    fn supports(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<(), Unsupported> {
        serving(op, info).and_then(|i| kernel::check_shared(&i, info))
    }

    fn candidates(&self, op: &CheckedGemm, info: &DeviceInfo) -> Vec<TileConfig> {
        serving(op, info).iter().map(Instance::config).collect()
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<Arc<dyn Kernel>, HalError> {
        kernel::prepare(self.name(), device, op, plan)
    }
}
