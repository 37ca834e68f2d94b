//! `gemv`: a few tokens. Each thread streams through its rows of W once; a chunk of eight rows is decoded into
//! the nearest cache and multiplied with every token while it is there.

use std::ops::Range;
use std::sync::Arc;

use qgemm_hal::{CheckedGemm, Device, DeviceInfo, HalError, Kernel, KernelFamily, LaunchPlan, TileConfig, Unsupported};

use super::{CpuKernel, check_supported, config};
use crate::arena;
use crate::job::{CHUNK, Job};
use crate::simd::{ROWS, Rows, TOKEN_SUMS};

/// Most tokens, whose partial sums stay in the nearest cache.
const MAX_TOKENS: usize = 4;
/// Rows of a task: long enough to be worth a thread's while, short enough to share evenly.
const TILE_ROWS: usize = 16;

/// The family `gemv`.
pub static GEMV: GemvFamily = GemvFamily;

/// At most four tokens: bound by decoding weights and reading them.
#[derive(Debug)]
pub struct GemvFamily;

impl KernelFamily for GemvFamily {
    fn name(&self) -> &'static str {
        "gemv"
    }

    fn supports(&self, op: &CheckedGemm, _: &DeviceInfo) -> Result<(), Unsupported> {
        if op.m > MAX_TOKENS {
            return Err(Unsupported::new(format!("serves at most {MAX_TOKENS} tokens")));
        }
        check_supported(op)
    }

    fn candidates(&self, op: &CheckedGemm, info: &DeviceInfo) -> Vec<TileConfig> {
        vec![config("gemv", op, info, [TILE_ROWS, op.m.clamp(1, MAX_TOKENS)])]
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<Arc<dyn Kernel>, HalError> {
        CpuKernel::prepare(device, op, &plan.config, run)
    }
}

fn run(job: &Job<'_>, [tile_rows, _]: [usize; 2]) {
    let tokens = job.op().m;
    arena::with_activations(tokens * job.row_floats(), |x| {
        job.load_tokens(0..tokens, x);
        let x = &*x;
        job.for_each_tile(tile_rows, tokens, |rows| {
            arena::with_tile(ROWS * CHUNK + 2 * tokens * TOKEN_SUMS, |scratch| {
                let (w, sums) = scratch.split_at_mut(ROWS * CHUNK);
                let (sums, up) = sums.split_at_mut(tokens * TOKEN_SUMS);
                // SAFETY: tiles share no rows, a gated pair's no groups of sixteen, and so do the groups in them: only
                // this thread stores these.
                unsafe {
                    if job.op().gated {
                        for first in rows.clone().step_by(2 * ROWS) {
                            group(job, x, first..first + ROWS, w, sums);
                            group(job, x, first + ROWS..first + 2 * ROWS, w, up);
                            job.store_gated(0..tokens, first, sums, up);
                        }
                    } else {
                        for first in rows.clone().step_by(ROWS) {
                            let rows = first..rows.end.min(first + ROWS);
                            group(job, x, rows.clone(), w, sums);
                            job.store(0..tokens, rows, sums);
                        }
                    }
                }
            });
        });
    });
}

/// Computes the sums of at most [`ROWS`] rows for all tokens; `w` holds a decoded chunk of them.
fn group(job: &Job<'_>, x: &[f32], rows: Range<usize>, w: &mut [f32], sums: &mut [f32]) {
    sums.fill(0.0);
    for columns in job.chunks() {
        // Rows past the last one hold old values, whose sums nobody reads.
        job.decode(rows.clone(), columns.clone(), w);
        let w = Rows { values: w, stride: CHUNK };
        for (token, sums) in sums.chunks_exact_mut(TOKEN_SUMS).enumerate() {
            let x = &x[token * job.row_floats() + columns.start..];
            job.simd().rows8_tokens1(w, x, columns.len(), sums);
        }
    }
}
