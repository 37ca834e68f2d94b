//! Quantizing plain values, with llama.cpp's fallback where K does not suit the format.

use qgemm_formats::{Format, HostWeight, quantize_matrix};

use crate::error::Error;

/// Quantizes the f32 weight `values[n, k]` to `format`, or, where `k` does not fill its blocks, to the format
/// that llama.cpp falls back to (Q4_K to Q5_0, for example). Returns the format used beside the weight.
///
/// # Errors
/// When `values` is not `n × k` long or holds NaN or infinity, the format cannot be made from values alone, or
/// no fallback suits `k`.
pub fn quantize(values: &[f32], n: usize, k: usize, format: Format) -> Result<(HostWeight, Format), Error> {
    qgemm_cpu::start_threads()?;
    let quantized = quantize_matrix(values, n, k, format)?;
    Ok((quantized.weight, quantized.used))
}
