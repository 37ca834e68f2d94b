//! Weight quantization, with llama.cpp's fallback formats.

use qgemm_formats::{Format, HostWeight, quantize_matrix};

use crate::error::Error;

/// Quantizes the f32 weight `values[n, k]` to `format`. Returns the
/// weight and its actual format.
///
/// If `k` does not fill blocks of the format, llama.cpp's fallback is
/// used (e.g. Q5_0 for Q4_K).
///
/// # Errors
/// When `values` is not `n × k` long or not finite, the format has no quantizer,
/// or no fallback fits `k`.
pub fn quantize(values: &[f32], n: usize, k: usize, format: Format) -> Result<(HostWeight, Format), Error> {
    qgemm_cpu::start_threads()?;
    let quantized = quantize_matrix(values, n, k, format)?;
    Ok((quantized.weight, quantized.used))
}
