//! Families of `sampling`: a single one. A thread samples a row.

mod row;

use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
use qgemm_hal::op::sampling::{EarlierTokens, STATUS_WORDS, SamplingParameters, SamplingStep, kernel_of};
use qgemm_hal::{
    CheckedSampling, Device, DeviceId, DeviceInfo, Families, Family, Geometry, HalError, HostStream, Kernel,
    LaunchSequence, LaunchStep, Operands, SamplingConfig, SamplingOperand, SamplingPlan, Stream, Unsupported,
};
use rayon::prelude::*;

use crate::arena;
use crate::operand::{read, written};
use crate::pool::{Pool, Scratch};
use crate::processor::Processor;
use crate::source_hash::SOURCE_HASH;

/// Logits below which only the calling thread works, because
/// waking others takes longer.
const SERIAL_LOGITS: usize = 1 << 14;

/// Families of the CPU.
pub const FAMILIES: Families<CheckedSampling> = &[&SamplingFamily];

/// Family name.
const NAME: &str = "sampling";

/// Tokens from logits.
#[derive(Debug)]
struct SamplingFamily;

impl Family<CheckedSampling> for SamplingFamily {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, _: &CheckedSampling, _: &DeviceInfo) -> Result<Vec<SamplingConfig>, Unsupported> {
        let kernel = kernel_of(NAME, SamplingStep::Sample, None);
        Ok(vec![SamplingConfig { kernel, launches: 1, workspace_bytes: 0, efficiency: 200 }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedSampling,
        plan: &SamplingPlan,
    ) -> Result<LaunchSequence, HalError> {
        let cpu = Processor::of(device)?;
        let kernel = CpuSampling { op: *op, pool: cpu.pool().clone() };
        // Orders of a row are integers in float memory.
        cpu.pool().reserve(!kernel.is_small(), Scratch { tile: op.vocabulary, ..Scratch::default() });
        let geometry = Geometry { grid: [op.rows as u32, 1, 1], threads: 1, shared_bytes: 0 };
        let step = LaunchStep::new::<SamplingOperand>(plan.config.kernel, geometry, Arc::new(kernel)).of_operation();
        Ok(LaunchSequence::new::<SamplingOperand>(NAME, vec![step]))
    }

    fn source_hash(&self, _: &CheckedSampling, _: &SamplingConfig) -> u64 {
        SOURCE_HASH
    }
}

/// The family's loops, prepared for one operation.
struct CpuSampling {
    op: CheckedSampling,
    pool: Pool,
}

impl std::fmt::Debug for CpuSampling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuSampling").field("op", &self.op).finish_non_exhaustive()
    }
}

impl CpuSampling {
    /// Whether the calling thread works alone.
    fn is_small(&self) -> bool {
        self.op.rows == 1 || self.op.rows * self.op.vocabulary < SERIAL_LOGITS
    }
}

impl Kernel for CpuSampling {
    fn launch(&self, stream: &Stream, mut operands: Operands<'_>) -> Result<(), HalError> {
        HostStream::check(DeviceId::CPU, stream)?;
        let (inputs, outputs) = (Inputs::take(&self.op, &mut operands)?, Outputs::take(&self.op, &mut operands)?);
        if self.is_small() {
            outputs.fill(&inputs);
        } else {
            self.pool.enter(|| outputs.fill_in_parallel(&inputs));
        }
        Ok(())
    }
}

/// Inputs of the rows.
struct Inputs<'a> {
    op: CheckedSampling,
    logits: &'a [f32],
    parameters: &'a [u32],
    earlier: Option<Earlier<'a>>,
}

/// Earlier tokens of all rows.
struct Earlier<'a> {
    shape: EarlierTokens,
    ids: &'a [u32],
    lengths: &'a [u32],
}

impl Earlier<'_> {
    fn of_row(&self, row: usize) -> &[u32] {
        let first = row * self.shape.row_stride as usize;
        &self.ids[first..][..self.shape.capacity.min(self.lengths[row] as usize)]
    }
}

impl<'a> Inputs<'a> {
    fn take(op: &CheckedSampling, operands: &mut Operands<'a>) -> Result<Self, HalError> {
        use SamplingOperand as O;
        let earlier = match op.earlier {
            Some(shape) => {
                let count = (op.rows - 1) * shape.row_stride as usize + shape.capacity;
                let ids = read(operands, O::Earlier, count)?;
                Some(Earlier { shape, ids, lengths: read(operands, O::EarlierLengths, op.rows)? })
            }
            None => None,
        };
        Ok(Self {
            op: *op,
            logits: read(operands, O::Logits, (op.rows - 1) * op.logits.row_stride as usize + op.vocabulary)?,
            parameters: read(operands, O::Parameters, op.rows * SamplingParameters::WORDS)?,
            earlier,
        })
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.logits[row * self.op.logits.row_stride as usize..][..self.op.vocabulary]
    }

    fn sample(&self, row: usize, id: &mut u32, status: &mut [u32]) {
        let logits = self.row(row);
        let words = self.parameters[row * SamplingParameters::WORDS..].first_chunk();
        let parameters = words.map(SamplingParameters::of_words).unwrap_or_default();
        let earlier = self.earlier.as_ref().map(|earlier| earlier.of_row(row));
        let (sampled, of_row) = arena::with_tile(logits.len(), |orders| {
            row::sample(&parameters, logits, earlier, bytemuck::cast_slice_mut(orders))
        });
        *id = sampled;
        status.copy_from_slice(&of_row);
    }
}

/// Outputs of the rows. Unused ones are empty.
struct Outputs<'a> {
    ids: &'a mut [u32],
    status: &'a mut [u32],
    log_probabilities: &'a mut [f32],
    alternative_ids: &'a mut [u32],
    alternatives: &'a mut [f32],
}

impl<'a> Outputs<'a> {
    fn take(op: &CheckedSampling, operands: &mut Operands<'a>) -> Result<Self, HalError> {
        use SamplingOperand as O;
        Ok(Self {
            ids: written(operands, O::Ids, op.rows)?,
            status: written(operands, O::Status, op.rows * STATUS_WORDS)?,
            log_probabilities: written_if_any(
                operands,
                O::LogProbabilities,
                if op.log_probabilities { op.rows } else { 0 },
            )?,
            alternative_ids: written_if_any(operands, O::AlternativeIds, op.listed())?,
            alternatives: written_if_any(operands, O::AlternativeLogProbabilities, op.listed())?,
        })
    }

    fn fill(self, inputs: &Inputs<'_>) {
        let Self { ids, status, log_probabilities, alternative_ids, alternatives } = self;
        let of_rows = ids.iter_mut().zip(status.chunks_exact_mut(STATUS_WORDS)).enumerate();
        of_rows.for_each(|(row, (id, status))| inputs.sample(row, id, status));
        let count = inputs.op.alternatives;
        for (row, own) in log_probabilities.iter_mut().enumerate() {
            let of_row = row * count..(row + 1) * count;
            let (ids_of_row, values) = (&mut alternative_ids[of_row.clone()], &mut alternatives[of_row]);
            *own = row::log_probabilities(inputs.row(row), ids[row], ids_of_row, values);
        }
    }

    fn fill_in_parallel(self, inputs: &Inputs<'_>) {
        let Self { ids, status, log_probabilities, alternative_ids, alternatives } = self;
        let of_rows = ids.par_iter_mut().zip(status.par_chunks_exact_mut(STATUS_WORDS)).enumerate();
        of_rows.for_each(|(row, (id, status))| inputs.sample(row, id, status));
        let own = log_probabilities.par_iter_mut().enumerate();
        let count = inputs.op.alternatives;
        if count == 0 {
            return own.for_each(|(row, own)| {
                *own = row::log_probabilities(inputs.row(row), ids[row], &mut [], &mut []);
            });
        }
        let listed = alternative_ids.par_chunks_exact_mut(count).zip(alternatives.par_chunks_exact_mut(count));
        own.zip(listed).for_each(|((row, own), (ids_of_row, values))| {
            *own = row::log_probabilities(inputs.row(row), ids[row], ids_of_row, values);
        });
    }
}

/// The `count` values of a written operand; an operand without
/// values may be absent.
fn written_if_any<'a, T: AnyBitPattern + NoUninit>(
    operands: &mut Operands<'a>,
    operand: SamplingOperand,
    count: usize,
) -> Result<&'a mut [T], HalError> {
    if count == 0 { Ok(&mut []) } else { written(operands, operand, count) }
}
