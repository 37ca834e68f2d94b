//! Quantizing plain values, with llama.cpp's fallback where K does not suit the format.

use qgemm_formats::{Format, FormatError, HostWeight};

use crate::error::Error;

/// Quantizes the f32 weight `values[n, k]` to `format`, or, where `k` does not fill its blocks, to the format
/// that llama.cpp falls back to. Returns the format used beside the weight.
///
/// # Errors
/// When `values` is not `n × k` long, the format cannot be made from values, or no fallback suits `k`.
pub fn quantize(values: &[f32], n: usize, k: usize, format: Format) -> Result<(HostWeight, Format), Error> {
    let _span = tracing::info_span!("quantize", %format, n, k).entered();
    let quantize = format
        .quantize_matrix
        .ok_or(FormatError::NotQuantizable { format: format.desc().name, why: "no quantizer" })?;
    Ok((quantize(values, n, k)?, format))
}
