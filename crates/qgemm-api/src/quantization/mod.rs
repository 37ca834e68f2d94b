//! Activations in codes and scales: what is to be quantized, its plan, and what comes of it.

mod description;
mod plan;
mod quantized_x;

pub use description::Quantization;
pub(crate) use plan::PlaneExtents;
pub use plan::{QuantizationArgs, QuantizationPlan};
pub use quantized_x::{QuantizedX, QuantizedXParts};
