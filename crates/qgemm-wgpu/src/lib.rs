//! wgpu backend of qgemm for Vulkan, Metal and Direct3D 12
//! adapters, including software adapters.
//!
//! Kernels are WGSL, composed from the texts in `shaders/`: layout
//! constants of the weight, number conversions, the encoding of its codes,
//! the format's scales (`dequant/<stem>.wgsl`) and the family's main loop.
//! Weights are packed by sixteen rows, in the CPU's layout. Arithmetic
//! is f32; INT8 for quantized activations; or f16 with f32 sums
//! by cooperative matrices (feature `experimental-cooperative-matrix`).
//!
//! Adapters must support immediates of 96 bytes, nine storage
//! buffers per shader, and workgroups of 256. The backend launches
//! kernels but does not choose one.
#![deny(missing_docs)]

mod adapter;
mod bind_groups;
mod caller;
mod device;
mod event;
mod families;
mod limits;
mod memory;
mod pipeline;
mod shader;
mod shared;
mod source_hash;
mod template;
mod weight_code;

pub use adapter::{devices, open};
pub use caller::{from_device, report_loss, wrap_buffer};
pub use wgpu;
