//! Limits of kernels, which adapters must support.

/// Maximum bytes of parameters. A quarter of the 128 bytes of
/// immediates that adapters support stays free.
pub(crate) const PARAMS_BYTES: u32 = 96;

/// Maximum storage buffers of a kernel.
pub(crate) const STORAGE_BUFFERS: u32 = 9;
