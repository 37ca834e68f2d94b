//! Quantization of activations: builder, plan and quantized X.

mod description;
mod plan;
mod quantized_x;

pub use description::Quantization;
pub(crate) use plan::PlaneExtents;
pub use plan::{QuantizationArgs, QuantizationPlan};
pub use quantized_x::{QuantizedX, QuantizedXParts};
