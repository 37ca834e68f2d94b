//! Matrices in another element type and order: what is to be converted, and its plan.

mod conversion;
mod plan;

pub use conversion::Conversion;
pub use plan::{ConversionArgs, ConversionPlan};
