//! Launch sequence of GEMM: an X prologue if the kernel cannot
//! read X in place, then the kernel.

use std::sync::Arc;

use qgemm_formats::DType;
use qgemm_hal::{
    CheckedConvert, CheckedGemm, ConvertOperand, Dense, DeviceInfo, GemmOperand, Geometry, HalError, LaunchPlan,
    LaunchSequence, LaunchStep, Operand, Variant,
};

use super::super::convert;
use super::super::kernel_launch::{KernelLaunch, MakeKernel, Params};
use super::fp8_kernels::fp8_kernels;
use super::instances::{instances, of_planes};
use super::params::{GemmLaunch, bound};
use super::projection::projection_sequence;
use super::sm120_block_scaled::block_scaled_kernels;

/// Launch sequence of `plan` on a device like `info`.
/// `make` prepares its kernels.
///
/// # Errors
/// [`HalError::KernelUnavailable`] when the backend lacks the plan's
/// kernel, [`HalError::WrongDevice`] when the device has no kernel
/// variant, and errors of `make`.
pub(in crate::families) fn sequence(
    op: &CheckedGemm,
    plan: &LaunchPlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    if plan.config.normalizes_x || !op.segments.is_empty() {
        return projection_sequence(op, plan, info, make);
    }
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let id = plan.config.kernel_id(op.format);
    let unavailable = |why: &str| HalError::KernelUnavailable {
        kernel: id.to_string(),
        target: info.arch.clone(),
        why: why.to_owned(),
    };
    let mut steps = Vec::new();
    let mut own = None;
    if plan.config.x_prologue.is_some() {
        let prologue = op.x_prologue(plan).ok_or_else(|| unavailable("its X prologue does not fit the problem"))?;
        steps.push(prologue_step(op, &prologue, plan, variant, info, make)?);
        own = Some(op.after(&prologue));
    }
    let own = own.as_ref().unwrap_or(op);
    let name = own.kernel_name(plan.config.family);
    let none = || unavailable("it is none of the variant's kernels");
    let fp8 = own.x.planes.and_then(|planes| {
        let mut all = fp8_kernels(op.format, own.x.format, variant).into_iter();
        all.find(|kernel| kernel.config().kernel_id(op.format) == id).map(|kernel| (kernel, planes))
    });
    let block_scaled = own.x.planes.and_then(|planes| {
        let mut all = block_scaled_kernels(op.format, own.x.format, variant).into_iter();
        all.find(|kernel| kernel.config().kernel_id(op.format) == id).map(|kernel| (kernel, planes))
    });
    let (spec, params) = if let Some((kernel, planes)) = fp8 {
        (kernel.spec(), kernel.launch(own, &planes, plan))
    } else if let Some((kernel, planes)) = block_scaled {
        (kernel.spec(), kernel.launch(own, &planes, plan))
    } else {
        let (x, all) = match own.plain_x() {
            Ok(x) => (x, instances(op.format, x.dtype, variant)),
            // Strides of the codes, with the type that the
            // epilogue's fast path writes.
            Err(_) => {
                (Dense { row_stride: own.x.row_stride, ..Dense::rows_of(DType::F16, 0) }, of_planes(op.format, variant))
            }
        };
        let instance = all.iter().find(|i| i.id() == id).ok_or_else(none)?;
        (instance.spec(), Arc::new(GemmLaunch::new(own, &x, plan, instance)) as Arc<dyn Params>)
    };
    let launch = KernelLaunch {
        id,
        spec,
        geometry: Geometry {
            grid: plan.grid_of_ctas(),
            threads: plan.config.threads,
            shared_bytes: plan.config.shared_bytes,
        },
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: GemmOperand::ALL,
        updated: own.residual_in_d.then(|| GemmOperand::D.slot()),
        params,
    };
    steps.push(bound(launch.step::<GemmOperand>(make)?, own, plan));
    Ok(LaunchSequence::new::<GemmOperand>(name, steps))
}

/// The launch that writes X into the workspace.
fn prologue_step(
    op: &CheckedGemm,
    prologue: &CheckedConvert,
    plan: &LaunchPlan,
    variant: Variant,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchStep, HalError> {
    let mut step = convert::launch(prologue, variant, info).step::<ConvertOperand>(make)?;
    step = step.bind(ConvertOperand::X, GemmOperand::X);
    if prologue.gathers {
        step = step.bind(ConvertOperand::Order, GemmOperand::KOrder);
    }
    if let Some(region) = plan.workspace.x {
        step = step.bind_part(ConvertOperand::D, GemmOperand::Workspace, region.x_of(op.m));
        if let Some(factors) = region.factors_of(op.m) {
            step = step.bind_part(ConvertOperand::RowFactors, GemmOperand::Workspace, factors);
        }
    }
    Ok(step)
}
