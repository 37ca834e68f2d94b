//! Type and layout conversion: builder and plan.

mod conversion;
mod plan;

pub use conversion::Conversion;
pub use plan::{ConversionArgs, ConversionPlan};
