//! `optimizer`: optimizer step (SGD, AdamW) in one memory-bound launch.

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_hal::abi::{self, OptimizerPointers, OptimizerShape, dtype_code};
use qgemm_hal::{
    CheckedOptimizer, Device, DeviceInfo, Families, Family, Geometry, HalError, KernelId, LaunchSequence,
    MomentFactors, Operand, Operands, Operation, OptimizerConfig, OptimizerLaunch, OptimizerOperand, OptimizerSpec,
    Spec, Unsupported, UpdateKind, Variant,
};

use super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use super::launch_params::LaunchParams;
use super::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

/// Family name.
const NAME: &str = "optimizer";
/// Parameters per thread.
const GROUP: usize = 8;
/// Threads of a CTA.
const THREADS: u32 = 256;
/// Maximum CTAs along the grid's x axis.
const MOST_CTAS: usize = i32::MAX as usize;
/// Bytes of a vector access, and the alignment of
/// operands that it requires.
const ACCESS: u64 = 16;
/// Expected share of the bandwidth, per mille.
const EFFICIENCY: u32 = 850;

/// Families of `optimizer`.
pub(super) const FAMILIES: Families<CheckedOptimizer> = &[&Optimizer];

/// The kernel family.
#[derive(Debug)]
struct Optimizer;

fn id(kind: UpdateKind, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::Optimizer(OptimizerSpec::new(kind)))
}

fn source(kind: UpdateKind, variant: Variant) -> KernelSpec {
    let entry = "entry/optimizer.cu";
    let rule = match kind {
        UpdateKind::AdamW => 0,
        UpdateKind::Sgd => 1,
        UpdateKind::Momentum => 2,
    };
    let prelude = Prelude { threads: Some(THREADS), rule: Some(rule), ..Prelude::of(variant) };
    KernelSpec {
        name: id(kind, variant).to_string(),
        entry,
        text: source::entry(entry),
        symbol: "qg_optimizer",
        prelude: prelude.text(),
        arch_specific: false,
    }
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    UpdateKind::ALL.into_iter().map(move |kind| source(kind, variant))
}

/// `OptimizerParams` in `entry/optimizer.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct OptimizerParams {
    shape: OptimizerShape,
    at: OptimizerPointers,
}

impl Params for OptimizerParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        use OptimizerOperand as O;
        let mut params = *self;
        let pointers = [
            (&mut params.at.weights, O::Weights),
            (&mut params.at.gradient, O::Gradient),
            (&mut params.at.moment1, O::Moment1),
            (&mut params.at.moment2, O::Moment2),
            (&mut params.at.copy, O::Copy),
        ];
        let mut is_aligned = true;
        for (pointer, operand) in pointers {
            *pointer = at.of(operands, operand)?;
            is_aligned &= pointer.is_multiple_of(ACCESS);
        }
        params.at.step = at.of(operands, O::Step)?;
        if is_aligned {
            params.shape.flags |= abi::FLAG_ALIGNED16;
        }
        Ok(LaunchParams::of(&params))
    }
}

/// Kernel parameters without addresses and address-derived fields.
fn params(op: &CheckedOptimizer) -> OptimizerParams {
    let MomentFactors { decay1, gain1, decay2, gain2, eps } = op.rule.factors();
    let shape = OptimizerShape {
        len: u32::try_from(op.len).unwrap_or(u32::MAX),
        flags: if op.copy.is_some() { abi::FLAG_COPY } else { 0 },
        gradient: dtype_code(op.gradient),
        copy: op.copy.map_or(0, dtype_code),
        decay1,
        gain1,
        decay2,
        gain2,
        eps,
        reserved: 0,
    };
    OptimizerParams { shape, at: OptimizerPointers { len: op.len as u64, ..OptimizerPointers::default() } }
}

/// Launch sequence of a plan. `make` prepares its kernel.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel
/// variant, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedOptimizer,
    _: &OptimizerLaunch,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let kind = op.rule.kind();
    let ctas = op.len.div_ceil(GROUP * THREADS as usize) as u32;
    let launch = KernelLaunch {
        id: id(kind, variant),
        spec: source(kind, variant),
        geometry: Geometry { grid: [ctas, 1, 1], threads: THREADS, shared_bytes: 0 },
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: OptimizerOperand::ALL,
        updated: None,
        params: Arc::new(params(op)),
    };
    let step = launch.step::<OptimizerOperand>(make)?;
    let step = step.bind_all(op.operands());
    Ok(LaunchSequence::new::<OptimizerOperand>(op.kernel_name(), vec![step]))
}

impl Family<CheckedOptimizer> for Optimizer {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedOptimizer, info: &DeviceInfo) -> Result<Vec<OptimizerConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        if op.len.div_ceil(GROUP * THREADS as usize) > MOST_CTAS {
            return Err(Unsupported::new(format!("moves at most {} parameters", MOST_CTAS * GROUP * THREADS as usize)));
        }
        Ok(vec![OptimizerConfig { kernel: id(op.rule.kind(), variant), efficiency: EFFICIENCY }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedOptimizer,
        plan: &OptimizerLaunch,
    ) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedOptimizer, config: &OptimizerConfig) -> u64 {
        config.kernel.variant.map_or(0, |variant| source(op.rule.kind(), variant).source_hash().short())
    }
}
