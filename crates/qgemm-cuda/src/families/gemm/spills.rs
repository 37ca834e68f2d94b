//! Which kernels need more registers than a thread has. Nobody can reckon that from a format's description: the compiler was asked
//! (`cargo xtask spills`), and `kernels.spills` has its answers.

use std::collections::HashSet;
use std::sync::LazyLock;

use super::instance::Instance;

static SPILLS: LazyLock<HashSet<&str>> = LazyLock::new(|| {
    let lines = include_str!("../../../kernels.spills").lines();
    lines.filter(|line| !line.starts_with('#')).collect()
});

/// Whether the committed list says that the kernel does not spill.
pub(super) fn fits_registers(instance: &Instance) -> bool {
    !SPILLS.contains(key(instance).as_str())
}

/// The kernel's line in the list: its name is not enough, for main loops choose between kernels of one name.
pub(super) fn key(instance: &Instance) -> String {
    let Instance { types, ctas_per_sm, parks_state, .. } = instance;
    let state = if *parks_state { "parked" } else { "in registers" };
    format!("{} {}: {ctas_per_sm} an SM, scheduler state {state}", types.variant, instance.name())
}
