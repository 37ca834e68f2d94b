//! qgemm's layers on [candle](candle_core)'s tensors.
//!
//! Every layer is a custom op of candle. It reads the storage of
//! its inputs in place, on the CPU and on CUDA, and runs on the
//! stream of candle's device. The only memory that it allocates is
//! candle's result.
//!
//! | candle | here |
//! |---|---|
//! | `QMatMul` | [`Linear`], with norm, bias and residual in its launch |
//! | `silu(gate(x)) * up(x)` | [`Linear::gated`] |
//! | Q, K and V of one `x` | [`FusedLinear`] |
//! | `RmsNorm` | [`RmsNorm`] |
//! | `rope`, `Tensor::cat`, `softmax`, `matmul` | [`KvCache`] |
//! | `indexed_moe_forward` | [`Experts`] |
//! | `quantized_llama::ModelWeights` | [`Llama`] |
//!
//! A product in place of `QMatMul`:
//!
//! ```
//! use candle_core::quantized::{GgmlDType, QTensor};
//! use candle_core::{Device, Module, Tensor};
//! use qgemm_candle::{Context, Linear};
//!
//! let device = Device::Cpu;
//! let weight = Tensor::rand(-1f32, 1f32, (64, 256), &device)?;
//! let weight = QTensor::quantize(&weight, GgmlDType::Q4K)?;
//!
//! let ctx = Context::new(&device)?;
//! let linear = Linear::from_qtensor(&ctx, &weight)?; // packed, once
//! let x = Tensor::ones((2, 256), candle_core::DType::F32, &device)?;
//! assert_eq!(linear.forward(&x)?.dims(), [2, 64]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! Errors of qgemm are [`candle_core::Error`]s with its text.
#![deny(missing_docs)]

mod context;
mod experts;
mod fused;
mod kv_cache;
mod linear;
mod llama;
mod norm;
mod operands;
mod operation;
mod per_thread;
mod plans;
mod weights;

pub use context::Context;
pub use experts::Experts;
pub use fused::{FusedLinear, Segments};
pub use kv_cache::{KvCache, KvCacheSize};
pub use linear::Linear;
pub use llama::{Llama, LlamaOptions};
pub use norm::RmsNorm;
pub use weights::{host_experts, host_weight};

/// The library behind the layers.
pub use qgemm_api;
