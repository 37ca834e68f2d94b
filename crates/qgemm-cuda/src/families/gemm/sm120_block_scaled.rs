//! The kernel of `gemm` on codes of W and of X with a scale a block, on the block-scaled matrix instructions of consumer Blackwell: MXFP4 by
//! MXFP4, NVFP4 by NVFP4, and MXFP4 or MXFP8 by MXFP8. The instructions scale blocks themselves; factors of tokens and rows act on
//! accumulators.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::float8::E2M1_DOUBLED;
use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_formats::{Encoding, Format, ScaleType, XCode, XFactor, XFormat};
use qgemm_hal::abi::FLAG_X_FACTOR;
use qgemm_hal::{
    CheckedGemm, Dense, GemmOperand, HalError, LaunchPlan, Math, Operands, Schedule, TileConfig, Unsupported, Variant,
    XPlanes,
};

use super::super::kernel_launch::{Params, Places};
use super::super::launch_params::LaunchParams;
use super::super::prelude;
use super::instance::MOST_GRID_Y;
use super::params::{Cut, GemmParams, params};
use crate::source;
use crate::spec::KernelSpec;

const ENTRY: &str = "entry/sm120_gemm_block_scaled.cu";
const THREADS: u32 = 128;
const CTAS_PER_SM: u32 = 4;
/// Tokens of a CTA.
const TILE_M: u32 = 32;
/// K-tiles of activations in shared memory at once; every thread moves one token's k-tile.
const X_K_TILES: u32 = THREADS / TILE_M;
/// Rows of a warp.
const TILE_ROWS: u32 = 16;
const TILE_N: u32 = THREADS / 32 * TILE_ROWS;
/// Words between the sums of neighbouring tokens beside them (`ACC_PITCH`).
const SUM_PADDING: u32 = 4;

/// One kernel.
#[derive(Clone, Debug)]
pub(in crate::families) struct BlockScaledKernel {
    format: Format,
    x: XFormat,
    layout: PackedLayout,
}

/// The kernel for weights of `format` and activations of `x`; `None` where no block-scaled instruction takes both.
pub(in crate::families) fn block_scaled_kernel(
    format: Format,
    x: XFormat,
    variant: Variant,
) -> Option<BlockScaledKernel> {
    if variant != Variant::Sm120 || !are_operands(format, x) {
        return None;
    }
    Some(BlockScaledKernel { format, x, layout: PackedLayout::new(format, FragmentLayout::MmaM16)? })
}

/// Whether an instruction takes values of both: E2M1 with scales of one type for as many columns, or X in E4M3 and W in either, both with
/// powers of two for as many.
fn are_operands(format: Format, x: XFormat) -> bool {
    let (Some(parts), [plane], [scale]) = (x.parts(false, None), format.scale_planes, format.float_scales) else {
        return false;
    };
    let is_e2m1 = matches!(format.encoding, Encoding::Codebook(table) if *table == E2M1_DOUBLED);
    let codes = match parts.code {
        XCode::E2M1 => is_e2m1,
        XCode::E4M3 => (is_e2m1 || format.encoding == Encoding::E4M3) && scale.kind == ScaleType::E8M0,
        XCode::Int8 => false,
    };
    codes && parts.block == Some(plane.span) && parts.scale == Some(scale.kind) && plane.rows == 1
}

impl BlockScaledKernel {
    fn has_bytes(&self) -> bool {
        self.x.parts(false, None).is_some_and(|parts| parts.code == XCode::E4M3)
    }

    /// `sizeof(SharedStorage)` of the kernel, which asserts it: two stages of X, and afterwards the sums in the same place.
    fn shared_bytes(&self) -> u32 {
        // Words of 64 codes, and words between neighbouring tokens beside them (`XTile::PITCH`).
        let words = if self.has_bytes() { 16 } else { 8 };
        let x = TILE_M * (X_K_TILES * words + words + X_K_TILES) * 4;
        let sums = TILE_M * (TILE_N + SUM_PADDING) * 4;
        (2 * x).max(sums).next_multiple_of(16)
    }

    /// Whether the kernel computes `op`.
    ///
    /// # Errors
    /// Why not.
    pub(in crate::families) fn serves(&self, op: &CheckedGemm) -> Result<(), Unsupported> {
        let most = TILE_M as usize * MOST_GRID_Y;
        if op.m > most {
            return Err(Unsupported::new(format!("multiplies codes of FP4 for up to {most} tokens")));
        }
        Ok(())
    }

    pub(in crate::families) fn config(&self) -> TileConfig {
        TileConfig {
            family: "gemm",
            main_loop: "sm120_block_scaled",
            variant: Some(Variant::Sm120),
            math: Math::TensorBlockScaled,
            tile_n: TILE_N,
            tile_m: TILE_M,
            tile_k: self.layout.k_tile as u32,
            threads: THREADS,
            ctas_per_unit: CTAS_PER_SM,
            cluster: 1,
            schedule: Schedule::Grid,
            max_splits: 1,
            warps_n: THREADS / 32,
            k_groups: 1,
            stages: X_K_TILES,
            shared_bytes: self.shared_bytes(),
            x_format: self.x,
            x_prologue: None,
            rounded_weights: None,
            normalizes_x: false,
            // Estimates, of the rate of FP4: an access of X serves one row tile.
            efficiency: (if self.has_bytes() { 200 } else { 300 }, 600),
        }
    }

    pub(in crate::families) fn spec(&self) -> KernelSpec {
        let mut out = String::new();
        for (name, value) in [
            ("QG_VARIANT", Variant::Sm120.number()),
            ("QG_MMA_M8N8K4", 0),
            ("QG_X_E4M3", self.has_bytes().into()),
            ("QG_CODE_PLANES", self.layout.codes.len() as u32),
            ("QG_SCALE_PLANES", self.layout.scales.len() as u32),
        ] {
            prelude::macro_line(&mut out, name, &value.to_string());
        }
        prelude::planes(&mut out, &self.layout);
        for (name, value) in [
            ("QG_TILE_ROWS", self.layout.tile_rows as u32),
            ("QG_K_TILE", self.layout.k_tile as u32),
            ("QG_K_TILE_BYTES", self.layout.k_tile_bytes as u32),
            ("QG_SUB_BLOCK", self.format.sub_block as u32),
            ("QG_TILE_M", TILE_M),
            ("QG_X_K_TILES", X_K_TILES),
            ("QG_THREADS", THREADS),
            ("QG_CTAS_PER_SM", CTAS_PER_SM),
            ("QG_SHARED_BYTES", self.shared_bytes()),
        ] {
            prelude::constant_line(&mut out, name, value);
        }
        KernelSpec {
            name: self.config().kernel_id(self.format).to_string(),
            entry: ENTRY,
            text: source::entry(ENTRY),
            symbol: "qg_sm120_gemm_block_scaled",
            prelude: out,
            arch_specific: true,
        }
    }

    /// Everything of a launch of `plan` but the addresses.
    pub(in crate::families) fn launch(&self, op: &CheckedGemm, planes: &XPlanes, plan: &LaunchPlan) -> Arc<dyn Params> {
        // The kernel reads no element type of X; rows of codes are that many bytes apart.
        let x = Dense { dtype: op.d.dtype, row_stride: planes.codes_row, col_stride: 1, aligned16: true };
        Arc::new(Launch {
            params: params(op, &x, &Cut::of(plan)),
            planes: *planes,
            second_bias: op.bias.filter(|_| op.gated).map_or(0, |dtype| op.out_features * dtype.bytes()) as u64,
            residual_in_d: op.residual_in_d,
        })
    }
}

/// `BlockScaledParams` in `mainloop/sm120/block_scaled_params.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct BlockScaledParams {
    gemm: GemmParams,
    x_scales: u64,
    x_scale_row: u64,
    x_given: u64,
}

/// Everything but the addresses.
#[derive(Debug)]
struct Launch {
    params: GemmParams,
    planes: XPlanes,
    /// Bytes from the gate's bias to the up's, of a gated pair.
    second_bias: u64,
    residual_in_d: bool,
}

impl Params for Launch {
    fn with(&self, operands: &Operands<'_>, places: &Places<'_>) -> Result<LaunchParams, HalError> {
        let mut gemm = self.params;
        gemm.find(operands, places, self.residual_in_d, self.second_bias)?;
        let factors = places.of(operands, GemmOperand::XPlaneFactors)?;
        let mut x_given = 0;
        match self.planes.parts.factor {
            XFactor::None => {}
            XFactor::Given => x_given = factors,
            XFactor::PerToken => {
                gemm.shape.flags |= FLAG_X_FACTOR;
                gemm.at.x_factor = factors;
            }
        }
        let x_scales = places.of(operands, GemmOperand::XScales)?;
        Ok(LaunchParams::of(&BlockScaledParams { gemm, x_scales, x_scale_row: self.planes.scales_row, x_given }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_formats_are_those_of_the_instructions() {
        let pairs = Format::all().flat_map(|format| XFormat::ALL.into_iter().map(move |x| (format, x)));
        let served = pairs.filter(|&(format, x)| block_scaled_kernel(format, x, Variant::Sm120).is_some());
        let names: Vec<_> = served.map(|(format, x)| (format.name, x.name())).collect();
        assert_eq!(names, [("mxfp4", "mxfp8"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp8"), ("nvfp4", "nvfp4")]);
    }
}
