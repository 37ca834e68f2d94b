//! Identity keys of kernels that the scheduler does not rank:
//! weight packing, device probes and collectives.

use qgemm_formats::Format;

use crate::axis::axis;
use crate::kernel_id::spec;

axis! {
    /// Fragment layout that a packing kernel writes.
    pub enum PackFragments: "fragment layout" {
        /// Every 16-row matrix instruction.
        MmaM16: "mma_m16",
        /// Volta's `mma.m8n8k4`.
        MmaM8N8K4: "mma_m8n8k4",
    }
}

spec! {
    /// Kernel identity keys of weight packing.
    pub struct PackSpec {
        /// Format of the weight.
        w: Format,
        /// The fragment layout written.
        fragments: PackFragments,
    }
}

spec! {
    /// Kernel identity keys of bandwidth probes.
    pub struct ProbeSpec {
        /// Bytes of each access.
        bytes: u32,
    }
}

spec! {
    /// Kernel identity keys of an all-reduce over peer memory.
    pub struct AllReduceSpec {
        /// Most ranks of a group.
        ranks: u32,
    }
}
