//! The wgpu backend: qgemm on any Vulkan, Metal or Direct3D 12 adapter, software adapters included.
//!
//! Kernels are WGSL, put together as text from `shaders/`: number conversions, the format's dequantization snippet
//! (`dequant/<stem>.wgsl`) and the family's main loop. Weights stay in their canonical layout; arithmetic is f32.
//! Needed of an adapter: immediates of 124 bytes and nine storage buffers a shader. Knows how to launch kernels,
//! not which one to choose.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod adapter;
mod device;
mod event;
mod families;
mod memory;
mod pipeline;
mod shader;
mod shared;

pub use adapter::{devices, open};
