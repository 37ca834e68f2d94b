//! What the benchmarks share. They measure what happens on the host: quantizing, loading, planning, launching.
//! Kernels are measured by `qgemm bench`, which rotates weights beyond caches and replays CUDA graphs.
#![forbid(unsafe_code)]

use qgemm_api::{Format, HostWeight, quantize};

/// Formats of every kind of layout: legacy blocks, super-blocks, groups, FP8 blocks.
pub const FORMATS: [&str; 5] = ["q4_0", "q4_k", "q8_0", "int4_g128", "fp8_e4m3_block128"];

/// Edge of the square weight that host work is measured on.
pub const SIZE: usize = 1024;

/// Values without a pattern that a quantizer could profit from.
pub fn values() -> Vec<f32> {
    (0..SIZE * SIZE).map(|i| ((i as f32 * 0.618_034).fract() - 0.5) * 2.0).collect()
}

/// A weight in `format`.
///
/// # Panics
/// When the format is unknown or does not suit [`SIZE`]: a mistake in the benchmark.
pub fn weight(format: &str) -> HostWeight {
    let format: Format = format.parse().expect("a format of this build");
    quantize(&values(), SIZE, SIZE, format).expect("a size that suits every format").0
}
