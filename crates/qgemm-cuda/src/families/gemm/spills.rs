//! Which kernels need more registers than a thread has. Nobody can reckon that from a format's description: the compiler was asked
//! (`cargo xtask spills`), and `kernels.spills` has its answers.

use std::collections::HashSet;
use std::sync::LazyLock;

use qgemm_hal::{KernelId, Variant};

use super::instance::Instance;

static SPILLS: LazyLock<HashSet<&str>> = LazyLock::new(|| {
    let lines = include_str!("../../../kernels.spills").lines();
    lines.filter(|line| !line.starts_with('#')).collect()
});

/// Whether the committed list says that the kernel does not spill.
pub(super) fn fits_registers(instance: &Instance) -> bool {
    !SPILLS.contains(key(instance).as_str())
}

/// The kernel's line in the list: identities are the same whether scheduler state is parked or not. Ada's kernels stand with
/// Ampere's, whose instructions they issue: what spills on either is chosen for neither.
pub(super) fn key(instance: &Instance) -> String {
    let id = instance.id();
    let variant = id.variant.map(|variant| if variant == Variant::Sm89 { Variant::Sm80 } else { variant });
    let state = if instance.parks_state { "parked" } else { "in registers" };
    format!("{}, scheduler state {state}", KernelId { variant, ..id })
}
