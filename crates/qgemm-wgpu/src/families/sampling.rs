//! `sampling`: tokens from logits, one workgroup a row. With a
//! repetition penalty another kernel makes the orders of the logits; a
//! third writes log-probabilities.

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::SamplingShape;
use qgemm_hal::op::sampling::{STATUS_WORDS, SamplingParameters, SamplingStep, kernel_of};
use qgemm_hal::{
    CheckedSampling, Device, DeviceInfo, Families, Family, Geometry, HalError, Kernel, LaunchSequence, LaunchStep,
    Operand, Operands, SamplingConfig, SamplingOperand, SamplingPlan, Stream, Unsupported,
};

use super::dispatch::{Dispatch, MARGIN, MAX_GROUPS, rows_that_fit, stride, submit, too_large};
use super::operands::{Bound, Touched};
use crate::device::shared_of;
use crate::event::WgpuStream;
use crate::pipeline::{Compiled, Interface};
use crate::shader;
use crate::shared::Shared;
use crate::source_hash::hash_of;

/// wgpu families of `sampling`.
pub(super) const FAMILIES: Families<CheckedSampling> = &[&Sampling];

const fn interface_of(name: &'static str, bindings: &'static str) -> Interface {
    Interface { name, bindings, params_bytes: size_of::<Params>() as u32 }
}

/// Interface of the kernel that applies the penalty.
pub(crate) const PENALIZE_INTERFACE: Interface = interface_of("sampling_penalize", "rrrrw");
/// Interface of the kernel that samples.
pub(crate) const SAMPLE_INTERFACE: Interface = interface_of("sampling_sample", "rrrww");
/// Interface of the kernel that writes log-probabilities.
pub(crate) const LOG_PROBABILITIES_INTERFACE: Interface = interface_of("sampling_log_probabilities", "rrwww");

/// Family name.
const NAME: &str = "sampling";
/// Invocations of a workgroup; a bin each.
const THREADS: u32 = 256;
/// Tokens of a workgroup that makes orders.
const PART: usize = 2048;
/// Bytes of a word.
const WORD: usize = 4;

const COMMON: [&str; 2] =
    [include_str!("../../shaders/generated/abi.wgsl"), include_str!("../../shaders/sampling_params.wgsl")];
const SUMS: &str = include_str!("../../shaders/sampling_sums.wgsl");
const PENALIZE: &str = include_str!("../../shaders/sampling_penalize.wgsl");
const SAMPLE: &str = include_str!("../../shaders/sampling_sample.wgsl");
const LOG_PROBABILITIES: &str = include_str!("../../shaders/sampling_log_probabilities.wgsl");

static SOURCE_HASH: LazyLock<u64> =
    LazyLock::new(|| hash_of(COMMON.into_iter().chain([SUMS, PENALIZE, SAMPLE, LOG_PROBABILITIES])));

/// `Params` of `shaders/sampling_params.wgsl`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
struct Params {
    shape: SamplingShape,
    logits_row: u32,
    earlier_row: u32,
    logits_base: u32,
    parameters_base: u32,
    earlier_base: u32,
    lengths_base: u32,
    orders_base: u32,
    ids_base: u32,
    status_base: u32,
    own_base: u32,
    alternative_ids_base: u32,
    alternatives_base: u32,
}

/// The kernel family.
#[derive(Debug)]
struct Sampling;

impl Family<CheckedSampling> for Sampling {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedSampling, info: &DeviceInfo) -> Result<Vec<SamplingConfig>, Unsupported> {
        part_rows(op, info.max_buffer_bytes)?;
        Ok(vec![SamplingConfig {
            kernel: kernel_of(NAME, SamplingStep::Sample, None),
            launches: op.steps().len() as u32,
            workspace_bytes: op.kept_bytes(),
            efficiency: 20,
        }])
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedSampling, _: &SamplingPlan) -> Result<LaunchSequence, HalError> {
        let shared = shared_of(device, "a sampling of the wgpu backend")?;
        let refused =
            |reason: Unsupported| HalError::Unsupported { device: shared.id, what: NAME.to_owned(), why: reason.why };
        let part_rows = part_rows(op, device.info().max_buffer_bytes).map_err(refused)?;
        let step = |kind: SamplingStep| {
            let shader = shader::compose_parts(THREADS, &[&COMMON, parts_of(kind)].concat());
            let compiled = Compiled::new(shared, interface(kind), NAME.to_owned(), shader)?;
            let kernel = SamplingKernel { compiled, shared: shared.clone(), op: *op, part_rows, kind };
            let geometry = Geometry {
                grid: kernel.grid(part_rows.min(op.rows)),
                threads: THREADS,
                shared_bytes: shared_bytes(kind),
            };
            let step = LaunchStep::new::<SamplingOperand>(kernel_of(NAME, kind, None), geometry, Arc::new(kernel));
            Ok(op.bind(step, kind))
        };
        let steps = op.steps().into_iter().map(step).collect::<Result<_, HalError>>()?;
        Ok(LaunchSequence::new::<SamplingOperand>(NAME, steps))
    }

    fn source_hash(&self, _: &CheckedSampling, _: &SamplingConfig) -> u64 {
        *SOURCE_HASH
    }
}

fn interface(step: SamplingStep) -> &'static Interface {
    match step {
        SamplingStep::Penalize => &PENALIZE_INTERFACE,
        SamplingStep::Sample => &SAMPLE_INTERFACE,
        SamplingStep::LogProbabilities => &LOG_PROBABILITIES_INTERFACE,
    }
}

/// Parts of a step's shader after the common ones.
fn parts_of(step: SamplingStep) -> &'static [&'static str] {
    match step {
        SamplingStep::Penalize => &[PENALIZE],
        SamplingStep::Sample => &[SUMS, SAMPLE],
        SamplingStep::LogProbabilities => &[SUMS, LOG_PROBABILITIES],
    }
}

/// Workgroup memory: `var<workgroup>` of the shaders.
const fn shared_bytes(step: SamplingStep) -> u32 {
    const SUMS: u32 = 2 * THREADS * 4;
    match step {
        SamplingStep::Penalize => PART as u32 * 4,
        SamplingStep::Sample => 2 * SUMS + 12,
        SamplingStep::LogProbabilities => SUMS,
    }
}

/// Rows of a dispatch: as many as fit in bindings of `limit` bytes.
fn part_rows(op: &CheckedSampling, limit: u64) -> Result<usize, Unsupported> {
    let row_words = SamplingParameters::WORDS.max(op.alternatives);
    let words = match op.earlier {
        Some(earlier) => (earlier.row_stride as usize).max(earlier.capacity).max(op.vocabulary).max(row_words),
        None => row_words,
    };
    let bytes = words as u64 * WORD as u64;
    let rows = limit.saturating_sub(MARGIN) / bytes;
    if rows == 0 {
        return Err(too_large("a row of earlier tokens", bytes, limit));
    }
    let logits = rows_that_fit("the logits", &op.logits, op.vocabulary, limit)?;
    Ok(logits.min(usize::try_from(rows).unwrap_or(usize::MAX)).min(MAX_GROUPS as usize))
}

/// A kernel for one operation. A launch allocates no device memory.
#[derive(Debug)]
struct SamplingKernel {
    compiled: Compiled,
    shared: Arc<Shared>,
    op: CheckedSampling,
    part_rows: usize,
    kind: SamplingStep,
}

impl SamplingKernel {
    /// Workgroups of a dispatch of `rows` rows.
    fn grid(&self, rows: usize) -> [u32; 3] {
        match self.kind {
            SamplingStep::Penalize => [self.op.vocabulary.div_ceil(PART) as u32, rows as u32, 1],
            SamplingStep::Sample | SamplingStep::LogProbabilities => [rows as u32, 1, 1],
        }
    }

    /// Bindings and parameters of the dispatch of `rows`.
    fn dispatch<'a>(
        &'a self,
        rows: Range<usize>,
        operands: &'a Operands<'a>,
    ) -> Result<Dispatch<'a, Params>, HalError> {
        use SamplingOperand as O;
        let (op, shared, count) = (&self.op, &self.shared, rows.len());
        let touched = |operand: O, words: Range<usize>| Touched {
            what: operand.name(),
            view: operands.get(operand),
            bytes: words.start * WORD..words.end * WORD,
            width: WORD,
        };
        let each = |width: usize| rows.start * width..rows.end * width;
        // Rows with a stride: up to the end of the last one.
        let strided = |stride: u64, width: usize| {
            let first = |row: usize| row * stride as usize;
            first(rows.start)..first(rows.end - 1) + width
        };
        let read =
            |operand: O, words: Range<usize>| -> Result<Bound<'a>, HalError> { touched(operand, words).bind(shared) };
        let written = |operand: O, words: Range<usize>| -> Result<Bound<'a>, HalError> {
            touched(operand, words).bind_written(shared)
        };
        let earlier_row = op.earlier.map_or(0, |earlier| earlier.row_stride);
        let shape = SamplingShape {
            rows: count as u32,
            vocabulary: op.vocabulary as u32,
            earlier: op.earlier.map_or(0, |earlier| earlier.capacity as u32),
            alternatives: op.alternatives as u32,
        };
        let mut p = Params {
            shape,
            logits_row: stride(op.rows, op.logits.row_stride),
            earlier_row: stride(op.rows, earlier_row),
            ..Params::default()
        };
        let orders = if op.earlier.is_some() { each(op.vocabulary) } else { 0..0 };
        let logits;
        (logits, p.logits_base) = read(O::Logits, strided(op.logits.row_stride, op.vocabulary))?;
        let bindings = match self.kind {
            SamplingStep::Penalize => {
                let (parameters, earlier, lengths, kept);
                let capacity = op.earlier.map_or(0, |earlier| earlier.capacity);
                (parameters, p.parameters_base) = read(O::Parameters, each(SamplingParameters::WORDS))?;
                (earlier, p.earlier_base) = read(O::Earlier, strided(earlier_row, capacity))?;
                (lengths, p.lengths_base) = read(O::EarlierLengths, each(1))?;
                (kept, p.orders_base) = written(O::Workspace, orders)?;
                vec![logits, parameters, earlier, lengths, kept]
            }
            SamplingStep::Sample => {
                let (parameters, kept, ids, status);
                (parameters, p.parameters_base) = read(O::Parameters, each(SamplingParameters::WORDS))?;
                (kept, p.orders_base) = read(O::Workspace, orders)?;
                (ids, p.ids_base) = written(O::Ids, each(1))?;
                (status, p.status_base) = written(O::Status, each(STATUS_WORDS))?;
                vec![logits, parameters, kept, ids, status]
            }
            SamplingStep::LogProbabilities => {
                let (ids, own, alternative_ids, alternatives);
                (ids, p.ids_base) = read(O::SampledIds, each(1))?;
                (own, p.own_base) = written(O::LogProbabilities, each(1))?;
                (alternative_ids, p.alternative_ids_base) = written(O::AlternativeIds, each(op.alternatives))?;
                (alternatives, p.alternatives_base) = written(O::AlternativeLogProbabilities, each(op.alternatives))?;
                vec![logits, ids, own, alternative_ids, alternatives]
            }
        };
        Ok(Dispatch { params: p, bindings, grid: self.grid(count) })
    }
}

impl Kernel for SamplingKernel {
    fn launch(&self, stream: &Stream, operands: Operands<'_>) -> Result<(), HalError> {
        WgpuStream::check(&self.shared, stream)?;
        let parts = (0..self.op.rows).step_by(self.part_rows);
        let parts = parts.map(|first| first..(first + self.part_rows).min(self.op.rows));
        let dispatches: Vec<_> = parts.map(|part| self.dispatch(part, &operands)).collect::<Result<_, _>>()?;
        submit(&self.shared, interface(self.kind), &self.compiled, &dispatches)
    }
}
