//! `gemm_int8`: any number of tokens, quantized to eight bits, in panels. A panel is quantized once and shared; each thread multiplies
//! its packed rows of W with the whole panel, some slabs at a time while they are in the nearest cache.

use std::ops::Range;
use std::sync::Arc;

use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, HalError, Kernel, KernelFamily, LaunchPlan, Math, TileConfig, Unsupported,
    XRounding,
};

use super::{CpuKernel, candidates, check_supported};
use crate::arena;
use crate::job::Job;
use crate::simd::{BLOCK_ROWS, LANES, Operands, Quantization, Row, TILES};

/// Columns of a step, at least a slab: scales are unpacked and kernels called a step at a time.
const STEP: usize = 256;

/// The same where tokens are so few that more of their columns stay in the nearest cache: a step costs about as much as the
/// products of 256 columns.
const LONG_STEP: usize = 1024;

/// Columns that are brought from memory ahead, of all tiles that are worked on together: some 18 KB of four-bit codes. From 512
/// to 4096 make little difference; with 256 a token takes half as long again.
const COLUMNS_AHEAD: usize = 2048;

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
    arena::with_activations(m.min(panel_tokens) * row.words, |x| {
        for first in (0..m).step_by(panel_tokens) {
            let tokens = first..m.min(first + panel_tokens);
            let x: &mut [u32] = bytemuck::cast_slice_mut(&mut x[..tokens.len() * row.words]);
            job.quantize_tokens(how, tokens.clone(), x);
            let x = &*x;
            job.for_each_block(tokens.len(), |first_row| block(job, how, row, x, tokens.clone(), first_row));
        }
    });
}

/// Computes the block of rows from `first_row` on for the panel `tokens`, which `x` holds.
fn block(job: &Job<'_>, how: &Quantization, row: Row, x: &[u32], tokens: Range<usize>, first_row: usize) {
    let (weight, simd) = (job.weight(), job.simd());
    let layout = weight.layout();
    let few = tokens.len() <= simd.quantized_tokens();
    let step_slabs = (if few { LONG_STEP } else { STEP } / layout.slab_k).max(1);
    let subs = LANES * step_slabs * layout.slab_k / how.sub_block;
    let min_subs = if how.offset.is_some() { 0 } else { subs };
    arena::with_tile(subs + min_subs + tokens.len() * BLOCK_ROWS, |scratch| {
        let (scales, rest) = scratch.split_at_mut(subs);
        let (mins, sums) = rest.split_at_mut(min_subs);
        sums.fill(0.0);
        let tiles = BLOCK_ROWS.min(job.op().n - first_row).div_ceil(LANES);
        // W is read once for so few tokens, from one end to the other.
        let at_once = if few { 1 } else { TILES };
        let slabs_ahead = (COLUMNS_AHEAD / layout.slab_k / at_once).max(1);
        for first_tile in (0..tiles).step_by(at_once) {
            for slab in (0..weight.k_slabs()).step_by(step_slabs) {
                let count = step_slabs.min(weight.k_slabs() - slab);
                for tile in first_tile..tiles.min(first_tile + at_once) {
                    let (slabs, ahead) = weight.slabs(first_row / LANES + tile, [slab, count, slabs_ahead]);
                    weight.unpack_scales(simd, slabs, scales, mins);
                    let first = slab * layout.slab_k;
                    let at = Operands { how, layout, slabs, ahead, scales, mins, x, row, first };
                    simd.multiply_codes(tokens.len(), &at, &mut sums[tile * LANES..]);
                }
            }
        }
        // SAFETY: blocks share no rows, so only this thread stores these.
        unsafe { job.store(tokens, first_row, sums) };
    });
}
