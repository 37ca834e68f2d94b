//! qgemm, candle and burn in one program, with one cudarc and one wgpu.

use std::sync::Arc;

use burn::tensor::Tensor;
use cudarc::driver::CudaStream;
use qgemm_api::{Device, HalError, Stream, cuda};

/// Rows of a candle tensor and of a burn tensor.
///
/// # Errors
/// When the candle tensor is no matrix.
pub fn rows(candle: &candle_core::Tensor, burn: &Tensor<2>) -> candle_core::Result<(usize, usize)> {
    Ok((candle.dims2()?.0, burn.dims()[0]))
}

/// A stream of the engine's cudarc, which is qgemm's.
///
/// # Errors
/// When it belongs to another device.
pub fn stream(device: &dyn Device, stream: Arc<CudaStream>) -> Result<Stream, HalError> {
    cuda::from_cudarc_stream(device, stream)
}
