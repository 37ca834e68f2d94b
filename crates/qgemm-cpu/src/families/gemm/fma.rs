//! `gemm`: any number of tokens in f32. A panel of tokens
//! is converted once and shared. Each thread decodes a few columns
//! of its rows of W at a time, and multiplies them
//! with the whole panel while they are in the L1 cache.

use std::ops::Range;

use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, Family, HalError, LaunchPlan, LaunchSequence, Math, Name, TileConfig, Unsupported,
};

use super::share::MainLoop;
use super::{CpuGemm, Traits, check_supported, configs};
use crate::arena;
use crate::job::Job;
use crate::simd::{BLOCK_ROWS, LANES, TILES};
use crate::source_hash::SOURCE_HASH;

/// Columns that are decoded at a time. A block of rows
/// takes 16 KiB. K-tiles are multiples of it.
const STEP: usize = 64;

/// Tokens of a panel. Enough that decoding a weight costs little
/// beside its multiply-adds; few enough that the accumulators of a block
/// of rows stay in the L1 cache. The smaller panel suits
/// small caches, which measuring finds out.
const PANEL_TOKENS: [usize; 2] = [128, 32];

/// The family `gemm`.
pub static GEMM: GemmFamily = GemmFamily;

/// Any number of tokens. Few tokens are bound by reading and
/// decoding weights, many by multiply-adds.
#[derive(Debug)]
pub struct GemmFamily;

impl Family<CheckedGemm> for GemmFamily {
    fn name(&self) -> &'static str {
        "gemm"
    }

    fn configs(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
        check_supported(op)?;
        let of = Traits {
            family: "gemm",
            main_loop: Name::new("simd16_fma"),
            math: Math::FmaF32,
            x_format: op.plain_x()?.dtype.into(),
            panels: PANEL_TOKENS,
        };
        Ok(configs(of, op, info))
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<LaunchSequence, HalError> {
        CpuGemm::prepare(device, op, plan, None)
    }

    fn source_hash(&self, _: &CheckedGemm, _: &TileConfig) -> u64 {
        SOURCE_HASH
    }
}

/// The family's main loop.
#[derive(Debug)]
pub(super) struct Fma {
    /// Columns of a row of X.
    pub columns: usize,
    /// Scales and minimums of a k-tile.
    pub scales: usize,
}

impl MainLoop for Fma {
    fn x_floats(&self, tokens: usize) -> usize {
        tokens * self.columns
    }

    fn tile_floats(&self, _tokens: usize) -> usize {
        BLOCK_ROWS * STEP + TILES * self.scales
    }

    fn load(&self, job: &Job<'_>, tokens: Range<usize>, shared: bool, x: &mut [f32]) {
        job.load_tokens(tokens, shared, x);
    }

    fn multiply(
        &self,
        job: &Job<'_>,
        x: &[f32],
        tokens: usize,
        first_row: usize,
        part: Range<usize>,
        sums: &mut [f32],
    ) {
        let (weight, scales) = (job.weight(), self.scales);
        arena::with_tile(self.tile_floats(tokens), |scratch| {
            let (w, scales_of_tiles) = scratch.split_at_mut(BLOCK_ROWS * STEP);
            let tiles = BLOCK_ROWS.min(job.op().stored_rows - first_row).div_ceil(LANES);
            // Tiles past the last are zero, and their
            // accumulators are never read.
            w[tiles * LANES * STEP..].fill(0.0);
            for k_tile in part {
                let mut k_tiles = [None; TILES];
                let mut rest = &mut *scales_of_tiles;
                for (i, to) in k_tiles.iter_mut().enumerate().take(tiles) {
                    let (scratch, after) = rest.split_at_mut(scales);
                    rest = after;
                    let (scales, mins) = scratch.split_at_mut(scales / 2);
                    *to = Some(weight.k_tile(job.simd(), first_row / LANES + i, k_tile, scales, mins));
                }
                let columns = weight.layout().k_tile;
                for first in (0..columns).step_by(STEP) {
                    for (k_tile, out) in k_tiles.iter().flatten().zip(w.chunks_exact_mut(STEP * LANES)) {
                        job.simd().decode(k_tile, first, STEP, out);
                    }
                    multiply(job, w, &x[k_tile * columns + first..], sums);
                }
            }
        });
    }
}

/// Adds the products of a decoded block with
/// every token of the panel.
fn multiply(job: &Job<'_>, w: &[f32], x: &[f32], sums: &mut [f32]) {
    let (stride, most) = (job.row_columns(), job.simd().tokens());
    for (i, sums) in sums.chunks_mut(most * BLOCK_ROWS).enumerate() {
        job.simd().multiply(sums.len() / BLOCK_ROWS, w, &x[i * most * stride..], stride, STEP, sums);
    }
}
