//! Families of `merge_attention`: a single one. A thread merges whole
//! rows: heads of tokens.

use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::{
    CheckedMergeAttention, Dense, Device, DeviceId, DeviceInfo, Families, Family, Geometry, HalError, HostMemory,
    HostStream, Kernel, LaunchSequence, LaunchStep, MergeAttentionConfig, MergeAttentionOperand, MergeAttentionPlan,
    Operand, Operands, Operation, Stream, Unsupported,
};
use rayon::prelude::*;

use crate::arena;
use crate::operand::{Output, OutputBatch, absent, host_bytes, read};
use crate::pool::{Pool, Scratch};
use crate::processor::Processor;
use crate::simd::Simd;
use crate::source_hash::SOURCE_HASH;

/// Read elements below which only the calling thread works, because
/// waking others takes longer.
const SERIAL_ELEMENTS: usize = 1 << 15;

/// Families of the CPU.
pub const FAMILIES: Families<CheckedMergeAttention> = &[&MergeAttentionFamily];

/// Family name.
const NAME: &str = "merge_attention";

/// Merges bound by memory.
#[derive(Debug)]
struct MergeAttentionFamily;

impl Family<CheckedMergeAttention> for MergeAttentionFamily {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedMergeAttention, _: &DeviceInfo) -> Result<Vec<MergeAttentionConfig>, Unsupported> {
        Ok(vec![MergeAttentionConfig { kernel: op.kernel_of(NAME, None), efficiency: 500 }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedMergeAttention,
        plan: &MergeAttentionPlan,
    ) -> Result<LaunchSequence, HalError> {
        let cpu = Processor::of(device)?;
        let kernel = CpuMergeAttention { op: *op, simd: cpu.simd(), pool: cpu.pool().clone() };
        cpu.pool().reserve(!kernel.is_small(), Scratch { tile: scratch(op), ..Scratch::default() });
        let geometry =
            Geometry { grid: [u32::try_from(op.rows()).unwrap_or(u32::MAX), 1, 1], threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<MergeAttentionOperand>(plan.config.kernel, geometry, Arc::new(kernel));
        let step = step.bind_all(op.operands());
        Ok(LaunchSequence::new::<MergeAttentionOperand>(op.kernel_name(), vec![step]))
    }

    fn source_hash(&self, _: &CheckedMergeAttention, _: &MergeAttentionConfig) -> u64 {
        SOURCE_HASH
    }
}

/// Scratch floats of a thread: weights, sums, and a part of a row.
fn scratch(op: &CheckedMergeAttention) -> usize {
    op.parts + 2 * op.dim
}

/// The family's loop, prepared for one operation.
struct CpuMergeAttention {
    op: CheckedMergeAttention,
    simd: &'static Simd,
    pool: Pool,
}

impl std::fmt::Debug for CpuMergeAttention {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuMergeAttention").field("op", &self.op).finish_non_exhaustive()
    }
}

impl CpuMergeAttention {
    /// Whether the calling thread works alone.
    fn is_small(&self) -> bool {
        self.op.rows().saturating_mul(self.op.parts * self.op.dim) < SERIAL_ELEMENTS
    }
}

impl Kernel for CpuMergeAttention {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let job = Job::new(&self.op, self.simd, operands)?;
        self.pool.share(!self.is_small(), |threads| job.run(threads));
        Ok(())
    }
}

/// An operation with bound operands.
struct Job<'a> {
    op: &'a CheckedMergeAttention,
    simd: &'static Simd,
    partial: &'a [u8],
    partial_lse: &'a [f32],
    /// A matrix of tokens for each head.
    d: OutputBatch<'a>,
    lse: Option<Output<'a>>,
}

impl<'a> Job<'a> {
    fn new(op: &'a CheckedMergeAttention, simd: &'static Simd, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use MergeAttentionOperand as O;
        let &CheckedMergeAttention { parts, tokens, heads, dim, d, .. } = op;
        let mut written = |operand: O| {
            let view = operands.take_mut(operand).ok_or(absent(operand.name(), 1))?;
            HostMemory::of_device_mut(DeviceId::CPU, view, operand.name())
        };
        let rows = Dense { dtype: op.d_dtype, row_stride: d.token_stride, col_stride: 1, aligned16: false };
        let d = OutputBatch::new(written(O::D)?, rows, [tokens, dim], heads, d.head_stride, O::D.name())?;
        let lse = match op.lse {
            true => {
                let rows = Dense::rows_of(DType::F32, heads);
                Some(Output::new(written(O::Lse)?, rows, [tokens, heads], O::Lse.name())?)
            }
            false => None,
        };
        let what = O::Partial.name();
        let partial = host_bytes(operands.take(O::Partial).ok_or(absent(what, 1))?, what)?;
        let end = (element(op, parts - 1, tokens - 1, heads - 1) + dim) * op.dtype.bytes();
        if end > partial.len() {
            return Err(HalError::OutOfBounds { what, start: 0, end, len: partial.len() });
        }
        let partial_lse = read(&mut operands, O::PartialLse, parts * op.rows())?;
        Ok(Self { op, simd, partial, partial_lse, d, lse })
    }

    fn run(&self, threads: usize) {
        let op = self.op;
        // Several rows per task, so that a task is worth starting.
        let of_task = SERIAL_ELEMENTS.div_ceil(4 * op.parts * op.dim);
        let tasks = 0..op.rows().div_ceil(of_task);
        let work = |task: usize| {
            let first = task * of_task;
            arena::with_tile(scratch(op), |scratch| {
                (first..op.rows().min(first + of_task)).for_each(|row| self.row(row, scratch));
            });
        };
        match threads {
            1 => tasks.for_each(work),
            _ => tasks.into_par_iter().for_each(work),
        }
    }

    fn row(&self, row: usize, scratch: &mut [f32]) {
        let op = self.op;
        let (token, head) = (row / op.heads, row % op.heads);
        let (weights, scratch) = scratch.split_at_mut(op.parts);
        let (sums, values) = scratch.split_at_mut(op.dim);
        for (part, weight) in weights.iter_mut().enumerate() {
            *weight = self.partial_lse[part * op.rows() + row];
        }
        let log_sum = weigh(weights);
        sums.fill(0.0);
        // Numbers without weight are not read.
        for (part, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight != 0.0) {
            let first = element(op, part, token, head) * op.dtype.bytes();
            self.simd.to_f32(op.dtype, &self.partial[first..], values);
            sums.iter_mut().zip(&*values).for_each(|(sum, value)| *sum += weight * value);
        }
        // SAFETY: a row is one task's, and rows of D do not overlap.
        unsafe { self.d.of(head).store_part(token, 0, sums) };
        if let Some(lse) = &self.lse {
            // SAFETY: a row is one task's.
            unsafe { lse.store_part(token, head, &[log_sum]) };
        }
    }
}

/// First element of a part of a row.
fn element(op: &CheckedMergeAttention, part: usize, token: usize, head: usize) -> usize {
    let [part_stride, token_stride, head_stride] =
        [op.part_stride, op.partial.token_stride, op.partial.head_stride].map(|stride| stride as usize);
    part * part_stride + token * token_stride + head * head_stride
}

/// Turns log-sum-exps into weights whose sum is 1, or 0 without
/// any; returns the log-sum-exp of all. NaN spreads to every weight.
fn weigh(row: &mut [f32]) -> f32 {
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let base = if most == f32::NEG_INFINITY { 0.0 } else { most };
    let mut sum = 0.0;
    for weight in row.iter_mut() {
        *weight = (*weight - base).exp();
        sum += *weight;
    }
    let inverse = if sum == 0.0 { 0.0 } else { 1.0 / sum };
    row.iter_mut().for_each(|weight| *weight *= inverse);
    most + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_add_up_to_one_whatever_their_magnitude() {
        let weighed = |mut row: Vec<f32>| (weigh(&mut row), row);
        let (lse, weights) = weighed(vec![1e4, 1e4, f32::NEG_INFINITY, -3e38]);
        assert!((lse - 1e4).abs() < 1.0 && weights == [0.5, 0.5, 0.0, 0.0], "{lse} {weights:?}");
        assert_eq!(weighed(vec![-7.25]), (-7.25, vec![1.0]));
        assert_eq!(weighed(vec![f32::NEG_INFINITY; 2]), (f32::NEG_INFINITY, vec![0.0; 2]));
        for bad in [f32::NAN, f32::INFINITY] {
            let (lse, weights) = weighed(vec![0.0, bad]);
            assert!(lse.is_nan() && weights[1].is_nan(), "{lse} {weights:?}");
        }
    }
}
