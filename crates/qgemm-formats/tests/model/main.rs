//! Tests of model-file readers and writers.

mod auto_round;
mod bitsandbytes;
mod checkpoint;
mod expert_stacks;
mod gguf_converted;
mod gguf_files;
mod gguf_parts;
mod grouped_layers;
mod hostile_files;
mod integers;
mod mlx;
mod pack_quantized;
mod promised_scales;
mod scaled_layers;
mod settings;
mod torchao;
mod unserved_formats;
mod zero_points;
