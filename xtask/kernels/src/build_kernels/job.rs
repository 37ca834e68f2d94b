//! Jobs of the compiler processes.

use qgemm_cuda::{KernelSpec, Target};

/// One kernel for one target.
#[derive(Clone)]
pub struct Job {
    pub spec: KernelSpec,
    pub target: Target,
}
