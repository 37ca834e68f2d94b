//! Weight and activation formats: layout, offsets, quantization, dequantization,
//! packing for kernels, and readers of model files. Independent of devices.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod activation;
mod desc;
mod dtype;
pub mod element;
mod error;
mod experts;
mod f16_range;
pub mod float8;
pub mod formats;
mod gated;
mod importance;
pub mod model;
mod names;
pub mod packed_file;
pub mod prepack;
mod quantize;
pub mod quantize_x;
mod recipe;
pub mod repack;
mod sample;
mod shard;
mod sub_scale;
mod weight;
mod x_format;

pub use activation::{ActivationFormat, ActivationPlanes, QuantizedActivations};
pub use desc::{Encoding, FloatScale, Format, FormatDesc, QuantizeBlocks, QuantizeMatrix, ScalePlane, ScaleType};
pub use dtype::DType;
pub use element::{Element, ElementType};
pub use error::FormatError;
pub use experts::{EXPERT_ROWS, HostExperts};
pub use gated::{PAIR_ROWS, pair_bias};
/// 16-bit floating-point types.
pub use half;
pub use importance::ImportanceMatrix;
pub use quantize::{Quantized, format_for_k, quantize_by_importance, quantize_matrix};
pub use quantize_x::{XCode, XFactor, XParts, XRow};
pub use recipe::{ModelShape, Recipe, RecipeOptions, TypeChooser};
pub use shard::{ShardAxis, ShardFeatures, shard_of};
pub use sub_scale::{BitField, Minimum, SubCodes, SubScale, SubScales};
pub use weight::{HostWeight, NO_COLUMN, SharedBytes};
pub use x_format::{ScaleSpan, XFormat, XFormatDesc};
