//! Identity and constants of MoE kernels, which are kernels of `gemm`
//! compiled with experts.

use qgemm_hal::{KernelId, Spec};

use crate::families::gemm::Instance;
use crate::families::prelude::Prelude;

/// Constants that make a GEMM kernel an MoE kernel, whose CTAs may
/// take tiles of all experts in turn.
pub(super) fn constants_of(instance: &Instance, takes_tiles: bool) -> Prelude<'static> {
    Prelude { experts: Some(1), expert_tiles: Some(takes_tiles.into()), ..instance.constants }
}

/// Identity of the MoE kernel made from `instance`.
pub(super) fn product_id(instance: &Instance) -> KernelId {
    let id = instance.id();
    match id.spec {
        Spec::Gemm(spec) => KernelId { spec: Spec::Experts(spec), ..id },
        _ => id,
    }
}
