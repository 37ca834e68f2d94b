//! The kernel families of the CUDA backend, one file each, and the list of all their kernels.

use qgemm_hal::{KernelFamily, Variant};

use crate::probe;
use crate::spec::KernelSpec;

/// The families, in no particular order: the scheduler ranks what they offer.
pub(crate) static FAMILIES: &[&dyn KernelFamily] = &[];

/// Every kernel that a device of `variant` may ask for: what `cargo xtask build-kernels` compiles.
pub fn manifest(_variant: Variant) -> Vec<KernelSpec> {
    vec![probe::spec()]
}
