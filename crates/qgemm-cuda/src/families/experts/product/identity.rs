//! Identity and macros of MoE kernels, which are kernels of `gemm`
//! compiled with experts.

use qgemm_hal::{KernelId, Spec};

use crate::families::gemm::Instance;

/// Macros that make a GEMM kernel an MoE
/// kernel; the second set is for CTAs that take
/// tiles of all experts in turn.
pub(super) const EXPERTS_MACRO: &str = "#define QG_EXPERTS 1\n";
pub(super) const EXPERT_TILES_MACROS: &str = "#define QG_EXPERTS 1\n#define QG_EXPERT_TILES 1\n";

/// Identity of the MoE kernel made from `instance`.
pub(super) fn product_id(instance: &Instance) -> KernelId {
    let id = instance.id();
    match id.spec {
        Spec::Gemm(spec) => KernelId { spec: Spec::Experts(spec), ..id },
        _ => id,
    }
}
