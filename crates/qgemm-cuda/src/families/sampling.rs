//! `sampling`: tokens from logits, one CTA a row. With a repetition
//! penalty another kernel makes the orders of the logits; a third
//! writes log-probabilities.

use std::mem::size_of;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::{SamplingPointers, SamplingShape};
use qgemm_hal::op::sampling::{SamplingStep, kernel_of};
use qgemm_hal::{
    CheckedSampling, Device, DeviceInfo, Families, Family, Geometry, HalError, LaunchSequence, Operand, Operands,
    SamplingConfig, SamplingOperand, SamplingPlan, Unsupported, Variant,
};

use super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use super::launch_params::LaunchParams;
use super::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

/// Families of `sampling`.
pub(super) const FAMILIES: Families<CheckedSampling> = &[&Sampling];

/// Family name.
const NAME: &str = "sampling";
/// Tokens of a CTA that makes orders.
const PART: u32 = 2048;
/// Expected share of the bandwidth, per mille: one SM reads a row,
/// several times unless the best token is wanted.
const EFFICIENCY: u32 = 20;

/// The kernel family.
#[derive(Debug)]
struct Sampling;

/// Threads of a CTA, and `sizeof(SharedStorage)`, which kernels assert.
const fn cta(step: SamplingStep) -> (u32, u32) {
    /// Bins of `mainloop/sampling_sums.cuh`, each a sum of two words.
    const BINS: u32 = 2048;
    match step {
        SamplingStep::Penalize => (256, PART * 4),
        SamplingStep::Sample | SamplingStep::LogProbabilities => (1024, 32 * 8 + 8 + 8 + BINS * 8),
    }
}

fn source(step: SamplingStep, variant: Variant) -> KernelSpec {
    let (entry, symbol) = match step {
        SamplingStep::Penalize => ("entry/sampling_penalize.cu", "qg_sampling_penalize"),
        SamplingStep::Sample => ("entry/sampling_sample.cu", "qg_sampling_sample"),
        SamplingStep::LogProbabilities => ("entry/sampling_log_probabilities.cu", "qg_sampling_log_probabilities"),
    };
    let (threads, shared_bytes) = cta(step);
    let prelude = Prelude { threads: Some(threads), shared_bytes: Some(shared_bytes), ..Prelude::of(variant) };
    KernelSpec {
        name: kernel_of(NAME, step, Some(variant)).to_string(),
        entry,
        text: source::entry(entry),
        symbol,
        prelude: prelude.text(),
        arch_specific: false,
    }
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    SamplingStep::ALL.iter().map(move |&step| source(step, variant))
}

/// `SamplingParams` in `mainloop/sampling_params.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct SamplingParams {
    shape: SamplingShape,
    at: SamplingPointers,
}

const _: () = assert!(size_of::<SamplingShape>().is_multiple_of(8), "pointers follow without a gap");

impl Params for SamplingParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        use SamplingOperand as O;
        let mut params = *self;
        let sampled = at.of(operands, O::SampledIds)?;
        let pointers = [
            (&mut params.at.logits, O::Logits),
            (&mut params.at.parameters, O::Parameters),
            (&mut params.at.earlier, O::Earlier),
            (&mut params.at.earlier_lengths, O::EarlierLengths),
            (&mut params.at.orders, O::Workspace),
            (&mut params.at.ids, O::Ids),
            (&mut params.at.log_probabilities, O::LogProbabilities),
            (&mut params.at.alternative_ids, O::AlternativeIds),
            (&mut params.at.alternative_log_probabilities, O::AlternativeLogProbabilities),
            (&mut params.at.status, O::Status),
        ];
        at.fill(operands, pointers)?;
        // A step binds ids once: as its output or as its input.
        params.at.ids |= sampled;
        Ok(LaunchParams::of(&params))
    }
}

fn params(op: &CheckedSampling) -> SamplingParams {
    let shape = SamplingShape {
        rows: op.rows as u32,
        vocabulary: op.vocabulary as u32,
        earlier: op.earlier.map_or(0, |earlier| earlier.capacity as u32),
        alternatives: op.alternatives as u32,
    };
    let earlier_row = op.earlier.map_or(0, |earlier| earlier.row_stride);
    let at = SamplingPointers { logits_row: op.logits.row_stride, earlier_row, ..SamplingPointers::default() };
    SamplingParams { shape, at }
}

/// CTAs of a step.
fn ctas(op: &CheckedSampling, step: SamplingStep) -> u32 {
    let parts = match step {
        SamplingStep::Penalize => (op.vocabulary as u32).div_ceil(PART),
        SamplingStep::Sample | SamplingStep::LogProbabilities => 1,
    };
    op.rows as u32 * parts
}

/// Launch sequence of a plan. `make` prepares its kernels.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel
/// variant, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedSampling,
    _: &SamplingPlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let step = |kind: SamplingStep| {
        let (threads, shared_bytes) = cta(kind);
        let launch = KernelLaunch {
            id: kernel_of(NAME, kind, Some(variant)),
            spec: source(kind, variant),
            geometry: Geometry { grid: [ctas(op, kind), 1, 1], threads, shared_bytes },
            // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
            starts_early: variant >= Variant::Sm90,
            operands: SamplingOperand::ALL,
            updated: None,
            params: Arc::new(params(op)),
        };
        Ok(op.bind(launch.step::<SamplingOperand>(make)?, kind))
    };
    let steps = op.steps().into_iter().map(step).collect::<Result<_, HalError>>()?;
    Ok(LaunchSequence::new::<SamplingOperand>(NAME, steps))
}

impl Family<CheckedSampling> for Sampling {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedSampling, info: &DeviceInfo) -> Result<Vec<SamplingConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        Ok(vec![SamplingConfig {
            kernel: kernel_of(NAME, SamplingStep::Sample, Some(variant)),
            launches: op.steps().len() as u32,
            workspace_bytes: op.kept_bytes(),
            efficiency: EFFICIENCY,
        }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedSampling,
        plan: &SamplingPlan,
    ) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, _: &CheckedSampling, config: &SamplingConfig) -> u64 {
        let Some(variant) = config.kernel.variant else { return 0 };
        let hashes = SamplingStep::ALL.iter().map(|&step| source(step, variant).source_hash().short());
        hashes.fold(0, |all: u64, hash| all.rotate_left(7) ^ hash)
    }
}
