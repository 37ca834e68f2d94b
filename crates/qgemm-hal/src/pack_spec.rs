//! Identity keys of kernels that the scheduler does not rank:
//! weight packing and device probes.

use qgemm_formats::Format;

use crate::kernel_id::{Name, spec};

spec! {
    /// Kernel identity keys of weight packing.
    pub struct PackSpec {
        /// Format of the weight.
        w: Format,
        /// The fragment layout written.
        fragments: Name,
    }
}

spec! {
    /// Kernel identity keys of bandwidth probes.
    pub struct ProbeSpec {
        /// Bytes of each access.
        bytes: u32,
    }
}
