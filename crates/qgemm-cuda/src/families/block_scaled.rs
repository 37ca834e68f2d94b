//! `gemm_block_scaled`: FP4 weights times FP4 activations on the block-scaled matrix instructions of consumer Blackwell.
//! No family schedules it, because activations are never FP4 in the API; it is launched with
//! [`launch_spec`](crate::launch_spec).

use bytemuck::{Pod, Zeroable};
use qgemm_formats::float8::E2M1_DOUBLED;
use qgemm_formats::prepack::{PackClass, PackedLayout};
use qgemm_formats::{Encoding, Format, ScaleType};
use qgemm_hal::abi::{CudaGemmShape, GemmPointers, TileSchedule};
use qgemm_hal::{GemmSpec, Geometry, KernelId, Name, Spec, Variant};

use super::prelude;
use crate::source;
use crate::spec::KernelSpec;

const THREADS: u32 = 128;
const BLOCKS_PER_SM: u32 = 4;
/// Tokens of a block.
const TILE_M: u32 = 32;
/// Slabs of activations in shared memory at once; every thread moves one token's slab.
const X_SLABS: u32 = THREADS / TILE_M;
/// Rows of a warp.
const TILE_ROWS: u32 = 16;
const TILE_N: u32 = THREADS / 32 * TILE_ROWS;
/// Words of 64 codes, and words between neighbouring tokens beside them (`Fp4Tile::PITCH`).
const SLAB_WORDS: u32 = 8;
const X_PADDING: u32 = 8;
/// Words between the sums of neighbouring tokens beside them (`SUM_PITCH`).
const SUM_PADDING: u32 = 4;

/// The kernel's parameter (`BlockScaledParams` in `mainloop/fp4_slab.cuh`): `D[m, n] = alpha · X · Wᵀ · row_scale + …`
/// as for every product, with X in the weights' own format.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
pub struct BlockScaledParams {
    /// Shape, flags and scalars; `splits` is 1 and `x_dtype` not read. A scale of the whole of X goes into `alpha`, that
    /// of W is its row scale. [`FLAG_X_ALIGNED16`](qgemm_hal::abi::FLAG_X_ALIGNED16) says that every row of codes begins
    /// at a multiple of 16 bytes.
    pub shape: CudaGemmShape,
    /// Addresses. W is in layout class T. `x` is the codes of X, `[m][⌈k / 2⌉]` bytes with the lower column in the low
    /// nibble, and `x_row` the **bytes** from one row to the next; `x_col` is not read.
    pub at: GemmPointers,
    /// Not read: the grid is one block a tile.
    pub tiles: TileSchedule,
    /// Address of the scales of X, `[m][⌈k / block⌉]` bytes: UE8M0 for blocks of 32, UE4M3 for blocks of 16.
    pub x_scales: u64,
    /// Bytes from one row of scales to the next.
    pub x_scale_row: u64,
}

/// The kernel for weights and activations in `format`; `None` for formats that no block-scaled instruction takes.
pub fn block_scaled_spec(format: Format) -> Option<KernelSpec> {
    if !is_instruction_operand(format) {
        return None;
    }
    let layout = PackedLayout::new(format, PackClass::T)?;
    let mut prelude = String::new();
    for (name, value) in [
        ("QG_VARIANT", Variant::Sm120.number()),
        ("QG_MMA_M8N8K4", 0),
        ("QG_CODE_PLANES", layout.codes.len() as u32),
        ("QG_SCALE_PLANES", layout.scales.len() as u32),
    ] {
        prelude::macro_line(&mut prelude, name, &value.to_string());
    }
    prelude::planes(&mut prelude, &layout);
    for (name, value) in [
        ("QG_TILE_ROWS", layout.tile_rows as u32),
        ("QG_K_TILE", layout.slab_k as u32),
        ("QG_K_TILE_BYTES", layout.slab_bytes as u32),
        ("QG_SUB_BLOCK", format.sub_block as u32),
        ("QG_TILE_M", TILE_M),
        ("QG_X_K_TILES", X_SLABS),
        ("QG_THREADS", THREADS),
        ("QG_CTAS_PER_SM", BLOCKS_PER_SM),
        ("QG_SHARED_BYTES", shared_bytes()),
    ] {
        prelude::constant_line(&mut prelude, name, value);
    }
    Some(KernelSpec {
        name: id(format, &layout)?.to_string(),
        entry: "entry/sm120_gemm_block_scaled.cu",
        text: source::entry("entry/sm120_gemm_block_scaled.cu"),
        symbol: "qg_sm120_gemm_block_scaled",
        prelude,
        arch_specific: true,
    })
}

/// What the kernel is; `None` where activations have no format of the name of the weights'.
fn id(format: Format, layout: &PackedLayout) -> Option<KernelId> {
    let spec = GemmSpec {
        main_loop: Name::new("sm120_block_scaled"),
        w: format,
        x: format.name.parse().ok()?,
        n: TILE_N,
        m: TILE_M,
        k: layout.slab_k as u32,
        threads: THREADS,
        warps_n: THREADS / 32,
        k_groups: 1,
        ctas: BLOCKS_PER_SM,
        stages: X_SLABS,
    };
    Some(KernelId::new("gemm_block_scaled", Some(Variant::Sm120), Spec::Gemm(spec)))
}

/// The launch of the kernel for `m` tokens and `n` output features: tiles of 64 features along x, of 32 tokens along y.
pub fn block_scaled_geometry(m: u32, n: u32) -> Geometry {
    Geometry { grid: [n.div_ceil(TILE_N), m.div_ceil(TILE_M), 1], threads: THREADS, shared_bytes: shared_bytes() }
}

/// Whether values are E2M1 numbers with one E8M0 scale for 32, or one E4M3 scale for 16.
fn is_instruction_operand(format: Format) -> bool {
    let scales: Vec<_> = format.float_scales.iter().map(|s| s.kind).collect();
    let [plane] = format.scale_planes else { return false };
    let codes_are_e2m1 = matches!(format.encoding, Encoding::Codebook(table) if *table == E2M1_DOUBLED);
    let scaled = matches!((plane.span, scales.as_slice()), (32, [ScaleType::E8M0]) | (16, [ScaleType::E4M3]));
    codes_are_e2m1 && scaled && plane.rows == 1
}

/// `sizeof(SharedStorage)` of the kernel, which asserts it: two stages of X, and afterwards the sums in the same place.
fn shared_bytes() -> u32 {
    let x = TILE_M * (X_SLABS * SLAB_WORDS + X_PADDING + X_SLABS) * 4;
    let sums = TILE_M * (TILE_N + SUM_PADDING) * 4;
    (2 * x).max(sums).next_multiple_of(16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jit;
    use crate::jit::tests::nvrtc_or_skip;

    #[test]
    fn two_formats_are_operands_of_the_instructions() {
        let names: Vec<_> = Format::all().filter(|f| block_scaled_spec(*f).is_some()).map(|f| f.name).collect();
        assert_eq!(names, ["mxfp4", "nvfp4"]);
    }

    #[test]
    fn tiles_cover_the_output() {
        assert_eq!(block_scaled_geometry(1, 1).grid, [1, 1, 1]);
        assert_eq!(block_scaled_geometry(33, 65).grid, [2, 2, 1]);
        assert_eq!(block_scaled_geometry(64, 128).grid, [2, 2, 1]);
    }

    #[test]
    fn kernels_compile_for_their_chip_without_spills() {
        let test = "kernels_compile_for_their_chip_without_spills";
        let Some(nvrtc) = nvrtc_or_skip(test) else { return };
        if !nvrtc.supported().contains(&120) {
            eprintln!("skipped: {test}: NVRTC {} does not know sm_120", nvrtc.version());
            return;
        }
        for spec in Format::all().filter_map(block_scaled_spec) {
            let target = jit::target_of(&spec, "sm_120".parse().unwrap());
            let artifact = jit::compile(nvrtc, &spec, target).unwrap();
            let resources = artifact.resources.unwrap();
            assert!(target.to_string() == "sm_120a" && resources.spill_bytes == 0, "{}: {resources:?}", spec.name);
        }
    }
}
