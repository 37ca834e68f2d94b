//! Tests of the readers and the writer of model files.

mod checkpoint;
mod gguf_files;
mod grouped_layers;
mod hostile_files;
mod scaled_layers;
