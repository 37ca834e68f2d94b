//! `gemm_int8`: any number of tokens, quantized to eight bits, in panels. A panel is quantized once and shared; each thread unpacks
//! its rows of W to bytes, a slab at a time, and multiplies them with the whole panel while they are in the nearest cache.

use std::ops::Range;
use std::sync::Arc;

use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, HalError, Kernel, KernelFamily, LaunchPlan, Math, TileConfig, Unsupported,
    XRounding,
};

use super::{CpuKernel, candidates, check_supported};
use crate::arena;
use crate::job::Job;
use crate::simd::{BLOCK_ROWS, LANES, Operands, Quantization, Row, TILES, Unpacked};

/// Columns that are unpacked at a time, where slabs are shorter: a block of rows takes 16 KiB.
const STEP: usize = 256;

/// So many tokens are multiplied with one tile after another, which read W from one end to the other; more, with a block of tiles
/// at a time, which load X less often.
const FEW_TOKENS: usize = 3;
/// Steps that are brought from memory ahead, of all tiles that are worked on together: some 9 KB. Without any, four bits a weight
/// took 1.0 ms instead of 0.4 (4096 x 4096, Zen 5, one token).
const STEPS_AHEAD: usize = 4;

/// The family `gemm_int8`.
pub static GEMM_INT8: GemmInt8Family = GemmInt8Family;

/// Any number of tokens, where they may be quantized and weights are integers: few are bound by reading weights.
#[derive(Debug)]
pub struct GemmInt8Family;

impl KernelFamily for GemmInt8Family {
    fn name(&self) -> &'static str {
        "gemm_int8"
    }

    fn supports(&self, op: &CheckedGemm, _: &DeviceInfo) -> Result<(), Unsupported> {
        check_supported(op)?;
        if op.x_rounding != XRounding::Int8 {
            return Err(Unsupported::new("quantizes activations, which the problem does not allow"));
        }
        quantization(op).map(|_| ())
    }

    fn candidates(&self, op: &CheckedGemm, info: &DeviceInfo) -> Vec<TileConfig> {
        candidates(self.name(), Math::DotI8, op, info)
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<Arc<dyn Kernel>, HalError> {
        let how = quantization(op).map_err(|unsupported| HalError::KernelUnavailable {
            kernel: op.kernel_name(self.name()),
            target: device.info().arch.clone(),
            why: unsupported.why,
        })?;
        CpuKernel::prepare(device, op, &plan.config, Some(how))
    }
}

fn quantization(op: &CheckedGemm) -> Result<Quantization, Unsupported> {
    Quantization::new(op.format).ok_or_else(|| {
        Unsupported::new(format!("multiplies integers of eight bits, which {} does not hold", op.format))
    })
}

pub(super) fn run(job: &Job<'_>, how: &Quantization, panel_tokens: usize) {
    let m = job.op().m;
    let row = how.row(job.row_columns());
    arena::with_activations(m.min(panel_tokens) * row.floats, |x| {
        for first in (0..m).step_by(panel_tokens) {
            let tokens = first..m.min(first + panel_tokens);
            let x: &mut [u32] = bytemuck::cast_slice_mut(&mut x[..tokens.len() * row.floats]);
            job.quantize_tokens(how, tokens.clone(), x);
            let x = &*x;
            job.for_each_block(tokens.len(), |first_row| block(job, how, row, x, tokens.clone(), first_row));
        }
    });
}

/// Computes the block of rows from `first_row` on for the panel `tokens`, which `x` holds.
fn block(job: &Job<'_>, how: &Quantization, row: Row, x: &[u32], tokens: Range<usize>, first_row: usize) {
    let (weight, simd) = (job.weight(), job.simd());
    let slab_k = weight.layout().slab_k;
    let step_slabs = (STEP / slab_k).max(1);
    let step = step_slabs * slab_k;
    let (codes, subs) = (BLOCK_ROWS * step / 4, BLOCK_ROWS * step / how.sub_block);
    arena::with_tile(codes + 2 * subs + tokens.len() * BLOCK_ROWS, |scratch| {
        let (w, rest) = scratch.split_at_mut(codes);
        let (scales, rest) = rest.split_at_mut(subs);
        let (mins, sums) = rest.split_at_mut(subs);
        let w: &mut [u32] = bytemuck::cast_slice_mut(w);
        sums.fill(0.0);
        // Tiles past the last hold what was there before, and nobody reads their sums.
        let tiles = BLOCK_ROWS.min(job.op().n - first_row).div_ceil(LANES);
        let at_once = if tokens.len() <= FEW_TOKENS { 1 } else { TILES };
        for first_tile in (0..tiles).step_by(at_once) {
            let group = at_once.min(tiles - first_tile);
            for slab in (0..weight.k_slabs()).step_by(step_slabs) {
                let count = step_slabs.min(weight.k_slabs() - slab);
                let columns = count * slab_k;
                let (codes, subs) = (LANES * columns / 4, LANES * columns / how.sub_block);
                let parts =
                    scales.chunks_exact_mut(subs).zip(mins.chunks_exact_mut(subs)).zip(w.chunks_exact_mut(codes));
                for (tile, ((scales, mins), codes)) in parts.take(group).enumerate() {
                    let tile = first_row / LANES + first_tile + tile;
                    let place = [slab, count, step_slabs * STEPS_AHEAD / at_once];
                    weight.unpack(simd, tile, place, Unpacked { codes, scales, mins });
                }
                let most = simd.quantized_tokens();
                for (i, sums) in sums.chunks_mut(most * BLOCK_ROWS).enumerate() {
                    let x = &x[i * most * row.floats..];
                    let at = Operands { how, tiles: at_once, w, scales, mins, columns, x, row, first: slab * slab_k };
                    simd.multiply_bytes(sums.len() / BLOCK_ROWS, &at, &mut sums[first_tile * LANES..]);
                }
            }
        }
        // SAFETY: blocks share no rows, so only this thread stores these.
        unsafe { job.store(tokens, first_row, sums) };
    });
}
