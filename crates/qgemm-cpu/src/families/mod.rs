//! The kernel families of the CPU, a module an operation.

pub mod attention;
pub mod convert;
pub mod dequantize;
pub mod experts;
pub mod gemm;
pub mod indexer;
pub mod kv_append;
pub mod matmul;
pub mod norm;
pub mod optimizer;
pub mod quantize;
pub mod routing;
pub mod unpack;
