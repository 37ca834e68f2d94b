//! The keys of kernels that no scheduler ranks: packing a weight, and measuring a device.

use qgemm_formats::Format;

use crate::kernel_id::{Name, spec};

spec! {
    /// What tells kernels apart that pack weights.
    pub struct PackSpec {
        /// Format of the weight.
        w: Format,
        /// The fragment layout that is written.
        fragments: Name,
    }
}

spec! {
    /// What tells measuring kernels apart.
    pub struct ProbeSpec {
        /// Bytes of an access.
        bytes: u32,
    }
}
