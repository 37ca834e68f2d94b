//! `linear_attention`: token by token with states in registers, or in
//! chunks of tokens with matrix instructions.

mod chunked;
mod params;
mod recurrent;

use qgemm_hal::{CheckedLinearAttention, DeviceInfo, Families, HalError, LaunchSequence, LinearAttentionPlan, Variant};

use super::kernel_launch::MakeKernel;
use crate::spec::KernelSpec;

/// Families of `linear_attention`.
pub(super) const FAMILIES: Families<CheckedLinearAttention> = &[&recurrent::Recurrent, &chunked::Chunked];

/// All kernels of these families for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    recurrent::specs(variant).chain(chunked::specs(variant))
}

/// Launch sequence of a plan. `make` prepares each kernel.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel
/// variant, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedLinearAttention,
    plan: &LinearAttentionPlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    match plan.config.step_tokens {
        1 => recurrent::sequence(op, info, make),
        _ => chunked::sequence(op, info, make),
    }
}
