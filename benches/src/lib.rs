//! Common parts of the host benchmarks: quantizing, loading, planning, launching.
//!
//! `qgemm bench` measures kernels, with weights rotated beyond
//! caches and with CUDA graphs.
#![forbid(unsafe_code)]

use qgemm_api::{Format, HostWeight, quantize};

/// Formats of every layout kind: legacy blocks, super-blocks, groups, FP8 blocks.
pub const FORMATS: [&str; 5] = ["q4_0", "q4_k", "q8_0", "int4_g128", "fp8_e4m3_block128"];

/// Edge of the square weight.
pub const SIZE: usize = 1024;

/// Values without a pattern for quantizers to exploit.
pub fn values() -> Vec<f32> {
    (0..SIZE * SIZE).map(|i| ((i as f32 * 0.618_034).fract() - 0.5) * 2.0).collect()
}

/// Random weight in `format`.
///
/// # Panics
/// When the format is unknown or does not fit [`SIZE`]: a mistake in the benchmark.
pub fn weight(format: &str) -> HostWeight {
    let format: Format = format.parse().expect("a format of this build");
    quantize(&values(), SIZE, SIZE, format).expect("a size that suits every format").0
}
