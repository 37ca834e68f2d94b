//! Families of `optimizer`: a single one. Threads get
//! contiguous ranges of parameters.

use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::{
    BufferMut, CheckedOptimizer, Dense, Device, DeviceId, DeviceInfo, Families, Family, Geometry, HalError, HostMemory,
    HostStream, Kernel, KernelId, LaunchSequence, LaunchStep, MomentFactors, Operand, Operands, Operation,
    OptimizerConfig, OptimizerLaunch, OptimizerOperand, OptimizerSpec, Spec, StepFactors, Stream, Unsupported,
    UpdateKind,
};
use rayon::prelude::*;

use crate::arena;
use crate::operand::{Input, Output, absent, host_bytes};
use crate::pool::Pool;
use crate::processor::Processor;
use crate::simd::Simd;
use crate::source_hash::SOURCE_HASH;

/// Parameters below which only the calling thread works,
/// because waking others takes longer.
const SERIAL_LEN: usize = 1 << 14;
/// Parameters of a task: their data stays in the L1 cache.
const TASK: usize = 2048;

/// Families of the CPU.
pub const FAMILIES: Families<CheckedOptimizer> = &[&OPTIMIZER];

/// The family `optimizer`.
pub static OPTIMIZER: OptimizerFamily = OptimizerFamily;

/// Optimizer step (SGD, AdamW), bound by memory.
#[derive(Debug)]
pub struct OptimizerFamily;

impl Family<CheckedOptimizer> for OptimizerFamily {
    fn name(&self) -> &'static str {
        "optimizer"
    }

    fn configs(&self, op: &CheckedOptimizer, _: &DeviceInfo) -> Result<Vec<OptimizerConfig>, Unsupported> {
        let kernel = KernelId::new(self.name(), None, Spec::Optimizer(OptimizerSpec::new(op.rule.kind())));
        Ok(vec![OptimizerConfig { kernel, efficiency: 600 }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedOptimizer,
        plan: &OptimizerLaunch,
    ) -> Result<LaunchSequence, HalError> {
        let cpu = Processor::of(device)?;
        let kernel = CpuOptimizer { op: *op, simd: cpu.simd(), pool: cpu.pool().clone() };
        let grid = [u32::try_from(op.len.div_ceil(TASK)).unwrap_or(u32::MAX), 1, 1];
        let geometry = Geometry { grid, threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<OptimizerOperand>(plan.config.kernel, geometry, Arc::new(kernel));
        let step = step.bind_all(op.operands());
        Ok(LaunchSequence::new::<OptimizerOperand>(op.kernel_name(), vec![step]))
    }

    fn source_hash(&self, _: &CheckedOptimizer, _: &OptimizerConfig) -> u64 {
        SOURCE_HASH
    }
}

/// The family's loop, prepared for one operation.
struct CpuOptimizer {
    op: CheckedOptimizer,
    simd: &'static Simd,
    pool: Pool,
}

impl std::fmt::Debug for CpuOptimizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuOptimizer").field("op", &self.op).finish_non_exhaustive()
    }
}

impl Kernel for CpuOptimizer {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let job = Job::new(&self.op, self.simd, operands)?;
        self.pool.share(self.op.len >= SERIAL_LEN, |threads| job.run(threads));
        Ok(())
    }
}

/// An operation with bound operands, each one row.
struct Job<'a> {
    op: &'a CheckedOptimizer,
    simd: &'static Simd,
    step: StepFactors,
    gradient: Input<'a>,
    weights: Output<'a>,
    /// As many as the rule has.
    moments: Vec<Output<'a>>,
    copy: Option<Output<'a>>,
}

impl<'a> Job<'a> {
    fn new(op: &'a CheckedOptimizer, simd: &'static Simd, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use OptimizerOperand as O;
        let shape = [1, op.len];
        let what = O::Step.name();
        let bytes = host_bytes(operands.take(O::Step).ok_or(absent(what, StepFactors::BYTES))?, what)?;
        let len = bytes.len();
        let words = bytes.as_chunks::<4>().0.first_chunk::<4>();
        let words = words.ok_or(HalError::OutOfBounds { what, start: 0, end: StepFactors::BYTES, len })?;
        let [size, inverse_root_bias, decay, gradient_scale] = words.map(f32::from_le_bytes);
        let step = StepFactors { size, inverse_root_bias, decay, gradient_scale };
        let what = O::Gradient.name();
        let gradient = host_bytes(operands.take(O::Gradient).ok_or(absent(what, 1))?, what)?;
        let gradient = Input::new(gradient, Dense::rows_of(op.gradient, op.len), shape, what)?;
        let written = |view: Option<BufferMut<'a>>, operand: O, dtype: DType| {
            let what = operand.name();
            let bytes = HostMemory::of_device_mut(DeviceId::CPU, view.ok_or(absent(what, 1))?, what)?;
            Output::new(bytes, Dense::rows_of(dtype, op.len), shape, what)
        };
        let of_rule = [O::Moment1, O::Moment2].into_iter().take(op.rule.kind().moments());
        let moments = of_rule.map(|moment| written(operands.take_mut(moment), moment, DType::F32));
        let moments = moments.collect::<Result<_, _>>()?;
        let copy = match op.copy {
            Some(dtype) => Some(written(operands.take_mut(O::Copy), O::Copy, dtype)?),
            None => None,
        };
        let weights = written(operands.take_mut(O::Weights), O::Weights, DType::F32)?;
        Ok(Self { op, simd, step, gradient, weights, moments, copy })
    }

    fn run(&self, threads: usize) {
        let tasks = 0..self.op.len.div_ceil(TASK);
        match threads {
            1 => tasks.for_each(|task| self.task(task)),
            _ => tasks.into_par_iter().for_each(|task| self.task(task)),
        }
    }

    /// Updates the parameters of a task.
    fn task(&self, task: usize) {
        let first = task * TASK;
        let len = TASK.min(self.op.len - first);
        arena::with_tile(4 * TASK, |tile| {
            let (weights, rest) = tile.split_at_mut(TASK);
            let (gradient, rest) = rest.split_at_mut(TASK);
            let (moment1, moment2) = rest.split_at_mut(TASK);
            let (weights, gradient) = (&mut weights[..len], &mut gradient[..len]);
            let moments = [&mut moment1[..len], &mut moment2[..len]];
            self.gradient.part(self.simd, 0, first, gradient);
            // SAFETY: the parameters of a task, and their moments and
            // copies, belong to this thread.
            unsafe {
                self.weights.load_part(self.simd, 0, first, weights);
                for (moment, values) in self.moments.iter().zip(moments) {
                    moment.load_part(self.simd, 0, first, values);
                }
            }
            let [moment1, moment2] = [&mut moment1[..len], &mut moment2[..len]];
            let how = (self.op.rule.factors(), self.step);
            match self.op.rule.kind() {
                UpdateKind::AdamW => adamw(&how, weights, gradient, moment1, moment2),
                UpdateKind::Sgd => sgd(&self.step, weights, gradient),
                UpdateKind::Momentum => momentum(&how, weights, gradient, moment1),
            }
            // SAFETY: as above.
            unsafe {
                self.weights.store_part(0, first, weights);
                for (moment, values) in self.moments.iter().zip([&*moment1, &*moment2]) {
                    moment.store_part(0, first, values);
                }
                if let Some(copy) = &self.copy {
                    copy.store_part(0, first, weights);
                }
            }
        });
    }
}

/// AdamW step for parameters and moments.
fn adamw(
    (factors, step): &(MomentFactors, StepFactors),
    weights: &mut [f32],
    gradient: &[f32],
    moment1: &mut [f32],
    moment2: &mut [f32],
) {
    let all = weights.iter_mut().zip(gradient).zip(moment1.iter_mut().zip(moment2));
    for ((weight, gradient), (first, second)) in all {
        let g = gradient * step.gradient_scale;
        *first = factors.decay1 * *first + factors.gain1 * g;
        *second = factors.decay2 * *second + factors.gain2 * (g * g);
        let update = *first / (second.sqrt() * step.inverse_root_bias + factors.eps);
        *weight -= step.size * update + step.decay * *weight;
    }
}

/// SGD step without momentum.
fn sgd(step: &StepFactors, weights: &mut [f32], gradient: &[f32]) {
    for (weight, gradient) in weights.iter_mut().zip(gradient) {
        *weight -= step.size * (gradient * step.gradient_scale) + step.decay * *weight;
    }
}

/// SGD step with momentum, for parameters and moments.
fn momentum((factors, step): &(MomentFactors, StepFactors), weights: &mut [f32], gradient: &[f32], moment: &mut [f32]) {
    for ((weight, gradient), moment) in weights.iter_mut().zip(gradient).zip(moment) {
        *moment = factors.decay1 * *moment + factors.gain1 * (gradient * step.gradient_scale);
        *weight -= step.size * *moment + step.decay * *weight;
    }
}
