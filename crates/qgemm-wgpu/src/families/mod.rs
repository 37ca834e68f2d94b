//! Kernel families of the backend, one module for each operation.

pub(crate) mod attention;
pub(crate) mod convert;
pub(crate) mod dequantize;
mod dispatch;
pub(crate) mod experts;
mod gather_rows;
pub(crate) mod gemm;
pub(crate) mod indexer;
pub(crate) mod kv_append;
pub(crate) mod kv_cache;
pub(crate) mod matmul;
pub(crate) mod modes;
pub(crate) mod norm;
mod operands;
pub(crate) mod optimizer;
pub(crate) mod quantize;
pub(crate) mod routing;
pub(crate) mod sampling;
mod unpack;

use std::sync::Arc;

use qgemm_hal::{Catalog, Device, HalError, with_operations};

use crate::device::WgpuDevice;
use crate::pipeline::Interface;
use crate::shared::Shared;

macro_rules! catalog {
    ($($name:ident: $op:ident($($part:ident),*) [$($text:literal $spec:ident($keys:ident)),*] $summary:literal,)*) => {
        /// Families of wgpu devices.
        pub(crate) const CATALOG: Catalog = Catalog { $($name: $name::FAMILIES,)* };
    };
}
with_operations!(catalog);

macro_rules! interfaces {
    ($($interface:path,)*) => {
        /// Kernel interfaces of all operations.
        pub(crate) static INTERFACES: &[&Interface] = &[$(&$interface,)*];

        const _: () = {
            let all = [$(&$interface,)*];
            let mut i = 0;
            while i < all.len() {
                assert!(all[i].params_bytes <= PARAMS_BYTES && all[i].bindings.len() <= STORAGE_BUFFERS as usize);
                i += 1;
            }
        };
    };
}
interfaces! {
    gemm::INTERFACE,
    convert::INTERFACE,
    experts::INTERFACE,
    experts::CHECK_INTERFACE,
    experts::GATHER_INTERFACE,
    experts::COMBINE_INTERFACE,
    routing::TOP_K_INTERFACE,
    routing::LISTS_INTERFACE,
    matmul::INTERFACE,
    quantize::INTERFACE,
    dequantize::INTERFACE,
    attention::INTERFACE,
    attention::EXTRA_INTERFACE,
    attention::CODES_INTERFACE,
    norm::INTERFACE,
    norm::QUANTIZED_INTERFACE,
    kv_append::INTERFACE,
    kv_append::FACTOR_INTERFACE,
    kv_append::BLOCKS_INTERFACE,
    indexer::SCORE_INTERFACE,
    indexer::CHOOSE_INTERFACE,
    optimizer::INTERFACE,
    gather_rows::STATUS_INTERFACE,
    sampling::PENALIZE_INTERFACE,
    sampling::SAMPLE_INTERFACE,
    sampling::LOG_PROBABILITIES_INTERFACE,
}

/// Maximum bytes of parameters. A quarter of the 128 bytes of
/// immediates that adapters support stays free.
pub(crate) const PARAMS_BYTES: u32 = 96;

/// Maximum storage buffers of a kernel.
pub(crate) const STORAGE_BUFFERS: u32 = 9;

/// Shared state of a device, which must belong to this backend.
fn shared_of<'d>(device: &'d dyn Device, what: &'static str) -> Result<&'d Arc<Shared>, HalError> {
    match device.as_any().downcast_ref::<WgpuDevice>() {
        Some(device) => Ok(&device.shared),
        None => Err(HalError::WrongDevice { device: device.info().id, what }),
    }
}

/// 64-bit FNV-1a over `texts`, independent of the compiler.
fn hash_of<'t>(texts: impl IntoIterator<Item = &'t str>) -> u64 {
    // Each text is terminated by a byte that no text contains.
    let bytes = texts.into_iter().flat_map(|text| text.bytes().chain([0xff]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_fnv() {
        assert_eq!(hash_of([]), 0xcbf2_9ce4_8422_2325);
        // "a" is af63dc4c8601ec8c.
        let a: u64 = 0xaf63_dc4c_8601_ec8c;
        assert_eq!(hash_of(["a"]), (a ^ 0xff).wrapping_mul(0x0000_0100_0000_01b3));
        assert_ne!(hash_of(["ab", "c"]), hash_of(["a", "bc"]));
    }
}
