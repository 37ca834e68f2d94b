//! `gemm`: any number of tokens, in panels. A panel of tokens is converted once and shared; each thread decodes
//! its rows of W chunk by chunk and keeps the partial sums of its rows with the whole panel.

use std::ops::Range;
use std::sync::Arc;

use qgemm_hal::{CheckedGemm, Device, DeviceInfo, HalError, Kernel, KernelFamily, LaunchPlan, TileConfig, Unsupported};

use super::{CpuKernel, check_supported, config};
use crate::arena;
use crate::job::{CHUNK, Job, tokens_from};
use crate::simd::{LANES, ROWS, Rows, TOKEN_SUMS};

/// Rows of a task: their decoded chunk and the partial sums fit a core's own cache.
const TILE_ROWS: usize = 32;
/// Tokens of a panel: enough that decoding a weight costs little beside its multiply-adds.
const PANEL_TOKENS: usize = 128;
/// Tokens that the vector kernel takes together.
const TOKENS: usize = 4;

/// The family `gemm`.
pub static GEMM: GemmFamily = GemmFamily;

/// Any number of tokens: bound by multiply-adds.
#[derive(Debug)]
pub struct GemmFamily;

impl KernelFamily for GemmFamily {
    fn name(&self) -> &'static str {
        "gemm"
    }

    fn supports(&self, op: &CheckedGemm, _: &DeviceInfo) -> Result<(), Unsupported> {
        check_supported(op)
    }

    fn candidates(&self, op: &CheckedGemm, info: &DeviceInfo) -> Vec<TileConfig> {
        vec![config("gemm", op, info, [TILE_ROWS, op.m.clamp(1, PANEL_TOKENS)])]
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<Arc<dyn Kernel>, HalError> {
        CpuKernel::prepare(device, op, &plan.config, run)
    }
}

fn run(job: &Job<'_>, [tile_rows, tile_tokens]: [usize; 2]) {
    let m = job.op().m;
    arena::with_activations(m.min(tile_tokens) * job.row_floats(), |x| {
        for first in (0..m).step_by(tile_tokens) {
            let tokens = first..m.min(first + tile_tokens);
            job.load_tokens(tokens.clone(), x);
            let x = &*x;
            job.for_each_tile(tile_rows, tokens.len(), |rows| tile(job, x, tokens.clone(), rows));
        }
    });
}

/// Computes `rows` for the panel `tokens`, which `x` holds.
fn tile(job: &Job<'_>, x: &[f32], tokens: Range<usize>, rows: Range<usize>) {
    let groups = rows.len().div_ceil(ROWS);
    let (decoded, panel_sums) = (groups * ROWS * CHUNK, tokens.len() * TOKEN_SUMS);
    arena::with_tile(decoded + groups * panel_sums, |scratch| {
        let (w, sums) = scratch.split_at_mut(decoded);
        sums.fill(0.0);
        for columns in job.chunks() {
            // Rows past the last one hold old values, whose sums nobody reads.
            job.decode(rows.clone(), columns.clone(), w);
            for (w, sums) in w.chunks_exact(ROWS * CHUNK).zip(sums.chunks_exact_mut(panel_sums)) {
                multiply(job, w, x, columns.clone(), sums);
            }
        }
        // SAFETY: tiles share no rows, a gated pair's no groups of sixteen, so only this thread stores these.
        unsafe {
            if job.op().gated {
                for (pair, sums) in sums.chunks_exact(2 * panel_sums).enumerate() {
                    let (gate, up) = sums.split_at(panel_sums);
                    job.store_gated(tokens.clone(), rows.start + pair * 2 * ROWS, gate, up);
                }
            } else {
                for (group, sums) in sums.chunks_exact(panel_sums).enumerate() {
                    job.store(tokens.clone(), (rows.start + group * ROWS)..rows.end, sums);
                }
            }
        }
    });
}

/// Adds the products of a group of [`ROWS`] decoded rows with every token of the panel over `columns`.
fn multiply(job: &Job<'_>, w: &[f32], x: &[f32], columns: Range<usize>, sums: &mut [f32]) {
    let tokens = sums.len() / TOKEN_SUMS;
    let floats = job.row_floats();
    let fours = tokens - tokens % TOKENS;
    for token in (0..fours).step_by(TOKENS) {
        let x = tokens_from(x, floats, token, columns.start);
        for half in [0, ROWS / 2] {
            let w = Rows { values: &w[half * CHUNK..], stride: CHUNK };
            let sums = &mut sums[token * TOKEN_SUMS + half * LANES..];
            job.simd().rows4_tokens4(w, x, columns.len(), sums);
        }
    }
    for token in fours..tokens {
        let x = tokens_from(x, floats, token, columns.start);
        let w = Rows { values: w, stride: CHUNK };
        job.simd().rows8_tokens1(w, x.values, columns.len(), &mut sums[token * TOKEN_SUMS..]);
    }
}
