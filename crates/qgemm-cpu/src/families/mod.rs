//! The kernel families of the CPU, a module an operation.

pub mod gemm;
