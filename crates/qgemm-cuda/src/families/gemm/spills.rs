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
    fits_registers_as(instance.id(), instance)
}

/// The same of a kernel like `instance` with another identity.
pub(in crate::families) fn fits_registers_as(id: KernelId, instance: &Instance) -> bool {
    !SPILLS.contains(key(id, instance).as_str())
}

/// The line in the list of a kernel like `instance`: identities are the same whether scheduler state is parked or not. Ada's kernels
/// stand with Ampere's, whose instructions they issue: what spills on either is chosen for neither.
pub(in crate::families) fn key(id: KernelId, instance: &Instance) -> String {
    let variant = id.variant.map(|variant| if variant == Variant::Sm89 { Variant::Sm80 } else { variant });
    let state = if instance.parks_state { "parked" } else { "in registers" };
    format!("{}, scheduler state {state}", KernelId { variant, ..id })
}
