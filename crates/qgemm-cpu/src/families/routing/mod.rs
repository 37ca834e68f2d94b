//! Families of `routing`: a single one. Tokens are split
//! into chunks for the threads.

mod lists;
mod top_k;

use std::sync::Arc;

use qgemm_hal::op::routing::{STATUS_FINE, STATUS_WORDS};
use qgemm_hal::{
    CheckedRouting, Device, DeviceId, DeviceInfo, Families, Family, Geometry, HalError, HostStream, Kernel, KernelId,
    LaunchSequence, LaunchStep, Operand, Operands, RoutingConfig, RoutingLaunches, RoutingOperand, RoutingSpec,
    RoutingStep, Spec, Stream, Unsupported,
};
use rayon::prelude::*;

use crate::arena;
use crate::operand::{Input, absent, host_bytes, read, written};
use crate::pool::Pool;
use crate::processor::Processor;
use crate::simd::Simd;
use crate::source_hash::SOURCE_HASH;
use lists::{Lists, first_bad};
use top_k::TopK;

/// Logits and slots below which only the calling thread works,
/// because waking others takes longer.
const SERIAL: usize = 1 << 14;
/// Chunks per thread, because some take longer than others.
const CHUNKS_A_THREAD: usize = 4;

/// Families of the CPU.
pub const FAMILIES: Families<CheckedRouting> = &[&ROUTING];

/// The family `routing`.
pub static ROUTING: RoutingFamily = RoutingFamily;

/// Router top-k and expert lists.
#[derive(Debug)]
pub struct RoutingFamily;

impl Family<CheckedRouting> for RoutingFamily {
    fn name(&self) -> &'static str {
        "routing"
    }

    fn configs(&self, op: &CheckedRouting, _: &DeviceInfo) -> Result<Vec<RoutingConfig>, Unsupported> {
        let step = if op.logits().is_some() { RoutingStep::TopK } else { RoutingStep::Lists };
        let spec = RoutingSpec { step, experts: op.experts as u32 };
        let kernel = KernelId::new(self.name(), None, Spec::Routing(spec));
        Ok(vec![RoutingConfig { kernel, launches: 1, workspace_bytes: 0, efficiency: 200 }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedRouting,
        plan: &RoutingLaunches,
    ) -> Result<LaunchSequence, HalError> {
        let cpu = Processor::of(device)?;
        let work = op.slots() + op.logits().map_or(0, |_| op.tokens * op.experts);
        let most = CHUNKS_A_THREAD * device.info().units.max(1) as usize;
        let chunks = if work < SERIAL { 1 } else { most.min(op.tokens) };
        let chunk_tokens = op.tokens.div_ceil(chunks);
        let kernel = CpuRouting { op: op.clone(), chunk_tokens, simd: cpu.simd(), pool: cpu.pool().clone() };
        let grid = [op.tokens.div_ceil(chunk_tokens) as u32, 1, 1];
        let geometry = Geometry { grid, threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<RoutingOperand>(plan.config.kernel, geometry, Arc::new(kernel)).of_operation();
        Ok(LaunchSequence::new::<RoutingOperand>("routing", vec![step]))
    }

    fn source_hash(&self, _: &CheckedRouting, _: &RoutingConfig) -> u64 {
        SOURCE_HASH
    }
}

/// The family's loops, prepared for one operation.
struct CpuRouting {
    op: CheckedRouting,
    chunk_tokens: usize,
    simd: &'static Simd,
    pool: Pool,
}

impl std::fmt::Debug for CpuRouting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuRouting").field("op", &self.op).finish_non_exhaustive()
    }
}

impl Kernel for CpuRouting {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let op = self.op.of_portion(operands.portion());
        let job = Job::new(self, &op, operands)?;
        if self.chunk_tokens < op.tokens {
            self.pool.enter(|| job.run());
        } else {
            job.run();
        }
        Ok(())
    }

    fn takes_portions(&self) -> bool {
        true
    }
}

/// An operation with bound operands.
struct Job<'a> {
    op: &'a CheckedRouting,
    chunk_tokens: usize,
    source: Source<'a>,
    lists: Option<Lists<'a>>,
    status: &'a mut [u32],
}

/// Source of the ids.
enum Source<'a> {
    Logits { top_k: TopK<'a>, ids: &'a mut [i32], weights: &'a mut [f32] },
    Given(&'a [i32]),
}

impl<'a> Job<'a> {
    fn new(routing: &CpuRouting, op: &'a CheckedRouting, mut operands: Operands<'a>) -> Result<Self, HalError> {
        use RoutingOperand as O;
        let slots = op.slots();
        let source = match op.logits() {
            Some(layout) => {
                let view = operands.take(O::Logits).ok_or(absent(O::Logits.name(), 1))?;
                let bytes = host_bytes(view, O::Logits.name())?;
                let logits = Input::new(bytes, *layout, [op.tokens, op.logit_experts()], O::Logits.name())?;
                let bias = if op.bias { Some(read(&mut operands, O::Bias, op.logit_experts())?) } else { None };
                let (ids, weights) =
                    (written(&mut operands, O::Ids, slots)?, written(&mut operands, O::Weights, slots)?);
                Source::Logits { top_k: TopK::new(op, logits, bias, routing.simd), ids, weights }
            }
            None => Source::Given(read(&mut operands, O::GivenIds, slots)?),
        };
        let lists = match op.lists {
            true => Some(Lists {
                offsets: written(&mut operands, O::Offsets, op.local_experts() + 1)?,
                counts: written(&mut operands, O::Counts, op.local_experts())?,
                rows: written(&mut operands, O::Rows, slots)?,
            }),
            false => None,
        };
        let status = written(&mut operands, O::Status, STATUS_WORDS)?;
        Ok(Self { op, chunk_tokens: routing.chunk_tokens, source, lists, status })
    }

    fn run(self) {
        let Self { op, chunk_tokens, source, lists, status } = self;
        let chunk = chunk_tokens * op.top_k;
        let ids: &[i32] = match source {
            Source::Logits { top_k, ids, weights } => {
                let chunks = ids.par_chunks_mut(chunk).zip(weights.par_chunks_mut(chunk)).enumerate();
                let work = |(i, (ids, weights)): (usize, (&mut [i32], &mut [f32]))| {
                    top_k.tokens(i * chunk_tokens, ids, weights);
                };
                if op.slots() > chunk {
                    chunks.for_each(work)
                } else {
                    work((0, (&mut *ids, &mut *weights)))
                }
                ids
            }
            Source::Given(ids) => ids,
        };
        let experts = op.local_experts();
        let bad = match lists {
            Some(lists) => {
                let chunks = ids.len().div_ceil(chunk);
                // Counts are integers in float memory.
                arena::with_activations(chunks * experts, |counts| {
                    lists.write(ids, chunk, experts, bytemuck::cast_slice_mut(counts))
                })
            }
            None => first_bad(ids, experts),
        };
        status.copy_from_slice(&match bad {
            None => [STATUS_FINE, 0, 0, 0],
            Some(slot) => [op.fault(), (slot / op.top_k) as u32, (slot % op.top_k) as u32, ids[slot].cast_unsigned()],
        });
    }
}
