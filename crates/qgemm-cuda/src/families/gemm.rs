//! `gemm`: any number of tokens. Each warp owns rows of W; activations pass through shared memory.

use std::sync::Arc;

use qgemm_formats::prepack::PackedLayout;
use qgemm_formats::{DType, Format};
use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, HalError, Kernel, KernelFamily, LaunchPlan, TileConfig, Unsupported, Variant,
};

use super::instance::{Engine, Instance, Shape, class, has_block_offsets};
use super::kernel;

/// The family.
#[derive(Debug)]
pub(super) struct Gemm;

const THREADS: u32 = 128;

/// (tokens, row tiles a warp) of the kernels for these types: the largest that keep all sums in registers
/// (`kernels.lock` shows no spills).
fn tiles(format: Format, engine: Engine, variant: Variant, slab_k: usize) -> &'static [(u32, u32)] {
    match engine {
        // All columns of a slab are unrolled for all tokens: with 256 columns, 16 tokens take the compiler 2 s.
        Engine::Fma if slab_k > 128 => &[(8, 1)],
        Engine::Fma => &[(16, 1)],
        Engine::Mma if variant < Variant::Sm80 => &[(16, 1), (32, 1)],
        // Long slabs and minimums hold scales in registers that a larger tile would need.
        Engine::Mma if has_block_offsets(format) || slab_k > 64 => &[(16, 1), (32, 2)],
        // For Blackwell the compiler takes a few registers more, which scales have taken already.
        Engine::Mma if variant >= Variant::Sm120 && has_row_scales(format) => &[(16, 1), (32, 2), (64, 1)],
        Engine::Mma => &[(16, 1), (32, 2), (64, 2)],
    }
}

/// Whether blocks have scales that differ from row to row.
fn has_row_scales(format: Format) -> bool {
    format.scale_planes.iter().any(|plane| plane.rows == 1)
}

/// Every kernel of the family for these types.
pub(super) fn instances(format: Format, x: DType, variant: Variant) -> Vec<Instance> {
    let engine = Engine::of(format, x, variant);
    let Some(layout) = PackedLayout::new(format, class(variant)) else { return Vec::new() };
    tiles(format, engine, variant, layout.slab_k)
        .iter()
        .map(|&(tile_m, row_tiles)| Instance {
            format,
            x,
            variant,
            engine,
            tile_m,
            threads: THREADS,
            blocks_per_sm: 2,
            shape: Shape::Gemm { row_tiles },
            layout: layout.clone(),
            efficiency: match engine {
                Engine::Mma => (60 + 2 * tile_m, 450),
                Engine::Fma => (350, 450),
            },
        })
        .collect()
}

/// Most blocks along the grid's y axis (CUDA C Programming Guide, "Technical Specifications per Compute Capability").
const MAX_GRID_Y: usize = 65_535;

/// The kernels for `op`.
fn serving(op: &CheckedGemm, info: &DeviceInfo) -> Result<Vec<Instance>, Unsupported> {
    let variant = kernel::variant(info)?;
    kernel::check_class(op, variant)?;
    let mut all = instances(op.format, op.x.dtype, variant);
    let most = all.iter().map(|i| i.tile_m as usize * MAX_GRID_Y).max().unwrap_or(0);
    all.retain(|i| op.m.div_ceil(i.tile_m as usize) <= MAX_GRID_Y);
    if all.is_empty() {
        return Err(Unsupported::new(format!("serves at most {most} tokens, not {}", op.m)));
    }
    all.retain(|i| kernel::check_shared(i, info).is_ok());
    if all.is_empty() {
        return Err(Unsupported::new("needs more shared memory than the device has"));
    }
    Ok(all)
}

impl KernelFamily for Gemm {
    fn name(&self) -> &'static str {
        "gemm"
    }

    fn supports(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<(), Unsupported> {
        serving(op, info).map(drop)
    }

    fn candidates(&self, op: &CheckedGemm, info: &DeviceInfo) -> Vec<TileConfig> {
        serving(op, info).iter().flatten().map(Instance::config).collect()
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<Arc<dyn Kernel>, HalError> {
        kernel::prepare(self.name(), device, op, plan)
    }
}
