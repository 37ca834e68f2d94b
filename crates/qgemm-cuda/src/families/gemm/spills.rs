//! Kernels that exceed the registers of a thread. This cannot
//! be computed from a format's description: `cargo xtask spills` asks
//! the compiler and writes `kernels.spills`.

use std::collections::HashSet;
use std::sync::LazyLock;

use qgemm_hal::{KernelId, Variant};

use super::instance::Instance;

static SPILLS: LazyLock<HashSet<&str>> = LazyLock::new(|| {
    let lines = include_str!("../../../kernels.spills").lines();
    lines.filter(|line| !line.starts_with('#')).collect()
});

/// Whether the kernel does not spill, according
/// to the committed list.
pub(super) fn fits_registers(instance: &Instance) -> bool {
    fits_registers_as(instance.id(), instance)
}

/// As [`fits_registers`], with another identity for `instance`.
pub(in crate::families) fn fits_registers_as(id: KernelId, instance: &Instance) -> bool {
    !SPILLS.contains(key(id, instance).as_str())
}

/// Key of a kernel like `instance` in the list. It
/// also says whether scheduler state is parked, which identities do
/// not. Ada shares the entries of Ampere, whose instructions it
/// issues: a spill on either excludes the kernel on both.
pub(in crate::families) fn key(id: KernelId, instance: &Instance) -> String {
    let variant = id.variant.map(|variant| if variant == Variant::Sm89 { Variant::Sm80 } else { variant });
    let state = if instance.state_in_shared { "parked" } else { "in registers" };
    format!("{}, scheduler state {state}", KernelId { variant, ..id })
}
