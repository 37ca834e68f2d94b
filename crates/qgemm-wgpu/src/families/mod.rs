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
pub(crate) mod linear_attention;
pub(crate) mod matmul;
pub(crate) mod merge_attention;
pub(crate) mod modes;
pub(crate) mod norm;
mod operands;
pub(crate) mod optimizer;
pub(crate) mod quantize;
pub(crate) mod routing;
pub(crate) mod sampling;
pub(crate) mod short_conv;
mod unpack;

use qgemm_hal::{Catalog, with_operations};

use crate::limits::{PARAMS_BYTES, STORAGE_BUFFERS};
use crate::pipeline::Interface;

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
                assert!(all[i].params_bytes <= PARAMS_BYTES && all[i].count() <= STORAGE_BUFFERS);
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
    attention::combine::INTERFACE,
    merge_attention::INTERFACE,
    linear_attention::GATHER_INTERFACE,
    linear_attention::INTERFACE,
    norm::INTERFACE,
    norm::QUANTIZED_INTERFACE,
    kv_append::INTERFACE,
    kv_append::FACTOR_INTERFACE,
    kv_append::BLOCKS_INTERFACE,
    indexer::SCORE_INTERFACE,
    indexer::CHOOSE_INTERFACE,
    optimizer::INTERFACE,
    gather_rows::STATUS_INTERFACE,
    short_conv::RESULT_INTERFACE,
    short_conv::STATE_INTERFACE,
    sampling::PENALIZE_INTERFACE,
    sampling::SAMPLE_INTERFACE,
    sampling::LOG_PROBABILITIES_INTERFACE,
}
