//! Tests of the readers and the writer of model files.

mod checkpoint;
mod expert_stacks;
mod gguf_files;
mod grouped_layers;
mod hostile_files;
mod promised_scales;
mod scaled_layers;
mod unserved_formats;
