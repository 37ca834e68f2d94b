//! candle's quantized tensors as weights of qgemm.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Error, Result, bail};
use qgemm_api::{Format, HostWeight, SharedBytes};

/// Weight of a quantized matrix `[N, K]`, from its blocks.
///
/// A tensor on a GPU is downloaded: read it onto
/// the CPU to spare that.
///
/// # Errors
/// When the tensor is no matrix, or qgemm has no such format.
pub fn host_weight(tensor: &QTensor) -> Result<HostWeight> {
    let (n, k) = tensor.shape().dims2()?;
    HostWeight::new(format_of(tensor.dtype())?, n, k, tensor.data()?.into_owned().into()).map_err(Error::wrap)
}

/// Weights of a stack of experts `[experts, N, K]`.
/// They share the tensor's bytes.
///
/// # Errors
/// When the tensor is no stack, or qgemm has no such format.
pub fn host_experts(tensor: &QTensor) -> Result<Vec<HostWeight>> {
    let (experts, n, k) = tensor.shape().dims3()?;
    let format = format_of(tensor.dtype())?;
    let blocks: SharedBytes = tensor.data()?.into_owned().into();
    let bytes = blocks.len() / experts.max(1);
    let expert = |e: usize| {
        let of_expert = blocks.slice(e * bytes..(e + 1) * bytes);
        let Some(of_expert) = of_expert else { bail!("experts: {} bytes are no {experts} experts", blocks.len()) };
        HostWeight::new(format, n, k, of_expert).map_err(Error::wrap)
    };
    (0..experts).map(expert).collect()
}

/// qgemm's format of candle's block type,
/// by its number in GGUF files.
fn format_of(dtype: GgmlDType) -> Result<Format> {
    let number = match dtype {
        GgmlDType::F32 => 0,
        GgmlDType::F16 => 1,
        GgmlDType::Q4_0 => 2,
        GgmlDType::Q4_1 => 3,
        GgmlDType::Q5_0 => 6,
        GgmlDType::Q5_1 => 7,
        GgmlDType::Q8_0 => 8,
        GgmlDType::Q8_1 => 9,
        GgmlDType::Q2K => 10,
        GgmlDType::Q3K => 11,
        GgmlDType::Q4K => 12,
        GgmlDType::Q5K => 13,
        GgmlDType::Q6K => 14,
        GgmlDType::Q8K => 15,
        GgmlDType::BF16 => 30,
    };
    match Format::from_ggml_type(number) {
        Some(format) => Ok(format),
        None => bail!("qgemm has no weights of {dtype:?}"),
    }
}
