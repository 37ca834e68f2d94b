//! The wgpu backend: qgemm on any Vulkan, Metal or Direct3D 12 adapter, software adapters included.
//!
//! Kernels are WGSL, put together as text from `shaders/`: constants of the weight's layout, number conversions, the
//! encoding of its codes, the format's scales (`dequant/<stem>.wgsl`) and the family's main loop. Weights are packed by
//! sixteen rows, as the processor reads them; arithmetic is f32, of integers where activations are quantized to eight
//! bits, or in f16 with sums in f32 by cooperative matrices (feature `experimental-cooperative-matrix`). Needed of an
//! adapter: immediates of 96 bytes, nine storage buffers a shader, workgroups of 256. Knows how to launch kernels, not
//! which one to choose.
#![deny(missing_docs)]

mod adapter;
mod bind_groups;
mod caller;
mod device;
mod event;
mod families;
mod memory;
mod pipeline;
mod shader;
mod shared;
mod template;
mod weight_code;

pub use adapter::{devices, open};
pub use caller::{from_device, report_loss, wrap_buffer};
pub use wgpu;
