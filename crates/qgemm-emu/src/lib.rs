//! The CUDA backend's kernels on the host: an ordinary device for each kernel variant, `emu:sm70` to `emu:sm120`, that
//! runs the same sources, finds faults that a GPU hides, and counts what a GPU would do.
#![deny(missing_docs)]

pub mod model;
