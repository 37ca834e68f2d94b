//! `gemv`: a few tokens. Each thread streams through its rows of W once; a chunk of eight rows is decoded into
//! the nearest cache and multiplied with every token while it is there.

use std::ops::Range;
use std::sync::Arc;

use qgemm_hal::{CheckedGemm, Device, DeviceInfo, HalError, Kernel, KernelFamily, LaunchPlan, TileConfig, Unsupported};

use super::{CpuKernel, check_supported, config};
use crate::arena;
use crate::job::{CHUNK, Job};
use crate::simd::{LANES, ROWS, Rows, TOKEN_SUMS, sum};

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
            arena::with_tile(ROWS * CHUNK + tokens * TOKEN_SUMS, |scratch| {
                for first in rows.clone().step_by(ROWS) {
                    group(job, x, first..rows.end.min(first + ROWS), scratch);
                }
            });
        });
    });
}

/// Computes at most [`ROWS`] rows for all tokens.
fn group(job: &Job<'_>, x: &[f32], rows: Range<usize>, scratch: &mut [f32]) {
    let (w, sums) = scratch.split_at_mut(ROWS * CHUNK);
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
    for (token, sums) in sums.chunks_exact(TOKEN_SUMS).enumerate() {
        for (row, lanes) in rows.clone().zip(sums.as_chunks::<LANES>().0) {
            // SAFETY: tiles, and the groups in them, share no rows, so only this thread stores these.
            unsafe { job.store(token, row, sum(lanes)) };
        }
    }
}
