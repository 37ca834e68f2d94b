//! Weight quantization, with llama.cpp's fallback formats.

use std::path::Path;

use qgemm_formats::model::Model;
use qgemm_formats::{Format, HostWeight, ModelShape, quantize_matrix};

use crate::architecture::{Settings, shape};
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

/// Properties that recipes of formats depend on ([`qgemm_formats::Recipe`]), of the
/// model that was opened at `path`: by GGUF metadata or `config.json`.
///
/// # Errors
/// When the model states neither its architecture nor its layers.
pub fn model_shape(model: &Model, path: impl AsRef<Path>) -> Result<ModelShape, Error> {
    match Settings::read(model, path.as_ref())? {
        Settings::Gguf { model, .. } => Ok(ModelShape::of_gguf(model)?),
        settings @ Settings::Config(_) => shape(&settings),
    }
}
