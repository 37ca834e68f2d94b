//! [`LaunchParams`]: the single by-value parameter of a kernel, as bytes.

use std::fmt;

use bytemuck::Pod;

/// Size of the largest parameter: MoE GEMM with two
/// tensor maps of X and one of W.
const MOST_BYTES: usize = 832;

/// The parameter of one launch. Tensor maps in it
/// are aligned to 64 bytes.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub struct LaunchParams {
    bytes: [u8; MOST_BYTES],
    /// Bytes used.
    len: usize,
}

impl LaunchParams {
    /// Wraps `params`.
    pub(crate) fn of<T: Pod>(params: &T) -> Self {
        const { assert!(size_of::<T>() <= MOST_BYTES, "a parameter is larger than there is room for") };
        let mut bytes = [0; MOST_BYTES];
        bytes[..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(params));
        Self { bytes, len: size_of::<T>() }
    }

    /// The bytes passed to the kernel.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl fmt::Debug for LaunchParams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LaunchParams({} bytes)", self.len)
    }
}
