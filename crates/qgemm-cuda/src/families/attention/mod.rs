//! `attention`: softmax over keys and the mean of their values. By FMA for few queries, every type and every chip (`simt`), by matrix
//! instructions for many (`mma`), and for few whose heads share keys (`decode`).

mod decode;
mod mma;
pub(super) mod params;
mod simt;

use qgemm_hal::{AttentionFamilies, AttentionPlan, CheckedAttention, DeviceInfo, HalError, LaunchSequence, Variant};

use super::kernel_launch::MakeKernel;
use crate::spec::KernelSpec;

/// What CUDA devices offer.
pub(super) const FAMILIES: AttentionFamilies = &[&simt::AttentionSimt, &mma::AttentionMma, &decode::AttentionDecode];

/// Every kernel of the families on devices of `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    simt::specs(variant).chain(mma::specs(variant)).chain(decode::specs(variant))
}

/// The launches of a plan, whose kernels `make` makes ready.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel variant, and those of `make`.
pub fn attention_sequence(
    op: &CheckedAttention,
    plan: &AttentionPlan,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    match plan.config.kernel.family.as_str() {
        mma::NAME => mma::sequence(op, &plan.config, variant, make),
        decode::NAME => decode::sequence(op, &plan.config, variant, make),
        _ => simt::sequence(op, &plan.config, variant, make),
    }
}
