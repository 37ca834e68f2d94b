//! Kernel families of the CPU, one module
//! for each operation.

pub mod attention;
pub mod convert;
pub mod dequantize;
pub mod experts;
pub mod gather_rows;
pub mod gemm;
pub mod indexer;
pub mod kv_append;
pub mod linear_attention;
pub mod matmul;
pub mod merge_attention;
pub mod norm;
pub mod optimizer;
pub mod quantize;
pub mod routing;
pub mod sampling;
pub mod short_conv;
pub mod unpack;

use qgemm_hal::{Catalog, with_operations};

macro_rules! catalog {
    ($($name:ident: $op:ident($($part:ident),*) [$($text:literal $spec:ident($keys:ident)),*] $summary:literal,)*) => {
        /// Families of the CPU.
        pub const CATALOG: Catalog = Catalog { $($name: $name::FAMILIES,)* };
    };
}
with_operations!(catalog);
